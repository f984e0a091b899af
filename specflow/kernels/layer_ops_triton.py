"""What stands between the matrix products of a decoder layer, one Triton launch each: results of `layer_ops`.

Every kernel lets the next one start at once and waits for the one before it (`rejection.overlap`). Only the one that
writes keys and values waits first: attention behind it reads older ones, and what a step begins with, without waiting.
"""

# mypy: ignore-errors
# Bodies below are Triton's language, which only looks like typed Python.

import torch
import triton
import triton.language as tl

from specflow.kernels.launch_overlap import early_start
from specflow.kernels.paged_write_triton import cleaned
from specflow.kernels.rejection.overlap import let_next_start, wait_for_previous
from specflow.kernels.triton_choice import device_of

MOST_COLUMNS = 16384  # of a row that one program norms
_HEADS_TILES = 512, 2048  # elements that one program rotates: of few tokens, and of many
_MANY_TOKENS = 128
_GATED_TILE = 1024


@triton.jit
def normed_row(values, scale, E, eps, kind: tl.constexpr):
    """A float32 row, zeros behind its E numbers, over its root mean square and times the weight, rounded as the
    reference rounds."""
    scaled = values * tl.rsqrt(tl.sum(values * values) / E + eps)
    return (scaled.to(kind).to(tl.float32) * scale).to(kind)


