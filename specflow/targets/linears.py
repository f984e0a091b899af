"""The matrix products of a layer: by torch, or by our kernels for few and for some dozens of rows.

Which of them serves a product is measured once, on the device and the weights it will run on (`linear_choice`); only
where a kernel of ours is faster does it run. Without a measurement torch runs everything.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from specflow.targets.linear_choice import Choices


class Linears:
    """Products of one model; `choices` says which of them our kernels serve."""

    def __init__(self, gated_silu: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """gated_silu: see `layer_ops`."""
        self.gated_silu, self.choices = gated_silu, Choices()

    def product(
        self, name: str, values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Values [T, K] times weight [N, K]; [T, N]. name: one of `linear_choice.PRODUCTS`."""
        shape = self.choices.shape(name, len(values))
        if shape is None:
            return F.linear(values, weight, bias)
        return shape.product(values, weight, bias)

    def gated(self, values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up of values [T, E] times weight [2 I, E], gates first; [T, I]."""
        shape = self.choices.shape("gate_up", len(values))
        if shape is None:
            return self.gated_silu(F.linear(values, weight))
        return shape.product(values, weight, gated=True)
