"""Highest values by Triton against torch; compiled where there is a GPU."""

import pytest
import torch

from specflow.kernels.argmax import leading_finite, lowest_argmax, top_entries
from tests.kernels.rejection_cases import DEVICE

pytest.importorskip("triton")

from specflow.kernels import argmax_triton


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 7), (3, 4096), (2, 3, 9001), (0, 50)])
def test_equal_to_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype).to(DEVICE)
    peaks, ids = argmax_triton.top_entries(logits)
    assert torch.equal(peaks, logits.float().amax(-1))
    assert torch.equal(ids, lowest_argmax(logits.cpu()).to(DEVICE))


def test_ties_across_parts_take_the_lowest_id() -> None:
    logits = torch.zeros(2, 10_000, device=DEVICE)
    logits[0, [5000, 4095, 9999]] = 1.0
    logits[1] = float("-inf")
    assert argmax_triton.top_entries(logits)[1].tolist() == [4095, 0]


def test_rows_that_lie_apart() -> None:
    wide = torch.randn(4, 300, device=DEVICE)
    assert torch.equal(argmax_triton.top_entries(wide[:, 100:200])[1], wide[:, 100:200].argmax(-1))


@pytest.mark.parametrize("call", [top_entries, argmax_triton.top_entries])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_peak_that_is_no_number_shows(call: object, number: float) -> None:
    logits = torch.randn(3, 5000, device=DEVICE)
    logits[1, 4500] = number
    peaks, ids = call(logits)  # type: ignore[operator]
    assert peaks.isfinite().tolist() == [True, False, True]
    assert ids[1] == 4500


@pytest.mark.parametrize("call", [top_entries, argmax_triton.top_entries])
def test_nan_can_be_passed_over(call: object) -> None:
    logits = torch.zeros(2, 5000, device=DEVICE)
    logits[0, 4500], logits[0, 10] = 2.0, float("nan")
    logits[1] = float("nan")
    peaks, ids = call(logits, skip_nan=True)  # type: ignore[operator]
    assert ids.tolist() == [4500, 0]
    assert peaks.tolist() == [2.0, float("-inf")]


@pytest.mark.parametrize("kernel", [leading_finite, argmax_triton.leading_finite])
def test_numbers_before_the_first_that_is_none(kernel: object) -> None:
    """A row whose first, some, or no number is not finite; those that have one are counted."""
    bad = float("nan"), float("inf"), float("-inf")
    rows = [[1.0, 2.0, 3.0], [bad[0], 1.0, 1.0], [0.0, bad[1], 0.0], [0.0, 0.0, bad[2]], [bad[1], bad[0], 3e38]]
    num_cut = torch.tensor(5, device=DEVICE)
    leading = kernel(torch.tensor(rows, device=DEVICE), num_cut)  # type: ignore[operator]
    assert leading.tolist() == [3, 0, 1, 2, 0]
    assert leading.dtype == torch.int64
    assert int(num_cut) == 9
