"""The engine's attention inside a transformers model: one pair of pages per layer, and the function that fills them."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from specflow.core.attention import AttentionInputs
from specflow.core.limits import EngineLimits, PagedKernelsName
from specflow.errors import ConfigError
from specflow.kernels.paged_kernels import paged_kernels
from specflow.targets import transformers_facts as facts
from specflow.targets.fused_layers import FusedWeights, RotaryRows, fused_forward
from specflow.targets.gpu_layers import GpuLayers
from specflow.targets.probe import LayerShape

# Layers in fewer launches, for a CPU or a GPU; empty where transformers' own run.
FusedLayers = tuple[FusedWeights, ...] | GpuLayers


class _Layer:
    """Pages of one layer; `writes` is False where a donor layer has stored the same keys and values already."""

    __slots__ = ("keys", "values", "writes")

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, writes: bool) -> None:
        self.keys, self.values, self.writes = keys, values, writes


class PagedAttention:
    """One engine's pages, and the attention function that closes over them.

    The step's metadata is put into `inputs` before each forward pass; nothing travels through the model's arguments.
    """

    def __init__(
        self,
        shapes: tuple[LayerShape, ...],
        num_blocks: int,
        block_size: int,
        like: torch.Tensor,
        fused: FusedLayers = (),
        kernels: PagedKernelsName = "torch",
        num_positions: int | None = None,
    ) -> None:
        """Allocate pages [num_blocks, block_size, Hkv, D] of `like`'s dtype and device. Raises `ConfigError`.

        Layers run as `fused` says, or as transformers wrote them when it is empty. kernels: what serves the pages.
        num_positions: most of one request; None = as many as the pages hold.
        """
        self._num_positions = num_positions or num_blocks * block_size
        self.name = facts.unique_attention_name()
        self.inputs: AttentionInputs | None = None
        self._shapes, self._fused, self._kernels = shapes, fused, paged_kernels(kernels)
        self._layers: dict[nn.Module, _Layer] = {}
        owned: list[_Layer] = []
        for shape in shapes:
            if shape.donor is not None:
                donor = owned[shape.donor]
                layer = _Layer(donor.keys, donor.values, writes=False)
            else:
                heads = (num_blocks, block_size, shape.num_kv_heads)
                keys, values = _allocate((*heads, shape.key_size), like), _allocate((*heads, shape.value_size), like)
                layer = _Layer(keys, values, writes=True)
            owned.append(layer)
            self._layers[shape.module] = layer

    @classmethod
    def for_engine(cls, shapes: tuple[LayerShape, ...], limits: EngineLimits, fused: FusedLayers) -> "PagedAttention":
        """Pages of the engine's size, dtype and device."""
        like = torch.empty(0, dtype=limits.dtype, device=limits.device)
        most = limits.max_blocks_per_seq * limits.block_size
        return cls(shapes, limits.num_blocks, limits.block_size, like, fused, limits.paged_kernels, most)

    def enter(self, model: PreTrainedModel) -> None:
        """Make the model use this function."""
        facts.register_attention(self.name, self._make_function())
        facts.use_attention(model, self.name)
        if isinstance(self._fused, GpuLayers):
            self._fused.enter(self._shapes, self.pages, lambda: self.inputs, self._kernels, self._num_positions)
            return
        rotary = RotaryRows()
        for weights, shape in zip(self._fused, self._shapes, strict=bool(self._fused)):
            pages = self.pages(shape.module)
            weights.module.forward = fused_forward(weights, shape, *pages, lambda: self.inputs, rotary, self._kernels)

    def leave(self, model: PreTrainedModel) -> None:
        """Give the model its own attention back and forget the function; safe to call twice."""
        if facts.current_attention(model) == self.name:
            facts.use_attention(model, "eager")
            if isinstance(self._fused, GpuLayers):
                self._fused.leave()
                return facts.unregister_attention(self.name)
            for weights in self._fused:
                vars(weights.module).pop("forward", None)  # the class's own shows again
        facts.unregister_attention(self.name)

    def pages(self, module: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [num_blocks, block_size, Hkv, D] of the layer whose attention is `module`."""
        layer = self._layers[module]
        return layer.keys, layer.values

    def _make_function(self) -> Any:
        layers, kernels = self._layers, self._kernels

        def attend(
            module: nn.Module,
            query: torch.Tensor,  # [1, Hq, T, Dk]
            key: torch.Tensor,  # [1, Hkv, T, Dk]
            value: torch.Tensor,  # [1, Hkv, T, Dv]
            attention_mask: torch.Tensor | None = None,
            scaling: float | None = None,
            sliding_window: int | None = None,
            softcap: float | None = None,
            s_aux: torch.Tensor | None = None,
            **_: Any,
        ) -> tuple[torch.Tensor, None]:
            layer, inputs = layers[module], self.inputs
            assert inputs is not None
            if layer.writes:
                new = key[0].transpose(0, 1), value[0].transpose(0, 1)
                kernels.write(layer.keys, layer.values, inputs.slot_mapping, *new)
            output = kernels.attend(
                query[0].transpose(0, 1),
                layer.keys,
                layer.values,
                inputs,
                scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
                window=sliding_window,
                softcap=softcap,
                sinks=s_aux,
            )
            return output.unsqueeze(0), None

        return attend


def _allocate(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    try:
        return like.new_zeros(shape)
    except RuntimeError as error:  # torch's own out-of-memory errors are RuntimeErrors
        raise ConfigError(
            f"KV pages of shape {list(shape)} per layer do not fit into the memory of {like.device}: {error}\n"
            "Give fewer blocks (scheduler.num_kv_blocks) or a shorter context (scheduler.max_model_len)."
        ) from error
