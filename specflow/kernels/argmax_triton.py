"""The highest value of each row and where it stands, by Triton: the results of `argmax`.

For the highest values two launches: every part of a row by a program of its own, then the parts of a row.
"""

# mypy: ignore-errors
# Bodies below are Triton's language, which only looks like typed Python.

import torch
import triton
import triton.language as tl

from specflow.kernels.launch_overlap import early_start
from specflow.kernels.rejection.overlap import let_next_start, wait_for_previous
from specflow.kernels.rejection.workspace import power_of_two
from specflow.kernels.triton_choice import device_of

_PART = 4096  # ids that one program reads


@triton.jit
def first_of_highest(values, ids, NOWHERE: tl.constexpr):
    """The highest value, and the lowest id among those that have it; no NaN."""
    highest = tl.max(values)
    return highest, tl.min(tl.where(values == highest, ids, NOWHERE))


@triton.jit
def part_kernel(
    logits, stride, highest, places, V,
    PART: tl.constexpr, NOWHERE: tl.constexpr, SKIP_NAN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (rows, parts). NaN counts as infinity, of the sign that SKIP_NAN says."""
    let_next_start(OVERLAP)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = part * PART + tl.arange(0, PART)
    wait_for_previous(OVERLAP)
    values = tl.load(logits + row * stride + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
    values = tl.where(values == values, values, float("-inf") if SKIP_NAN else float("inf"))
    value, place = first_of_highest(values, tl.where(ids < V, ids, NOWHERE), NOWHERE)
    out = row * tl.num_programs(1) + part
    tl.store(highest + out, value)
    tl.store(places + out, place)


@triton.jit
def row_kernel(
    highest, places, peaks, ids, num_parts, PARTS: tl.constexpr, NOWHERE: tl.constexpr, OVERLAP: tl.constexpr
):
    """Grid (rows,)."""
    let_next_start(OVERLAP)
    row, part = tl.program_id(0), tl.arange(0, PARTS)
    inside = part < num_parts
    wait_for_previous(OVERLAP)
    values = tl.load(highest + row * num_parts + part, mask=inside, other=float("-inf"))
    at = tl.load(places + row * num_parts + part, mask=inside, other=NOWHERE)
    peak, place = first_of_highest(values, at, NOWHERE)
    tl.store(peaks + row, peak)
    tl.store(ids + row, place.to(tl.int64))


@triton.jit(do_not_specialize_on_alignment=["peaks", "leading"])
def leading_kernel(peaks, leading, num_cut, K: tl.constexpr, PLACES: tl.constexpr, OVERLAP: tl.constexpr):
    """Grid (rows,)."""
    let_next_start(OVERLAP)
    row, place = tl.program_id(0), tl.arange(0, PLACES)
    wait_for_previous(OVERLAP)
    values = tl.load(peaks + row * K + place, mask=place < K, other=0.0)
    strange = (place < K) & ~(tl.abs(values) < float("inf"))
    count = tl.min(tl.where(strange, place, K))
    tl.store(leading + row, count.to(tl.int64))
    if count < K:
        tl.atomic_add(num_cut, tl.full([], 1, tl.int64))


def top_entries(logits: torch.Tensor, *, skip_nan: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """See `argmax.top_entries`; peaks are float32 whatever the logits are."""
    flat = logits.flatten(0, -2)
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    rows, columns = flat.shape
    parts, early = -(-columns // _PART), early_start(flat.device)
    highest = torch.empty(rows, parts, dtype=torch.float32, device=flat.device)
    places = torch.empty(rows, parts, dtype=torch.int32, device=flat.device)
    peaks = torch.empty(rows, dtype=torch.float32, device=flat.device)
    ids = torch.empty(rows, dtype=torch.int64, device=flat.device)
    if rows:
        common = {"NOWHERE": 2**31 - 1, "OVERLAP": bool(early), **early}
        with device_of(flat):
            part_kernel[(rows, parts)](
                flat, flat.stride(0), highest, places, columns, PART=_PART, SKIP_NAN=skip_nan, num_warps=4, **common
            )
            row_kernel[(rows,)](
                highest, places, peaks, ids, parts, PARTS=triton.next_power_of_2(parts), num_warps=1, **common
            )
    return peaks.view(logits.shape[:-1]), ids.view(logits.shape[:-1])


def leading_finite(peaks: torch.Tensor, num_cut: torch.Tensor) -> torch.Tensor:
    """See `argmax.leading_finite`."""
    peaks = peaks.contiguous()
    rows, columns = peaks.shape
    leading, early = torch.empty(rows, dtype=torch.int64, device=peaks.device), early_start(peaks.device)
    with device_of(peaks):
        leading_kernel[(rows,)](
            peaks, leading, num_cut, K=columns, PLACES=power_of_two(columns), OVERLAP=bool(early), num_warps=1, **early
        )
    return leading
