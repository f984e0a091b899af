"""Highest values along the last dimension, with one rule for ties on every device."""

import torch

from specflow.kernels.triton_choice import triton_available


def lowest_argmax(logits: torch.Tensor, *, skip_nan: bool = False) -> torch.Tensor:
    """Index of the highest value of each row, the lowest among equals; logits [..., V] float -> [...] int64.

    A NaN counts as the highest value, with skip_nan as the lowest. On a CPU numpy does it: the same answer, 5 to 15
    times as fast.
    """
    if logits.is_cuda and triton_available():
        return top_entries(logits, skip_nan=skip_nan)[1]
    if skip_nan:
        logits = _without_nan(logits)
    if logits.device.type != "cpu":
        return torch.argmax(logits, dim=-1)
    exact = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
    return torch.as_tensor(exact.detach().numpy().argmax(-1))


def top_entries(logits: torch.Tensor, *, skip_nan: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Highest value of each row, not finite where a NaN was counted as such, and its index as `lowest_argmax` has it;
    [...] each."""
    if logits.is_cuda and triton_available():
        from specflow.kernels import argmax_triton

        return argmax_triton.top_entries(logits, skip_nan=skip_nan)
    if skip_nan:
        logits = _without_nan(logits)
    return logits.amax(-1), lowest_argmax(logits)


def leading_finite(peaks: torch.Tensor, num_cut: torch.Tensor) -> torch.Tensor:
    """How many leading numbers of each row of peaks [R, K] are finite, [R] int64; adds to num_cut, int64 [], the rows
    that have another."""
    if peaks.is_cuda and triton_available():
        from specflow.kernels import argmax_triton

        return argmax_triton.leading_finite(peaks, num_cut)
    leading = peaks.isfinite().to(torch.int64).cumprod(1).sum(1)
    num_cut += (leading < peaks.shape[1]).sum()
    return leading


def _without_nan(logits: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.isnan(logits), float("-inf"), logits)
