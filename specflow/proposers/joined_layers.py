"""Weights of a head's decoder layers as few-row products on a CPU read them fastest."""

import torch
from torch import Tensor

from specflow.checkpoints.decoder import LayerWeights
from specflow.heads.layers import GatedMlp, SelfAttention


def join_weights(layer: torch.nn.Module) -> LayerWeights:
    """Query, key and value, and gate and up, as one matrix each, of which the layer's own weights become views."""
    attention, mlp = layer.self_attn, layer.mlp
    assert isinstance(attention, SelfAttention)
    assert isinstance(mlp, GatedMlp)
    qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
    qk_norm = None
    if attention.shape.qk_norm:
        query, key = attention.q_norm.weight, attention.k_norm.weight
        shape = attention.shape
        qk_norm = torch.cat([query.expand(shape.num_heads, -1), key.expand(shape.num_kv_heads, -1)]).detach()
    return LayerWeights(
        input_norm=layer.input_layernorm.weight.detach(),  # type: ignore[union-attr, operator]
        qkv=_join(qkv),
        qkv_bias=_join_bias(qkv),
        qk_norm=qk_norm,
        output=attention.o_proj.weight.detach().t(),
        output_bias=attention.o_proj.bias,
        post_norm=layer.post_attention_layernorm.weight.detach(),  # type: ignore[union-attr, operator]
        gate_up=_join([mlp.gate_proj, mlp.up_proj]),
        gate_up_bias=_join_bias([mlp.gate_proj, mlp.up_proj]),
        down=mlp.down_proj.weight.detach().t(),
        down_bias=mlp.down_proj.bias,
    )


def _join(parts: list[torch.nn.Linear]) -> Tensor:
    """[in, sum of outs], contiguous."""
    joined = torch.cat([part.weight.detach() for part in parts]).t().contiguous()
    for part, weight in zip(parts, joined.split([part.out_features for part in parts], 1), strict=True):
        part.weight.data = weight.t()
    return joined


def _join_bias(parts: list[torch.nn.Linear]) -> Tensor | None:
    return torch.cat([part.bias.detach() for part in parts]) if parts[0].bias is not None else None
