"""Blocks of masks at random places of packed documents, and what their rows see and say: how block heads are trained.

A block begins with an anchor, a token of an answer at position a, and stands at a, a+1, …. Its rows see the target's
features strictly before a, because at decoding the target has not processed the anchor yet, and the block itself.
The layout of rows is that of `specflow.heads.dflash.DFlashConfig.sample_from_anchor`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from specflow.heads.dflash import BlockLayer
from specflow.heads.layers import Attend
from specflow.kernels.noise import uniform
from specflow.training.objective import TrainBatch

_ANCHORS = 81  # domain of the numbers that choose anchors


@dataclass(frozen=True)
class AnchoredBlocks:
    """N blocks of `size` rows over a pack of T tokens; draft j of a block is its j-th one, j = 0 … J-1."""

    size: int
    anchors: Tensor  # [N] int64: row of the pack, ascending
    valid: Tensor  # [N] bool; the others fill up and count for nothing
    positions: Tensor  # [N, size] int64, in the document
    labels: Tensor  # [N, J] int64: row of the pack that draft j should say; any row where it does not count
    counted: Tensor  # [N, J] bool: the label is the target's own, in the anchor's document, and so are those before it


def place_blocks(batch: TrainBatch, count: int, size: int, *, sample_from_anchor: bool) -> AnchoredBlocks:
    """Place up to `count` blocks on a pack, at anchors drawn from `batch.seed`; no read by the host.

    Anchors are tokens of an answer that another one follows. Where there are fewer than `count`, each is used once.
    """
    device, total = batch.token_ids.device, len(batch.token_ids)
    rows = torch.arange(total, device=device)
    followed = batch.predicted[:-1] & batch.predicted[1:] & (batch.documents[:-1] == batch.documents[1:])
    able = F.pad(followed & (batch.documents[:-1] >= 0), (0, 1))
    draws = uniform(torch.full_like(rows, batch.seed), rows, _ANCHORS).masked_fill(~able, -1.0)
    best = draws.topk(min(count, total))
    anchors, order = best.indices.sort()
    valid = best.values[order] > 0
    inside = torch.arange(size, device=device)
    first = 0 if sample_from_anchor else -1
    labels = anchors.unsqueeze(1) + torch.arange(1, size + 1 + first, device=device)
    exists = labels < total
    labels = labels.clamp_(max=total - 1)
    own = batch.documents[labels] == batch.documents[anchors].unsqueeze(1)
    counted = exists & own & batch.predicted[labels] & valid.unsqueeze(1)
    return AnchoredBlocks(
        size=size,
        anchors=anchors,
        valid=valid,
        positions=batch.positions[anchors].unsqueeze(1) + inside,
        labels=labels,
        counted=counted.long().cumprod(1).bool(),
    )


def visible_keys(batch: TrainBatch, blocks: AnchoredBlocks, rule: BlockLayer) -> Tensor:
    """What the rows of all blocks see, bool [N * size, T + N * size]: the pack's features, then the blocks' rows.

    Rows of blocks that are not valid see their own block only.
    """
    size, total = blocks.size, len(blocks.anchors)
    places = blocks.positions.flatten().unsqueeze(1)  # [Q, 1]
    owners = torch.arange(total, device=places.device).repeat_interleave(size)  # [Q]
    documents, starts = batch.documents[blocks.anchors], batch.positions[blocks.anchors]
    context = batch.documents == documents.unsqueeze(1)  # [N, T]
    context &= (batch.positions < starts.unsqueeze(1)) & blocks.valid.unsqueeze(1)
    context = context[owners]  # [Q, T]
    block = owners.unsqueeze(1) == owners
    inside = torch.arange(size, device=places.device, dtype=torch.int16).repeat(total)
    ahead = inside - inside.unsqueeze(1)  # [Q, Q], meaningful inside a block
    if rule.causal:
        block &= ahead <= 0
    if rule.window is not None:
        context &= places - batch.positions < rule.window
        block &= ahead.abs() < rule.window
    return torch.cat([context, block], 1)


def attend_blocks(
    batch: TrainBatch,
    blocks: AnchoredBlocks,
    rules: Sequence[BlockLayer],
    context: Sequence[tuple[Tensor, Tensor]],
) -> Attend:
    """Attention of all blocks' rows; rules and context (keys and values [T, Hkv, D] of the pack) go by layer."""
    masks = {rule: visible_keys(batch, blocks, rule) for rule in set(rules)}

    def run(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        before_keys, before_values = context[layer]
        keys, values = torch.cat([before_keys, key]), torch.cat([before_values, value])
        return masked_attention(query, keys, values, masks[rules[layer]])

    return run


def masked_attention(query: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """query [Q, Hq, D], keys and values [S, Hkv, D], visible bool [Q, S]; returns [Q, Hq, D] in the values' dtype.

    On a GPU scores never exist for all heads, rows and keys: they would take tens of gigabytes for 4096 rows. The
    kernels that stream them take a mask but no shared heads, so keys and values are repeated, which costs little.
    """
    shared = query.shape[1] // keys.shape[1]
    rows, before, carried = (part.to(values.dtype).transpose(0, 1).unsqueeze(0) for part in (query, keys, values))
    if query.device.type == "cpu":
        output = F.scaled_dot_product_attention(rows, before, carried, attn_mask=visible, enable_gqa=shared > 1)
    else:
        before, carried = (part.repeat_interleave(shared, 1) for part in (before, carried))
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]):
            output = F.scaled_dot_product_attention(rows, before, carried, attn_mask=visible)
    return output[0].transpose(0, 1)


def decayed(counted: Tensor, gamma: float) -> Tensor:
    """Weights exp(-j / gamma) of drafts [N, J] that count, 0 elsewhere: the first drafts decide how many are kept."""
    steps = torch.arange(counted.shape[1], device=counted.device)
    return counted * torch.exp(-steps / gamma)


def paced(losses: Tensor, counted: Tensor, alpha: float) -> Tensor:
    """D-PACE weights of drafts [N, J] from their cross-entropies, without a gradient (speculators RFC 979).

    With r_i = (1 - alpha) exp(-loss_i) + alpha, draft j weighs as much as all products r_0 … r_i with i >= j: the share
    of the expected length that hangs on it.
    """
    chances = ((1 - alpha) * torch.exp(-losses) + alpha) * counted
    return chances.cumprod(1).flip(1).cumsum(1).flip(1) * counted
