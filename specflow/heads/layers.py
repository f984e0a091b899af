"""Transformer parts that the heads share: Llama- and Qwen3-style, over packed rows [T, E] without a batch axis.

Module and parameter names are those of published checkpoints (`self_attn.q_proj.weight`, …), so that loading is a
table of names and nothing else.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specflow.kernels.rotary import RopeConfig, rotate


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """Sizes and switches of a head's decoder layers."""

    hidden_size: int  # E
    intermediate_size: int  # I
    num_heads: int  # Hq
    num_kv_heads: int  # Hkv
    head_dim: int  # D
    norm_eps: float
    rope: RopeConfig  # the head's own, never the target's
    qk_norm: bool  # RMSNorm over each head of query and key (Qwen3)
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False

    @property
    def kv_values_per_token(self) -> int:
        """Numbers of one layer's keys and values of one token."""
        return 2 * self.num_kv_heads * self.head_dim


class Attend(Protocol):
    """What a head asks for when rows mix: attention of layer `layer` under rules the caller knows."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [T, Hq, D], key and value [T, Hkv, D], rotated; returns [T, Hq, D]. Scores are scaled by D**-0.5."""
        ...


class RMSNorm(nn.Module):
    """RMSNorm over the last axis; statistics in float32, the weight multiplied in the input's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = eps  # the name that transformers' norms have

    def forward(self, values: Tensor) -> Tensor:
        """values [..., size] -> the same shape and dtype."""
        return F.rms_norm(values, values.shape[-1:], None, self.variance_epsilon) * self.weight.to(values.dtype)


class SelfAttention(nn.Module):
    """Projections around an `Attend`; queries, keys and values may read an input wider than the residual stream."""

    def __init__(self, shape: LayerShape, input_size: int | None = None) -> None:
        super().__init__()
        self.shape = shape
        width = input_size or shape.hidden_size
        query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(width, query, bias=shape.qkv_bias)
        self.k_proj = nn.Linear(width, key, bias=shape.qkv_bias)
        self.v_proj = nn.Linear(width, key, bias=shape.qkv_bias)
        self.o_proj = nn.Linear(query, shape.hidden_size, bias=shape.output_bias)
        if shape.qk_norm:
            self.q_norm = RMSNorm(shape.head_dim, shape.norm_eps)
            self.k_norm = RMSNorm(shape.head_dim, shape.norm_eps)

    def queries(self, inputs: Tensor, rotary_rows: Tensor) -> Tensor:
        """Rotated queries [T, Hq, D] of inputs [T, width]; rotary_rows [T, 2, 1, D] from `RotaryTable.rows`."""
        heads = self.q_proj(inputs).unflatten(-1, (self.shape.num_heads, -1))
        return rotate(self.q_norm(heads) if self.shape.qk_norm else heads, rotary_rows)

    def keys_values(self, inputs: Tensor, rotary_rows: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and values, [T, Hkv, D] each."""
        keys = self.k_proj(inputs).unflatten(-1, (self.shape.num_kv_heads, -1))
        values = self.v_proj(inputs).unflatten(-1, (self.shape.num_kv_heads, -1))
        return rotate(self.k_norm(keys) if self.shape.qk_norm else keys, rotary_rows), values

    def forward(self, inputs: Tensor, rotary_rows: Tensor, layer: int, attend: Attend) -> Tensor:
        """inputs [T, width] -> [T, E]."""
        keys, values = self.keys_values(inputs, rotary_rows)
        mixed = attend(layer, self.queries(inputs, rotary_rows), keys, values)
        return self.o_proj(mixed.flatten(1))


class GatedMlp(nn.Module):
    """down(silu(gate) * up)."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=shape.mlp_bias)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=shape.mlp_bias)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=shape.mlp_bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """[T, E] -> [T, E]."""
        return self.down_proj(F.silu(self.gate_proj(inputs)) * self.up_proj(inputs))


class DecoderLayer(nn.Module):
    """A pre-norm layer, as in Llama and Qwen3."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.self_attn = SelfAttention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = GatedMlp(shape)

    def forward(self, hidden: Tensor, rotary_rows: Tensor, layer: int, attend: Attend) -> Tensor:
        """Residual stream [T, E] -> [T, E]."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotary_rows, layer, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


def initialise(module: nn.Module, std: float = 0.02) -> None:
    """Fresh weights: matrices normal with `std`, biases 0, norms 1."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=std)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
        elif isinstance(part, RMSNorm):
            nn.init.ones_(part.weight)
