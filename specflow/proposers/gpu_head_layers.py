"""The decoder layers of a trained head in few launches, by the Triton kernels that serve the target's layers."""

from collections.abc import Iterable, Sequence
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from specflow.core.attention import AttentionInputs
from specflow.core.limits import EngineLimits
from specflow.heads.layers import LayerShape, RMSNorm
from specflow.kernels.rotary import RotaryTable
from specflow.proposers.head_pages import HeadPages
from specflow.targets.gpu_layers import LayerAttention, LayerOps, join_layer, norm_of, run_layer, trial_mixes
from specflow.targets.linear_choice import BUCKETS, choose_shapes
from specflow.targets.linears import Linears


class GpuHeadLayers:
    """All layers of a head over its pages; the modules' results up to rounding.

    The modules' own weights become views of the joined ones.
    """

    def __init__(
        self, layers: Sequence[nn.Module], last: RMSNorm, shape: LayerShape, pages: HeadPages, rotary: RotaryTable
    ) -> None:
        """last: the norm behind the last layer."""
        self.ops, joined = _ops(), [join_layer(layer) for layer in layers]
        self._pages = pages
        self.first_norm = joined[0].input_norm
        self._following = [*(layer.input_norm for layer in joined[1:]), norm_of(last)]
        self.linears, self._joined = Linears(self.ops.gated_silu), joined
        self._mixes = [
            LayerAttention(
                layer, pages.pair(index), pages.kernels, rotary.values, self.ops, scale=shape.head_dim**-0.5,
                window=pages.windows[index], causal=pages.causal[index], clean=True,
            )
            for index, layer in enumerate(joined)
        ]  # fmt: skip

    @staticmethod
    def serves(shape: LayerShape, limits: EngineLimits) -> bool:
        """Whether a head of this shape is one that the kernels are written for, on a device where they run."""
        if limits.paged_kernels != "triton" or shape.output_bias or shape.mlp_bias:
            return False
        from specflow.kernels.layer_ops_triton import MOST_COLUMNS

        return shape.hidden_size <= MOST_COLUMNS

    def choose_linears(self, table: Tensor, row_counts: Iterable[int]) -> None:
        """Measure which products are faster by a kernel of ours than by torch; see `choose_shapes`.

        table: the head's output rows [Vd, E]; row_counts: of passes that may be run.
        """
        buckets = {next(size for size in BUCKETS if rows <= size) for rows in row_counts if rows <= BUCKETS[-1]}
        usable = table if table.is_contiguous() and table.dtype == self._joined[0].qkv.dtype else None
        mixes = partial(trial_mixes, self._pages.stacked.shape[-1], self.ops)
        choose_shapes(self.linears, self._joined, usable, self.ops, mixes, sorted(buckets))

    def run(self, stream: Tensor, values: Tensor, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
        """All layers over the residual stream [T, E]; values [T, E']: what the first product reads.

        Returns the stream at the end and its norm, [T, E] each.
        """
        for mix, following in zip(self._mixes, self._following, strict=True):
            stream, values = run_layer(mix, self.linears, inputs, stream, values, following)
        return stream, values

    def store_first(self, values: Tensor, inputs: AttentionInputs) -> None:
        """Keys and values of the first layer alone, from what its first product reads, [T, E']."""
        mix = self._mixes[0]
        first, bias = mix.layer.output.shape[1], mix.layer.qkv_bias  # behind the queries
        keys_values = F.linear(values, mix.layer.qkv[first:], None if bias is None else bias[first:])
        self.ops.norm_rotate_write(
            keys_values, *mix.pages, inputs.slot_mapping, inputs.positions, mix.rotary, mix.layer.qk_norm,
            mix.layer.qk_eps, clean=True,
        )  # fmt: skip

    def store_all(self, keys_values: Tensor, key_norms: Tensor | None, inputs: AttentionInputs) -> None:
        """Norm and rotate the keys of all layers, keys_values [T, L * 2 Hkv * D], and put all into the pages.
        key_norms: weights [L, D]."""
        mix = self._mixes[0]
        self.ops.norm_rotate_write_layers(
            keys_values, *self._pages.pairs(), inputs.slot_mapping, inputs.positions, mix.rotary, key_norms,
            mix.layer.qk_eps, clean=True,
        )  # fmt: skip


def _ops() -> LayerOps:
    from specflow.kernels import layer_ops_triton

    return layer_ops_triton
