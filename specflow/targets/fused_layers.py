"""Decoder layers of the plain Llama kind in fewer, larger operations, for a CPU in float32.

There a layer of transformers spends more time between its matrix products than in them when the model is small: some
ninety operations, each a few microseconds whatever its size. Here it is about thirty: query, key and value in one
product, gate and up in another, the residual added by the product before it. The weights are not copied: the model's
own parameters become views of the joined ones. Nothing is used unproven: see `specflow.targets.proof`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from specflow.core.attention import AttentionInputs
from specflow.kernels.paged_kernels import PagedKernels
from specflow.kernels.rotary import rotate
from specflow.targets import transformers_facts as facts
from specflow.targets.probe import LayerShape


@dataclass(frozen=True, slots=True)
class Norm:
    """RMS norm over the last axis, of size n, arranged so that the mean needs no division."""

    weight: torch.Tensor  # [n] or [H, n], times sqrt(n)
    eps: torch.Tensor  # scalar, times n

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """Normed values, a new tensor."""
        length = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
        return (values * torch.addcmul(self.eps, length, length).rsqrt_()).mul_(self.weight)


@dataclass(frozen=True, slots=True)
class FusedWeights:
    """One layer. Matrices are [in, out], so that a block of a few tokens reads them at full speed."""

    module: nn.Module  # the decoder layer
    input_norm: Norm
    qkv: torch.Tensor  # [E, (Hq + 2 Hkv) * D]
    qkv_bias: torch.Tensor | None
    qk_norm: Norm | None
    output: torch.Tensor  # [Hq * D, E]
    post_norm: Norm
    gate_up: torch.Tensor  # [E, 2 I]
    down: torch.Tensor  # [I, E]


class RotaryRows:
    """The step's rotary table rows, made once and used by all layers."""

    def __init__(self) -> None:
        self._source: torch.Tensor | None = None
        self._rows = torch.empty(0)

    def of(self, embeddings: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """[T, 2, 1, D]: cos, and sin with its first half negated, from cos and sin [1, T, D]."""
        cos, sin = embeddings
        if cos is not self._source:
            half = sin.shape[-1] // 2
            signed = torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1)
            self._source, self._rows = cos, torch.stack([cos[0], signed], 1).unsqueeze(2)
        return self._rows


def fuse_layers(model: PreTrainedModel, shapes: tuple[LayerShape, ...]) -> tuple[FusedWeights, ...]:
    """Join the weights of every layer, in place; an empty tuple when any layer is not of the plain kind."""
    layers = facts.decoder_layers(model)
    assert layers is not None
    if not all(_is_plain(layer, shape) for layer, shape in zip(layers, shapes, strict=True)):
        return ()
    return tuple(_fuse(layer, shape) for layer, shape in zip(layers, shapes, strict=True))


def _is_plain(layer: Any, shape: LayerShape) -> bool:
    """Known layer class, nothing but unquantised float32 CPU linears, and no bias where none is handled."""
    if type(layer).__name__ not in facts.PLAIN_DECODER_LAYERS or not shape.plain or shape.donor is not None:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    inputs = [attention.q_proj, attention.k_proj, attention.v_proj]
    others = [attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    weights = [linear.weight for linear in inputs + others]
    return (
        all(type(linear) is nn.Linear for linear in inputs + others)
        and all(weight.device.type == "cpu" and weight.dtype == torch.float32 for weight in weights)
        and all(linear.bias is None for linear in others)
        and len({linear.bias is None for linear in inputs}) == 1
        and facts.is_silu(mlp.act_fn)
    )


def _fuse(layer: Any, shape: LayerShape) -> FusedWeights:
    attention, mlp = layer.self_attn, layer.mlp
    inputs = [attention.q_proj, attention.k_proj, attention.v_proj]
    qk_norm = None
    if hasattr(attention, "q_norm"):
        rows = [(attention.q_norm, shape.num_heads), (attention.k_norm, shape.num_kv_heads)]
        weight = torch.cat([norm.weight.detach().expand(count, -1) for norm, count in rows])
        qk_norm = _norm(weight, attention.q_norm.variance_epsilon)
    return FusedWeights(
        module=layer,
        input_norm=_norm(layer.input_layernorm.weight.detach(), layer.input_layernorm.variance_epsilon),
        qkv=_join(inputs),
        qkv_bias=None if inputs[0].bias is None else torch.cat([linear.bias.detach() for linear in inputs]),
        qk_norm=qk_norm,
        output=_join([attention.o_proj]),
        post_norm=_norm(
            layer.post_attention_layernorm.weight.detach(), layer.post_attention_layernorm.variance_epsilon
        ),
        gate_up=_join([mlp.gate_proj, mlp.up_proj]),
        down=_join([mlp.down_proj]),
    )


def _norm(weight: torch.Tensor, eps: float) -> Norm:
    size = weight.shape[-1]
    return Norm(weight * size**0.5, torch.tensor(eps * size))


def _join(linears: list[nn.Linear]) -> torch.Tensor:
    """Weights [out, in] side by side as [in, sum of out]; the modules keep working, on views of it."""
    joined = torch.cat([linear.weight.data.t() for linear in linears], 1).contiguous()
    first = 0
    for linear in linears:
        linear.weight.data = joined[:, first : first + linear.out_features].t()
        first += linear.out_features
    return joined


def fused_forward(
    weights: FusedWeights,
    shape: LayerShape,
    keys: torch.Tensor,
    values: torch.Tensor,
    current: Callable[[], AttentionInputs | None],
    rotary: RotaryRows,
    kernels: PagedKernels,
) -> Callable[..., torch.Tensor]:
    """A replacement for the decoder layer's `forward`: hidden states [1, T, E] to the same, through the pages."""
    heads, turned_heads = shape.num_heads, shape.num_heads + shape.num_kv_heads
    all_heads = (-1, turned_heads + shape.num_kv_heads, shape.key_size)

    def forward(
        hidden_states: torch.Tensor, *, position_embeddings: tuple[torch.Tensor, torch.Tensor], **_: Any
    ) -> torch.Tensor:
        residual, inputs = hidden_states[0], current()
        assert inputs is not None
        normed = weights.input_norm(residual)
        bias = weights.qkv_bias
        qkv = (normed @ weights.qkv if bias is None else torch.addmm(bias, normed, weights.qkv)).view(all_heads)
        turned = qkv[:, :turned_heads]
        if weights.qk_norm is not None:
            turned = weights.qk_norm(turned)
        turned = rotate(turned, rotary.of(position_embeddings))
        kernels.write(keys, values, inputs.slot_mapping, turned[:, heads:], qkv[:, turned_heads:])
        mixed = kernels.attend(turned[:, :heads], keys, values, inputs, scale=shape.scale, window=shape.window)
        residual = torch.addmm(residual, mixed.flatten(1), weights.output)
        gate, up = (weights.post_norm(residual) @ weights.gate_up).chunk(2, -1)
        return torch.addmm(residual, F.silu(gate).mul_(up), weights.down).unsqueeze(0)

    return forward
