"""Attention over paged keys and values: plain torch reference.

Pages are `[num_blocks, block_size, Hkv, D]`. A step's tokens are packed; requests with the same number of query tokens
stand side by side and form one group, so that each group is one dense batch without padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class QueryGroup:
    """Adjacent requests with equally many query tokens."""

    first_request: int
    num_requests: int  # b
    first_token: int
    query_len: int  # Q
    max_seq_len: int  # most key positions any of them sees, host knowledge
    first_key: int | None  # b == 1 and blocks in a row: first slot of the request's pages, read as a view
    masks: dict[int, torch.Tensor | None] = field(default_factory=dict)  # window -> mask, shared by all layers

    @property
    def tokens(self) -> slice:
        """The group's packed tokens."""
        return slice(self.first_token, self.first_token + self.num_requests * self.query_len)


@dataclass(frozen=True)
class AttentionInputs:
    """Where keys and values go, and which of them each query token sees."""

    positions: torch.Tensor  # [T] int64
    slot_mapping: torch.Tensor  # [T] int64: block * block_size + offset; padded tokens write into block 0
    block_table: torch.Tensor  # [B, max_blocks] int64
    seq_len: torch.Tensor  # [B] int64: key positions that exist after this step's writes
    groups: Sequence[QueryGroup]


def plan_groups(
    query_len: np.ndarray, seq_len: np.ndarray, block_table: np.ndarray, block_size: int
) -> tuple[QueryGroup, ...]:
    """Split B requests (host arrays, [B], [B], [B, max_blocks]) into groups of equal query length."""
    groups: list[QueryGroup] = []
    first, token = 0, 0
    while first < len(query_len):
        last = first
        while last < len(query_len) and query_len[last] == query_len[first]:
            last += 1
        longest = int(seq_len[first:last].max())
        first_key = _contiguous_start(block_table[first], longest, block_size) if last - first == 1 else None
        groups.append(QueryGroup(first, last - first, token, int(query_len[first]), longest, first_key))
        token += (last - first) * int(query_len[first])
        first = last
    return tuple(groups)


def _contiguous_start(blocks: np.ndarray, length: int, block_size: int) -> int | None:
    count = -(-length // block_size)
    if int(blocks[count - 1]) - int(blocks[0]) != count - 1 or (np.diff(blocks[:count]) != 1).any():
        return None
    return int(blocks[0]) * block_size


def write_pages(pages: torch.Tensor, slot_mapping: torch.Tensor, values: torch.Tensor) -> None:
    """Store values [T, Hkv, D] at their slots of pages [num_blocks, block_size, Hkv, D], in place."""
    pages.view(-1, *pages.shape[2:]).index_copy_(0, slot_mapping, values)


def paged_attention(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    inputs: AttentionInputs,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of query [T, Hq, Dk] over the pages; returns [T, Hq, Dv].

    A token at position p sees key positions j <= p, and with a window only p - j < window. softcap c turns scores s
    into c * tanh(s / c). sinks [Hq] are extra logits per head that take part in the softmax and carry no value
    (GPT-OSS). Scores and softmax are float32.
    """
    output = query.new_empty(query.shape[0], query.shape[1], value_pages.shape[-1])
    for group in inputs.groups:
        keys, values = (_read_pages(pages, inputs, group) for pages in (key_pages, value_pages))
        mask = _mask(inputs, group, window)
        grouped = query[group.tokens].view(group.num_requests, group.query_len, *query.shape[1:]).transpose(1, 2)
        if softcap is None and sinks is None:
            result = _fused(grouped, keys, values, mask, scale)
        else:
            result = _explicit(grouped, keys, values, mask, scale, softcap, sinks)
        output[group.tokens] = result.transpose(1, 2).reshape(-1, *output.shape[1:])
    return output


def _read_pages(pages: torch.Tensor, inputs: AttentionInputs, group: QueryGroup) -> torch.Tensor:
    """Keys or values of a group, [b, Hkv, S, D]; a view of the pages for a single request with adjacent blocks."""
    if group.first_key is not None:
        flat = pages.view(-1, *pages.shape[2:])
        return flat[group.first_key : group.first_key + group.max_seq_len].unsqueeze(0).transpose(1, 2)
    count = -(-group.max_seq_len // pages.shape[1])
    last = group.first_request + group.num_requests
    blocks = inputs.block_table[group.first_request : last, :count]
    gathered = pages[blocks].flatten(1, 2)[:, : group.max_seq_len]
    return gathered.transpose(1, 2)


def _mask(inputs: AttentionInputs, group: QueryGroup, window: int | None) -> torch.Tensor | None:
    """Who sees whom, [b, 1, Q, S] bool; None when every key is visible. Built once per step and window."""
    key = window or 0
    if key not in group.masks:
        alone = group.num_requests == 1 and group.query_len == 1
        if alone and (window is None or group.max_seq_len <= window):
            group.masks[key] = None
        else:
            positions = inputs.positions[group.tokens].view(group.num_requests, 1, group.query_len, 1)
            keys = torch.arange(group.max_seq_len, device=positions.device)
            mask = keys <= positions
            if window is not None:
                mask &= keys > positions - window
            group.masks[key] = mask
    return group.masks[key]


def _fused(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Through torch's fused attention, which keeps scores in float32."""
    grouped = query.shape[1] != keys.shape[1]
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale, enable_gqa=grouped)


def _explicit(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """The definition: query [b, Hq, Q, Dk], keys and values [b, Hkv, S, D] -> [b, Hq, Q, Dv]."""
    repeats = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1)
    scores = (query.float() @ keys.float().transpose(2, 3)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        column = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    weights = torch.softmax(scores, -1)
    if sinks is not None:
        weights = weights[..., :-1]
    return (weights @ values.float()).to(query.dtype)
