"""How products of some dozens of rows are launched; see `many_rows_gluon`, which computes them."""

from dataclasses import dataclass

import torch

GROUP_ROWS = 64  # of the values that four warps multiply


@dataclass(frozen=True, kw_only=True)
class ManyRowsShape:
    """No result depends on it beyond rounding."""

    groups: int = 1  # of four warps, each with 64 rows of the values: 1 or 2
    panel: int = 64  # rows of the weight that are multiplied at once; when gated, half of them gates
    panels: int = 1  # in a tile: 1, or 3, since sizes that are no power of two fill a device better
    block_k: int = 64  # columns at a time: 64 or 128
    stages: int = 6  # tiles in the ring
    split: int = 1  # parts of the depth, each a unit of work; the last to end adds them up

    @property
    def block_m(self) -> int:
        """Rows of the result in a tile."""
        return GROUP_ROWS * self.groups

    @property
    def block_n(self) -> int:
        """Rows of the weight in a tile."""
        return self.panel * self.panels

    def fits(self, weight: torch.Tensor, gated: bool) -> bool:
        """Whether it can be launched with a weight [N or 2 N, K]."""
        columns, depth = weight.shape[0] // (2 if gated else 1), weight.shape[1]
        steps, rest = divmod(depth, self.block_k * self.split)
        return (
            weight.data_ptr() % 16 == 0
            and weight.element_size() == 2
            and rest == 0
            and steps >= self.stages
            and not (gated and columns % (self.block_n // 2))
        )

    def product(
        self, values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, gated: bool = False
    ) -> torch.Tensor:
        """See `few_rows.few_rows_linear`."""
        # Here, because not every installation that has Triton has what this needs.
        from specflow.kernels.many_rows_gluon import many_rows_linear

        return many_rows_linear(values, weight, bias, gated, self)
