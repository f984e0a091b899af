"""Two norms side by side, the input of EAGLE-3's first layer, fused for a few float32 rows on a CPU."""

import numpy as np
import torch

from specflow.kernels.compiled import compiled


def pair_norm(
    left: torch.Tensor, right: torch.Tensor, left_weight: np.ndarray, right_weight: np.ndarray, eps: np.float32
) -> torch.Tensor:
    """RMSNorm of left and of right [T, E], each with its weight [E], side by side [T, 2 E]."""
    output = left.new_empty(len(left), left.shape[1] + right.shape[1])
    _pair_norm(left.numpy(), right.numpy(), left_weight, right_weight, eps, output.numpy())
    return output


def _loop(left, right, left_weight, right_weight, eps, output):  # type: ignore[no-untyped-def]
    """See `pair_norm`."""
    width = left.shape[1]
    for t in range(left.shape[0]):
        first = np.float32(0)
        second = np.float32(0)
        for i in range(width):
            first += left[t, i] * left[t, i]
            second += right[t, i] * right[t, i]
        one = np.float32(1) / np.sqrt(first / np.float32(width) + eps)
        other = np.float32(1) / np.sqrt(second / np.float32(width) + eps)
        for i in range(width):
            output[t, i] = left[t, i] * one * left_weight[i]
            output[t, width + i] = right[t, i] * other * right_weight[i]


_pair_norm = compiled(_loop, reorder_sums=True)
