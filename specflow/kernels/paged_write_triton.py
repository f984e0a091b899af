"""Storing keys and values in pages by one Triton launch, and rotating them in the same one.

Same results as `write_keys_values` and `rotate_and_write` of `paged_attention`; the rotation rounds once, at its end.
"""

# mypy: ignore-errors
# Bodies below are Triton's language, which only looks like typed Python.

import torch
import triton
import triton.language as tl

from specflow.kernels.paged_attention_triton import padded
from specflow.kernels.triton_choice import device_of

# Elements that one program moves: a few heads of one token.
_TILE = 2048


@triton.jit
def cleaned(values, LARGEST: tl.constexpr):
    """NaN to 0, infinities to the largest number; in comparisons, which no backend takes as free of NaN."""
    values = tl.where(values == values, values, 0.0)
    values = tl.where(values > LARGEST, LARGEST, values)
    return tl.where(values < -LARGEST, -LARGEST, values)


@triton.jit
def store_heads(
    source, pages, slots, token, head, source_stride_t, source_stride_h, stride_b, stride_s, stride_h, page_size,
    HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CLEAN: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Heads of one token, copied to its slot."""
    column = tl.arange(0, DP)
    mask = (head < HEADS)[:, None] & (column < D)[None, :]
    rows = source + token.to(tl.int64) * source_stride_t + head[:, None] * source_stride_h + column[None, :]
    values = tl.load(rows, mask=mask)
    if CLEAN:
        values = cleaned(values.to(tl.float32), LARGEST)
    slot = tl.load(slots + token)
    start = slot // page_size * stride_b + slot % page_size * stride_s
    out = pages + start + head[:, None] * stride_h + column[None, :]
    tl.store(out, values.to(pages.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["page_size"], do_not_specialize_on_alignment=["slots"])
def write_kernel(
    keys, values, key_pages, value_pages, slots, key_stride_t, key_stride_h, value_stride_t, value_stride_h,
    key_pages_b, key_pages_s, key_pages_h, value_pages_b, value_pages_s, value_pages_h, page_size,
    HEADS: tl.constexpr, DK: tl.constexpr, DKP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    BLOCK_H: tl.constexpr, CLEAN: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Grid (T, blocks of heads)."""
    token, head = tl.program_id(0), tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    store_heads(
        keys, key_pages, slots, token, head, key_stride_t, key_stride_h, key_pages_b, key_pages_s, key_pages_h,
        page_size, HEADS, DK, DKP, CLEAN, LARGEST,
    )  # fmt: skip
    store_heads(
        values, value_pages, slots, token, head, value_stride_t, value_stride_h, value_pages_b, value_pages_s,
        value_pages_h, page_size, HEADS, DV, DVP, CLEAN, LARGEST,
    )  # fmt: skip


@triton.jit(do_not_specialize=["page_size"], do_not_specialize_on_alignment=["slots"])
def rotate_kernel(
    heads, values, rotary, rotated, key_pages, value_pages, slots, heads_stride_t, heads_stride_h, value_stride_t,
    value_stride_h, key_pages_b, key_pages_s, key_pages_h, value_pages_b, value_pages_s, value_pages_h, page_size,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK_H: tl.constexpr,
    CLEAN: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Grid (T, blocks of HEADS + KV_HEADS heads). Queries go to rotated [T, HEADS, D], keys and values to the pages."""
    token, head = tl.program_id(0), tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    column = tl.arange(0, DP)
    inside = (column < D)[None, :]
    mask = (head < HEADS + KV_HEADS)[:, None] & inside
    rows = heads + token.to(tl.int64) * heads_stride_t + head[:, None] * heads_stride_h
    partner = tl.where(column < D // 2, column + D // 2, column - D // 2)
    own = tl.load(rows + column[None, :], mask=mask, other=0.0).to(tl.float32)
    other = tl.load(rows + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    turn = rotary + token.to(tl.int64) * (2 * D) + column
    cos = tl.load(turn, mask=column < D, other=0.0).to(tl.float32)
    sin = tl.load(turn + D, mask=column < D, other=0.0).to(tl.float32)
    turned = own * cos[None, :] + other * sin[None, :]
    out = rotated + (token.to(tl.int64) * HEADS + head)[:, None] * D + column[None, :]
    tl.store(out, turned.to(rotated.dtype.element_ty), mask=(head < HEADS)[:, None] & inside)
    key_head = head - HEADS
    is_key = (key_head >= 0) & (key_head < KV_HEADS)
    if CLEAN:
        turned = cleaned(turned.to(heads.dtype.element_ty).to(tl.float32), LARGEST)
    slot = tl.load(slots + token)
    start = slot // page_size * key_pages_b + slot % page_size * key_pages_s
    place = key_pages + start + key_head[:, None] * key_pages_h + column[None, :]
    tl.store(place, turned.to(key_pages.dtype.element_ty), mask=is_key[:, None] & inside)
    store_heads(
        values, value_pages, slots, token, tl.where(is_key, key_head, KV_HEADS), value_stride_t, value_stride_h,
        value_pages_b, value_pages_s, value_pages_h, page_size, KV_HEADS, D, DP, CLEAN, LARGEST,
    )  # fmt: skip


def write_keys_values(
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    clean: bool = False,
) -> None:
    """See `paged_attention.write_keys_values`; anything may be strided but the last axis."""
    keys, values = _dense_rows(keys), _dense_rows(values)
    heads, size, value_size = keys.shape[1], keys.shape[2], values.shape[2]
    columns = padded(size), padded(value_size)
    block = _block_of_heads(heads, max(columns))
    with device_of(keys):
        write_kernel[(len(keys), -(-heads // block))](
            keys, values, key_pages, value_pages, slot_mapping.contiguous(), *keys.stride()[:2], *values.stride()[:2],
            *key_pages.stride()[:3], *value_pages.stride()[:3], key_pages.shape[1],
            HEADS=heads, DK=size, DKP=columns[0], DV=value_size, DVP=columns[1], BLOCK_H=block,
            CLEAN=clean or keys.dtype == torch.float16, LARGEST=torch.finfo(keys.dtype).max, num_warps=4,
        )  # fmt: skip


def rotate_and_write(
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    heads: torch.Tensor,
    values: torch.Tensor,
    rotary_rows: torch.Tensor,
) -> torch.Tensor:
    """See `paged_attention.rotate_and_write`."""
    heads, values, rotary_rows = _dense_rows(heads), _dense_rows(values), rotary_rows.contiguous()
    tokens, both, size = heads.shape
    kv_heads = values.shape[1]
    rotated = heads.new_empty((tokens, both - kv_heads, size))
    block = _block_of_heads(both, padded(size))
    with device_of(heads):
        rotate_kernel[(tokens, -(-both // block))](
            heads, values, rotary_rows, rotated, key_pages, value_pages, slot_mapping.contiguous(), *heads.stride()[:2],
            *values.stride()[:2], *key_pages.stride()[:3], *value_pages.stride()[:3], key_pages.shape[1],
            HEADS=both - kv_heads, KV_HEADS=kv_heads, D=size, DP=padded(size), BLOCK_H=block,
            CLEAN=heads.dtype == torch.float16, LARGEST=torch.finfo(heads.dtype).max, num_warps=4,
        )  # fmt: skip
    return rotated


def _block_of_heads(heads: int, columns: int) -> int:
    return min(triton.next_power_of_2(heads), max(1, _TILE // columns))


def _dense_rows(values: torch.Tensor) -> torch.Tensor:
    return values if values.stride(2) == 1 else values.contiguous()
