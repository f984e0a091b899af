"""Keys and values that a trained head keeps of its own, under the target's block numbers."""

import torch
from torch import Tensor

from specflow.core.attention import AttentionInputs
from specflow.core.limits import EngineLimits
from specflow.heads.layers import Attend, LayerShape
from specflow.kernels.paged_kernels import paged_kernels


class HeadPages:
    """Pages of every layer: [num_blocks, block_size, 2 Hkv, D], keys and values of a token side by side."""

    def __init__(
        self,
        shape: LayerShape,
        windows: tuple[int | None, ...],
        limits: EngineLimits,
        dtype: torch.dtype,
        causal: tuple[bool, ...] | None = None,
    ) -> None:
        """Allocate; windows and causal (None: all are) have one entry per layer, see `paged_attention`."""
        size = (limits.num_blocks, limits.block_size, 2 * shape.num_kv_heads, shape.head_dim)
        self.block_size = limits.block_size
        self.stacked = torch.zeros((len(windows), *size), device=limits.device, dtype=dtype)
        self.layers = list(self.stacked.unbind(0))
        self.kernels = paged_kernels(limits.paged_kernels)
        self.causal = causal or (True,) * len(windows)
        self.windows, self._scale, self._kv_heads = windows, shape.head_dim**-0.5, shape.num_kv_heads

    def write(self, layer: int, slot_mapping: Tensor, key: Tensor, value: Tensor) -> None:
        """Store keys and values [T, Hkv, D] at slots [T] int64."""
        # States overflow in some half-precision targets; a NaN left in a page would spoil whoever gets the block next.
        self.kernels.write(*self.pair(layer), slot_mapping, key, value, clean=True)

    def write_all(self, slot_mapping: Tensor, keys_values: Tensor) -> None:
        """Store keys and values of all layers, [L, T, 2 Hkv, D], at slots [T] int64."""
        self.stacked.flatten(1, 2).index_copy_(1, slot_mapping, keys_values.nan_to_num())

    def attend(self, inputs: AttentionInputs) -> Attend:
        """Attention over the pages; every layer writes its keys and values first."""

        def run(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            self.write(layer, inputs.slot_mapping, key, value)
            return self.kernels.attend(
                query,
                *self.pair(layer),
                inputs,
                scale=self._scale,
                window=self.windows[layer],
                causal=self.causal[layer],
            )

        return run

    def pairs(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all layers, [L, num_blocks, block_size, Hkv, D] each, views of the pages."""
        return self.stacked[..., : self._kv_heads, :], self.stacked[..., self._kv_heads :, :]

    def pair(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, views of its pages."""
        keys, values = self.pairs()
        return keys[layer], values[layer]
