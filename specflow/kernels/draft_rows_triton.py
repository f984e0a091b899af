"""Rows of a head's passes by Triton, one program per request: results of `draft_rows`."""

# mypy: ignore-errors
# Bodies below are Triton's language, which only looks like typed Python.

import torch
import triton
import triton.language as tl

from specflow.kernels.draft_rows import KeptRows, MaskedBlock
from specflow.kernels.launch_overlap import early_start
from specflow.kernels.pieces import int_pieces
from specflow.kernels.rejection.overlap import let_next_start, wait_for_previous
from specflow.kernels.rejection.workspace import power_of_two
from specflow.kernels.triton_choice import device_of

# Compiled once wherever in memory small tensors begin.
_TENSORS = ["start", "num_kept", "feature_positions", "slots", "num_tokens", "block_table"]


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=_TENSORS[:3])
def kept_kernel(
    start, num_kept, feature_positions, block_table, table_stride, page_size,
    numbers, owners, positions, slot_mapping, last, seq_len,
    WIDTH: tl.constexpr, PLACES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (B,)."""
    let_next_start(OVERLAP)
    wait_for_previous(OVERLAP)
    request, step = tl.program_id(0), tl.arange(0, PLACES)
    first, kept, inside = tl.load(start + request), tl.load(num_kept + request), step < WIDTH
    row = first + tl.minimum(step, kept - 1)
    position = tl.load(feature_positions + row, mask=inside, other=0)
    place = position % page_size
    block = tl.load(block_table + request * table_stride + position // page_size, mask=inside & (step < kept), other=0)
    out = request * WIDTH + step
    tl.store(numbers + out, row, mask=inside)
    tl.store(owners + out, request, mask=inside)
    tl.store(positions + out, position, mask=inside)
    tl.store(slot_mapping + out, place + block * page_size, mask=inside)
    tl.store(last + request, request * WIDTH + kept - 1)
    tl.store(seq_len + request, tl.load(feature_positions + first + kept - 1) + 1)


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=_TENSORS[3:])
def block_kernel(
    slots, num_tokens, tokens, token_stride, block_table, table_stride, page_size, mask_id,
    token_ids, positions, slot_mapping, anchors, seq_len,
    ROWS: tl.constexpr, PLACES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (R,)."""
    let_next_start(OVERLAP)
    wait_for_previous(OVERLAP)
    request, step = tl.program_id(0), tl.arange(0, PLACES)
    count, inside = tl.load(num_tokens + request), step < ROWS
    anchor = tl.load(tokens + tl.load(slots + request) * token_stride + count - 1)
    position = count - 1 + step
    block = tl.load(block_table + request * table_stride + position // page_size, mask=inside, other=0)
    out = request * ROWS + step
    tl.store(token_ids + out, tl.where(step == 0, anchor, mask_id), mask=inside)
    tl.store(positions + out, position, mask=inside)
    tl.store(slot_mapping + out, position % page_size + block * page_size, mask=inside)
    tl.store(anchors + request, anchor)
    tl.store(seq_len + request, count - 1 + ROWS)


def kept_rows(
    start: torch.Tensor,
    num_kept: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    width: int,
) -> KeptRows:
    """See `draft_rows.kept_rows`."""
    requests, early = len(start), early_start(start.device)
    pieces = int_pieces([requests * width] * 4 + [requests] * 2, start.device)
    with device_of(start):
        kept_kernel[(requests,)](
            start, num_kept, positions, block_table, block_table.stride(0), block_size, *pieces,
            WIDTH=width, PLACES=power_of_two(width), OVERLAP=bool(early), num_warps=1, **early,
        )  # fmt: skip
    rows, owners, standing, places, last, seq_len = pieces
    return KeptRows(rows=rows, owners=owners, last=last, positions=standing, slots=places, seq_len=seq_len)


def block_rows(
    slots: torch.Tensor,
    num_tokens: torch.Tensor,
    token_table: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    num_rows: int,
    mask_id: int,
) -> MaskedBlock:
    """See `draft_rows.block_rows`."""
    requests, early = len(slots), early_start(slots.device)
    pieces = int_pieces([requests * num_rows] * 3 + [requests] * 2, slots.device)
    with device_of(slots):
        block_kernel[(requests,)](
            slots, num_tokens, token_table, token_table.stride(0), block_table, block_table.stride(0), block_size,
            mask_id, *pieces,
            ROWS=num_rows, PLACES=power_of_two(num_rows), OVERLAP=bool(early), num_warps=1, **early,
        )  # fmt: skip
    ids, positions, places, anchors, seq_len = pieces
    return MaskedBlock(anchors=anchors, token_ids=ids, positions=positions, slots=places, seq_len=seq_len)