@triton.jit
def add_norm_kernel(
    delta, residual, weight, total, normed, E, eps,
    BLOCK: tl.constexpr, ADD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (T,): one row."""
    let_next_start(OVERLAP)
    column = tl.arange(0, BLOCK)
    inside = column < E
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64) * E + column
    values = tl.load(residual + row, mask=inside, other=0.0).to(tl.float32)
    kind = normed.dtype.element_ty
    if ADD:
        values += tl.load(delta + row, mask=inside, other=0.0).to(tl.float32)
        values = values.to(kind)
        tl.store(total + row, values, mask=inside)
        values = values.to(tl.float32)
    tl.store(normed + row, normed_row(values, scale, E, eps, kind), mask=inside)


@triton.jit
def embed_norm_kernel(ids, table, weight, stream, normed, E, eps, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """Grid (T,): one row."""
    let_next_start(OVERLAP)
    column = tl.arange(0, BLOCK)
    inside = column < E
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(OVERLAP)
    values = tl.load(table + tl.load(ids + tl.program_id(0)) * E + column, mask=inside, other=0.0)
    row = tl.program_id(0).to(tl.int64) * E + column
    tl.store(stream + row, values, mask=inside)
    tl.store(normed + row, normed_row(values.to(tl.float32), scale, E, eps, normed.dtype.element_ty), mask=inside)


@triton.jit
def pair_norm_kernel(
    first, second, first_weight, second_weight, output, E, eps, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    """Grid (T, 2): one row of one input."""
    let_next_start(OVERLAP)
    token, which = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < E
    values, weight = first, first_weight
    if which == 1:
        values, weight = second, second_weight
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(OVERLAP)
    row = tl.load(values + token * E + column, mask=inside, other=0.0).to(tl.float32)
    place = output + (token * 2 + which) * E + column
    tl.store(place, normed_row(row, scale, E, eps, output.dtype.element_ty), mask=inside)


@triton.jit
def silu(values):
    """values * sigmoid(values), float32."""
    return values / (1.0 + tl.exp(-values))


@triton.jit
def gated_silu_kernel(gate_up, output, columns, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """Grid (T, blocks of columns)."""
    let_next_start(OVERLAP)
    wait_for_previous(OVERLAP)
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    gate = tl.load(gate_up + row * 2 * columns + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * columns + columns + column, mask=inside, other=0.0).to(tl.float32)
    kind = output.dtype.element_ty
    tl.store(output + row * columns + column, (silu(gate).to(kind).to(tl.float32) * up).to(kind), mask=inside)


@triton.jit
def scaled_heads(values, factor, query_norm, key_norm, place, is_query, inside, kind: tl.constexpr):
    """Heads [BLOCK_H, DP] in float32 times their norm's factor and weight, rounded as the reference rounds."""
    by_query = tl.load(query_norm + place, mask=inside, other=0.0).to(tl.float32)
    by_key = tl.load(key_norm + place, mask=inside, other=0.0).to(tl.float32)
    weight = tl.where(is_query[:, None], by_query[None, :], by_key[None, :])
    return ((values * factor).to(kind).to(tl.float32) * weight).to(kind).to(tl.float32)


@triton.jit(do_not_specialize=["page_size", "positions_end"], do_not_specialize_on_alignment=["slots", "positions"])
def norm_rotate_kernel(
    qkv, qkv_stride, query_norm, key_norm, rotary, rotated, key_pages, value_pages, slots, positions, positions_end,
    page_size,
    key_pages_b, key_pages_s, key_pages_h, value_pages_b, value_pages_s, value_pages_h, key_pages_l, value_pages_l, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK_H: tl.constexpr,
    NORM: tl.constexpr, CLEAN: tl.constexpr, LARGEST: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (T, blocks of HEADS + 2 KV_HEADS heads, L). Queries go to rotated [T, HEADS, D], the rest to the pages.
    With more than one layer there are no queries, and all heads of a layer lie behind those of the one before."""
    wait_for_previous(OVERLAP)
    let_next_start(OVERLAP)
    layer = tl.program_id(2).to(tl.int64)
    qkv += layer * (2 * KV_HEADS * D)
    key_norm += layer * D
    key_pages += layer * key_pages_l
    value_pages += layer * value_pages_l
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    place, slot = tl.load(positions + token), tl.load(slots + token)
    column = tl.arange(0, DP)
    kind: tl.constexpr = rotated.dtype.element_ty
    inside = (column < D)[None, :]
    is_query, is_value = head < HEADS, head >= HEADS + KV_HEADS
    real = head < HEADS + 2 * KV_HEADS
    rows = qkv + token * qkv_stride + head[:, None] * D
    partner = tl.where(column < D // 2, column + D // 2, column - D // 2)
    turns = (real & ~is_value)[:, None] & inside
    own = tl.load(rows + column[None, :], mask=turns, other=0.0).to(tl.float32)
    other = tl.load(rows + partner[None, :], mask=turns, other=0.0).to(tl.float32)
    values = tl.load(rows + column[None, :], mask=(is_value & real)[:, None] & inside, other=0.0)
    turn = rotary + tl.minimum(place, positions_end - 1).to(tl.int64) * (2 * D) + column
    cos = tl.load(turn, mask=column < D, other=0.0).to(tl.float32)
    sin = tl.load(turn + D, mask=column < D, other=0.0).to(tl.float32)
    if NORM:
        factor = tl.rsqrt(tl.sum(own * own, 1) / D + eps)[:, None]
        own = scaled_heads(own, factor, query_norm, key_norm, column, is_query, column < D, kind)
        other = scaled_heads(other, factor, query_norm, key_norm, partner, is_query, column < D, kind)
    turned = (own * cos[None, :] + other * sin[None, :]).to(kind)
    tl.store(rotated + (token * HEADS + head)[:, None] * D + column[None, :], turned, mask=is_query[:, None] & inside)
    block, offset = slot // page_size, slot % page_size
    is_key = (~is_query & ~is_value)[:, None] & inside
    key_rows = key_pages + block * key_pages_b + offset * key_pages_s + (head - HEADS)[:, None] * key_pages_h
    value_rows = value_pages + block * value_pages_b + offset * value_pages_s
    value_rows = value_rows + (head - HEADS - KV_HEADS)[:, None] * value_pages_h
    if CLEAN:
        turned = cleaned(turned.to(tl.float32), LARGEST).to(kind)
        values = cleaned(values.to(tl.float32), LARGEST).to(kind)
    tl.store(key_rows + column[None, :], turned.to(key_pages.dtype.element_ty), mask=is_key)
    kept = (is_value & real)[:, None] & inside
    tl.store(value_rows + column[None, :], values.to(value_pages.dtype.element_ty), mask=kept)


def add_rms_norm(
    delta: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `layer_ops.add_rms_norm`; rows of at most `MOST_COLUMNS`."""
    residual = residual.contiguous()
    delta = None if delta is None else delta.contiguous()
    normed = torch.empty_like(residual)
    total = residual if delta is None else torch.empty_like(residual)
    columns = residual.shape[-1]
    block, early = triton.next_power_of_2(columns), early_start(residual.device)
    with device_of(residual):
        add_norm_kernel[(residual.numel() // columns,)](
            residual if delta is None else delta, residual, weight, total, normed, columns, eps,
            BLOCK=block, ADD=delta is not None, OVERLAP=bool(early), num_warps=min(16, max(1, block // 256)), **early,
        )  # fmt: skip
    return total, normed


def embed_norm(
    token_ids: torch.Tensor, table: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `layer_ops.embed_norm`; a contiguous table with rows of at most `MOST_COLUMNS`."""
    columns = table.shape[1]
    stream, normed = (table.new_empty(len(token_ids), columns) for _ in range(2))
    block, early = triton.next_power_of_2(columns), early_start(table.device)
    with device_of(table):
        embed_norm_kernel[(len(token_ids),)](
            token_ids, table, weight, stream, normed, columns, eps,
            BLOCK=block, OVERLAP=bool(early), num_warps=min(16, max(1, block // 256)), **early,
        )  # fmt: skip
    return stream, normed


def pair_norm(
    first: torch.Tensor, second: torch.Tensor, first_weight: torch.Tensor, second_weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """See `layer_ops.pair_norm`; rows of at most `MOST_COLUMNS`."""
    first, second = first.contiguous(), second.contiguous()
    rows, columns = first.shape
    block, early = triton.next_power_of_2(columns), early_start(first.device)
    output = first.new_empty(rows, 2 * columns)
    with device_of(first):
        pair_norm_kernel[(rows, 2)](
            first, second, first_weight, second_weight, output, columns, eps,
            BLOCK=block, OVERLAP=bool(early), num_warps=min(16, max(1, block // 256)), **early,
        )  # fmt: skip
    return output


def gated_silu(gate_up: torch.Tensor) -> torch.Tensor:
    """See `layer_ops.gated_silu`."""
    gate_up = gate_up.contiguous()
    columns, early = gate_up.shape[1] // 2, early_start(gate_up.device)
    output = gate_up.new_empty(len(gate_up), columns)
    with device_of(gate_up):
        gated_silu_kernel[(len(gate_up), -(-columns // _GATED_TILE))](
            gate_up, output, columns, BLOCK=_GATED_TILE, OVERLAP=bool(early), num_warps=4, **early
        )
    return output


def norm_rotate_write(
    qkv: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    rotary: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    *,
    clean: bool = False,
) -> torch.Tensor:
    """See `layer_ops.norm_rotate_write`; the rotation rounds once, at its end."""
    qkv = qkv if qkv.stride(1) == 1 else qkv.contiguous()
    heads = qkv.shape[1] // key_pages.shape[3] - 2 * key_pages.shape[2]
    rotated = qkv.new_empty(len(qkv), heads, key_pages.shape[3])
    _norm_rotate(
        qkv, rotated, key_pages.unsqueeze(0), value_pages.unsqueeze(0), slot_mapping, positions, rotary, norms, eps,
        clean,
    )  # fmt: skip
    return rotated


def norm_rotate_write_layers(
    keys_values: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    rotary: torch.Tensor,
    key_norms: torch.Tensor | None,
    eps: float,
    *,
    clean: bool = False,
) -> None:
    """See `layer_ops.norm_rotate_write_layers`."""
    values = keys_values if keys_values.stride(1) == 1 else keys_values.contiguous()
    norms = None if key_norms is None else (key_norms, key_norms)
    none = values.new_empty(len(values), 0, key_pages.shape[4])
    _norm_rotate(values, none, key_pages, value_pages, slot_mapping, positions, rotary, norms, eps, clean)


def _norm_rotate(qkv, rotated, key_pages, value_pages, slots, positions, rotary, norms, eps, clean) -> None:
    """Pages [L, blocks, page, Hkv, D]; rotated [T, Hq, D] takes the queries."""
    layers, _, page_size, kv_heads, size = key_pages.shape
    tokens, heads, _ = rotated.shape
    all_heads, columns = heads + 2 * kv_heads, max(2, triton.next_power_of_2(size))
    tile = _HEADS_TILES[tokens > _MANY_TOKENS]
    block = min(triton.next_power_of_2(all_heads), max(1, tile // columns))
    weights, early = norms or (qkv, qkv), early_start(qkv.device)
    with device_of(qkv):
        norm_rotate_kernel[(tokens, -(-all_heads // block), layers)](
            qkv, qkv.stride(0), *weights, rotary, rotated, key_pages, value_pages, slots, positions, len(rotary),
            page_size, *key_pages.stride()[1:4], *value_pages.stride()[1:4], key_pages.stride(0),
            value_pages.stride(0), eps,
            HEADS=heads, KV_HEADS=kv_heads, D=size, DP=columns, BLOCK_H=block, NORM=norms is not None,
            CLEAN=clean or qkv.dtype == torch.float16, LARGEST=torch.finfo(qkv.dtype).max, OVERLAP=bool(early),
            num_warps=4, **early,
        )  # fmt: skip
