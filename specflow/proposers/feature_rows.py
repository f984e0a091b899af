"""Rows of the target pass that stay, and where a head keeps what it makes of them.

Every committed position passes through the target exactly once while its request holds a slot, and `propose` is called
after each pass; so a head that handles these rows every time has its own pages complete, through prompt chunks,
rejected drafts and pre-emption alike, and keeps no books.
"""

from dataclasses import dataclass

import numpy as np
import torch

from specflow.core.attention import AttentionInputs, QueryGroup
from specflow.core.upload import to_device
from specflow.errors import ProposerError
from specflow.kernels.draft_rows import kept_rows
from specflow.kernels.paged_attention import plan_groups
from specflow.proposers.base import Features, ProposeContext


@dataclass(frozen=True)
class FeatureRows:
    """N rows of the features, request after request, in order of position."""

    rows: torch.Tensor  # [N] int64: row in `Features.hidden`
    owners: torch.Tensor  # [N] int64: request of the context
    last: torch.Tensor  # [B] int64: which of the N rows is the request's newest kept position
    attention: AttentionInputs  # positions [N], slots [N] and the groups for causal attention over the head's pages
    all_rows: bool = False  # the N rows may be all rows of the features, in their order


def features_of(context: ProposeContext, name: str) -> Features:
    """The features of the step. Raises `ProposerError` when the target gave none (user case C78)."""
    if context.features is None:
        raise ProposerError(f"proposer {name!r} needs the target's hidden states, and this target delivered none.")
    return context.features


def captured(context: ProposeContext, rows: FeatureRows, layers: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Hidden states of these rows in the layers, [N, A, E]. The context must have features."""
    assert context.features is not None
    hidden = [context.features.hidden[layer] for layer in layers]
    if not rows.all_rows:
        hidden = [part.index_select(0, rows.rows) for part in hidden]
    return torch.stack(hidden, 1).to(dtype)


def feature_rows(context: ProposeContext, block_size: int, width: int, name: str) -> FeatureRows:
    """Rows of all B requests of a context; `name` is the proposer's, for messages.

    In a static context, and on a GPU, a step of pure decoding (at most `width` kept rows per request) gives `width`
    rows for each, so that its shapes do not depend on what was accepted: surplus rows repeat a kept one and write to
    block 0, which nobody reads. Elsewhere, and with prompt chunks, only rows that exist are there.
    """
    features = features_of(context, name)
    short = int(context.host.chunk_len.max(initial=0)) <= width
    if context.static or (short and context.slots.device.type != "cpu"):
        return _static_rows(context, features, block_size, width)
    return _exact_rows(context, features, block_size)


def _exact_rows(context: ProposeContext, features: Features, block_size: int) -> FeatureRows:
    """The rows that exist. Where they stand is known to the host, and arithmetic on a few numbers is fastest there."""
    host, device = context.host, context.slots.device
    starts = np.cumsum(host.chunk_len) - host.chunk_len
    owners = np.repeat(np.arange(len(starts)), host.chunk_len)
    step = np.arange(len(owners)) - starts[owners]
    positions = host.chunk_start[owners] + step
    slots = host.block_table[owners, positions // block_size] * block_size + positions % block_size
    on_device = [to_device(part, device) for part in (owners, step, positions, slots)]
    attention = _attention(context, on_device[2], on_device[3], host.chunk_len, block_size)
    rows = features.start.index_select(0, on_device[0]) + on_device[1]
    return FeatureRows(rows, on_device[0], to_device(starts + host.chunk_len - 1, device), attention)


def _static_rows(context: ProposeContext, features: Features, block_size: int, width: int) -> FeatureRows:
    """`width` rows for each request, found on the device."""
    found = kept_rows(features.start, features.num_valid, features.positions, context.block_table, block_size, width)
    attention = AttentionInputs(
        positions=found.positions,
        slot_mapping=found.slots,
        block_table=context.block_table,
        seq_len=found.seq_len,
        groups=(QueryGroup(0, len(context.slots), 0, width, _longest(context), None, is_bound=context.static),),
    )
    # In a step as wide as this, row j of a request is the features' own; what was rejected goes to block 0 like any
    # other surplus.
    whole = context.static and all(len(part) == len(found.rows) for part in features.hidden.values())
    return FeatureRows(found.rows, found.owners, found.last, attention, whole)


def _longest(context: ProposeContext) -> int:
    """Most positions that any request has kept, or can."""
    return int((context.host.chunk_start + context.host.chunk_len).max())


def _attention(
    context: ProposeContext, positions: torch.Tensor, slots: torch.Tensor, lengths: np.ndarray, block_size: int
) -> AttentionInputs:
    ends = context.host.chunk_start + context.host.chunk_len
    return AttentionInputs(
        positions=positions,
        slot_mapping=slots,
        block_table=context.block_table,
        seq_len=to_device(ends, context.slots.device),
        groups=plan_groups(lengths, ends, context.host.block_table, block_size),
    )
