"""Attention over paged keys and values: plain torch reference.

Pages are `[num_blocks, block_size, Hkv, D]`. A step's tokens are packed; requests with the same number of query tokens
stand side by side and form one group, so that each group is one dense batch without padding. Query heads that share
a KV head are handled as more query rows of that head, which spares repeating keys and values.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from specflow.core.attention import AttentionInputs, QueryGroup
from specflow.kernels.rotary import rotate

# Past this many query tokens the folded mask, with one row per query head and token, costs more than folding saves.
_MOST_FOLDED = 64


@dataclass(frozen=True)
class _Rule:
    """Which keys a token sees, see `paged_attention`."""

    window: int | None
    causal: bool


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


def write_pages(pages: torch.Tensor, slot_mapping: torch.Tensor, values: torch.Tensor, *, clean: bool = False) -> None:
    """Store values [T, Hkv, D] at their slots of pages [num_blocks, block_size, Hkv, D], in place.

    NaN becomes 0 and infinity the largest number in float16, and with `clean` in every dtype.
    """
    if clean or values.dtype == torch.float16:
        # Half precision overflows in some models; a NaN left behind would spoil whoever gets the block next,
        # because a masked key still multiplies its value by zero.
        values = values.nan_to_num()
    pages.view(-1, *pages.shape[2:]).index_copy_(0, slot_mapping, values)


def write_keys_values(
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    clean: bool = False,
) -> None:
    """`write_pages` for keys [T, Hkv, Dk] and values [T, Hkv, Dv] of the same slots."""
    write_pages(key_pages, slot_mapping, keys, clean=clean)
    write_pages(value_pages, slot_mapping, values, clean=clean)


def rotate_and_write(
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    heads: torch.Tensor,
    values: torch.Tensor,
    rotary_rows: torch.Tensor,
) -> torch.Tensor:
    """Rotate queries and keys, heads [T, Hq + Hkv, D], store the keys and values [T, Hkv, D]; returns the queries.

    rotary_rows [T, 2, 1, D]: see `rotary.RotaryTable`.
    """
    rotated, num_queries = rotate(heads, rotary_rows), heads.shape[1] - values.shape[1]
    write_keys_values(key_pages, value_pages, slot_mapping, rotated[:, num_queries:], values)
    return rotated[:, :num_queries]


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
    causal: bool = True,
) -> torch.Tensor:
    """Attention of query [T, Hq, Dk] over the pages; returns [T, Hq, Dv] in the query's dtype.

    A token at position p sees key positions j <= p, and with a window only p - j < window. causal=False: it sees all
    j < seq_len of its request, whatever else the pages hold behind them, and with a window only |p - j| < window.
    softcap c turns scores s into c * tanh(s / c). sinks [Hq] are extra logits per head that take part in the softmax
    and carry no value (GPT-OSS). Scores and softmax are float32.
    """
    rule = _Rule(window, causal)
    results = []
    for group in inputs.groups:
        keys, values = _read_pages(key_pages, inputs, group), _read_pages(value_pages, inputs, group)
        results.append(_attend(query[group.tokens], keys, values, inputs, group, scale, rule, softcap, sinks))
    return results[0] if len(results) == 1 else torch.cat(results)


def _attend(
    query: torch.Tensor,  # [b * Q, Hq, Dk]
    keys: torch.Tensor,  # [b, Hkv, S, Dk]
    values: torch.Tensor,  # [b, Hkv, S, Dv]
    inputs: AttentionInputs,
    group: QueryGroup,
    scale: float,
    rule: _Rule,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """One group, [b * Q, Hq, Dv]."""
    requests, length, heads, kv_heads = group.num_requests, group.query_len, query.shape[1], keys.shape[1]
    shared = heads // kv_heads
    plain = softcap is None and sinks is None
    if plain and length > _MOST_FOLDED:
        mask = _mask(inputs, group, rule, 1, query.dtype)
        by_head = query.view(requests, length, heads, -1).transpose(1, 2)
        output = F.scaled_dot_product_attention(
            by_head, keys, values, attn_mask=mask, scale=scale, enable_gqa=shared > 1
        )
        return output.transpose(1, 2).reshape(requests * length, heads, -1)
    mask = _mask(inputs, group, rule, shared, query.dtype)
    folded = query.view(requests, length, kv_heads, shared, -1).transpose(1, 2)
    folded = folded.reshape(requests, kv_heads, length * shared, -1)
    if plain:
        output = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scale)
    else:
        output = _explicit(folded, keys, values, mask, scale, softcap, sinks)
    output = output.unflatten(2, (length, shared)).transpose(1, 2)
    return output.reshape(requests * length, heads, -1)


def _read_pages(pages: torch.Tensor, inputs: AttentionInputs, group: QueryGroup) -> torch.Tensor:
    """Keys or values of a group, [b, Hkv, S, D]; a view of the pages for a single request with adjacent blocks."""
    longest = group.max_seq_len
    if group.first_key is not None:
        flat = pages.view(-1, *pages.shape[2:])
        return flat[group.first_key : group.first_key + longest].unsqueeze(0).transpose(1, 2)
    block_size = pages.shape[1]
    count = -(-longest // block_size)
    blocks = group.cache.get("blocks")
    if blocks is None:
        last = group.first_request + group.num_requests
        blocks = group.cache["blocks"] = inputs.block_table[group.first_request : last, :count].flatten()
    gathered = pages.index_select(0, blocks).view(group.num_requests, count * block_size, *pages.shape[2:])
    return gathered[:, :longest].transpose(1, 2)


def _mask(
    inputs: AttentionInputs, group: QueryGroup, rule: _Rule, shared: int, dtype: torch.dtype
) -> torch.Tensor | None:
    """Who sees whom: 0 or -inf, [b, 1, Q * shared, S], or [b, 1, 1, S] where all rows see the same; None when every key
    is visible."""
    # Of a lone request the host knows the length exactly, so that no key behind it is read.
    alike = group.query_len == 1 or not rule.causal
    exact = group.num_requests == 1 and not group.is_bound
    if exact and alike and (rule.window is None or group.max_seq_len <= rule.window):
        return None
    key = (rule, shared, dtype)
    mask = group.cache.get(key)
    if mask is None:
        hidden = _hidden(inputs, group, rule)
        mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
        if mask.shape[2] > 1 and shared > 1:
            mask = mask.repeat_interleave(shared, 2)
        group.cache[key] = mask
    return mask


def _hidden(inputs: AttentionInputs, group: QueryGroup, rule: _Rule) -> torch.Tensor:
    """Keys that a row must not see, bool [b, 1, Q, S], or [b, 1, 1, S] where all rows see the same."""
    positions = inputs.positions[group.tokens].view(group.num_requests, 1, group.query_len, 1)
    keys = torch.arange(group.max_seq_len, device=positions.device)
    if rule.causal:
        hidden = keys > positions
    else:
        lengths = inputs.seq_len[group.first_request : group.first_request + group.num_requests]
        hidden = keys >= lengths.view(-1, 1, 1, 1)
    if rule.window is not None:
        hidden = hidden | (keys <= positions - rule.window)
        if not rule.causal:
            hidden |= keys >= positions + rule.window
    return hidden


def _explicit(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """The definition: query [b, Hkv, Q * shared, Dk], keys and values [b, Hkv, S, D] -> [b, Hkv, Q * shared, Dv]."""
    scores = (query.float() @ keys.float().transpose(2, 3)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        # Heads of one KV head lie side by side within each query token.
        per_row = sinks.float().view(query.shape[1], -1).repeat(1, query.shape[2] * query.shape[1] // sinks.numel())
        column = per_row.view(1, query.shape[1], query.shape[2], 1).expand(query.shape[0], -1, -1, 1)
        scores = torch.cat([scores, column], -1)
    weights = torch.softmax(scores, -1)
    if sinks is not None:
        weights = weights[..., :-1]
    return (weights @ values.float()).to(query.dtype)
