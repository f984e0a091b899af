"""How linear weights lie in memory.

A weight [out, in] is usually stored row by row. On a CPU in float32 the matrix product of four to sixteen rows with it
(the verification of a draft) then reads memory at less than half the speed that one row does, while the very same
weight stored column by column keeps its speed up to eight rows. Values, shapes and parameter names stay as they are.
"""

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class WeightLayout:
    """What was done, for the report."""

    transposed: int  # linear layers whose weight now lies column by column
    of: int  # all linear layers

    def __str__(self) -> str:
        return f"{self.transposed} of {self.of} linear weights transposed in memory" if self.transposed else "as loaded"


def lay_out_weights(model: nn.Module, mode: str) -> WeightLayout:
    """Transpose the memory of plain float32 CPU linear layers in place (mode "auto"), or nothing (mode "native").

    Only exact `nn.Linear` modules are touched: quantised layers are subclasses with formats of their own. A head tied
    to the embedding stays tied: looking a token up then costs microseconds more, the head milliseconds less.
    """
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    chosen = [module for module in linears if mode == "auto" and _profits(module.weight)]
    for module in chosen:
        if module.weight.is_contiguous():  # else a tied partner has been here
            module.weight.data = module.weight.data.t().contiguous().t()
    return WeightLayout(len(chosen), len(linears))


def _profits(weight: torch.Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.dim() == 2
