"""Matrix products of a few rows, gated where wanted: plain torch reference."""

import torch
import torch.nn.functional as F

from specflow.kernels.layer_ops import gated_silu


def few_rows_linear(
    values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, gated: bool = False
) -> torch.Tensor:
    """values [T, K] times weight [N, K], plus bias [N]; returns [T, N].

    gated: the weight's first half of rows gives gates, the second what silu(gates) multiplies; returns [T, N / 2].
    """
    product = F.linear(values, weight, bias)
    return gated_silu(product) if gated else product
