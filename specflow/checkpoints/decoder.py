"""From a Hugging Face folder to the weights that `proposers.decoder` runs."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from specflow.checkpoints.decoder_config import DecoderConfig
from specflow.checkpoints.tensors import read_tensors
from specflow.checkpoints.weights_hash import weights_hash


@dataclass
class LayerWeights:
    """One layer. Matrices are [in, out], so that `x @ W` needs no transposition."""

    input_norm: torch.Tensor  # [E]
    qkv: torch.Tensor  # [E, (Hq + 2 Hkv) D]: query, key, value side by side
    qkv_bias: torch.Tensor | None  # [(Hq + 2 Hkv) D]
    qk_norm: torch.Tensor | None  # [Hq + Hkv, D]: the query's weight for each query head, then the key's
    output: torch.Tensor  # [Hq D, E]
    output_bias: torch.Tensor | None  # [E]
    post_norm: torch.Tensor  # [E]
    gate_up: torch.Tensor  # [E, 2 I]
    gate_up_bias: torch.Tensor | None  # [2 I]
    down: torch.Tensor  # [I, E]
    down_bias: torch.Tensor | None  # [E]


@dataclass
class DecoderWeights:
    """All weights of a decoder, on one device and in one dtype."""

    config: DecoderConfig
    embedding: torch.Tensor  # [V, E]
    layers: list[LayerWeights]
    final_norm: torch.Tensor  # [E]
    head: torch.Tensor  # [E, V]
    checkpoint_hash: str  # of the tensors as they were read
    num_parameters: int  # a tied head counted once


def decoder_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of every tensor such a checkpoint holds, as Hugging Face writes them."""
    width, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, width),
        "model.norm.weight": (width,),
    }
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab_size, width)
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = [(f"self_attn.{name}_proj", size) for name, size in (("q", query), ("k", key), ("v", key))]
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}{name}.weight"] = (width,)
        for name in ("q_norm", "k_norm") if config.qk_norm else ():
            shapes[f"{prefix}self_attn.{name}.weight"] = (config.head_dim,)
        for name, size in attention:
            shapes |= _linear(prefix + name, width, size, config.qkv_bias)
        shapes |= _linear(prefix + "self_attn.o_proj", query, width, config.output_bias)
        for name in ("mlp.gate_proj", "mlp.up_proj"):
            shapes |= _linear(prefix + name, width, inner, config.mlp_bias)
        shapes |= _linear(prefix + "mlp.down_proj", inner, width, config.mlp_bias)
    return shapes


def _linear(name: str, inputs: int, outputs: int, bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)


def load_decoder(folder: Path, config: DecoderConfig, device: torch.device, dtype: torch.dtype) -> DecoderWeights:
    """Read, check and merge the weights. Raises `CheckpointError`, see `read_tensors`."""
    # Some tools write the tied head too, and old ones the frequencies of the rotary embedding.
    ignored = {"lm_head.weight"} | {
        f"model.layers.{index}.self_attn.rotary_emb.inv_freq" for index in range(config.num_layers)
    }
    tensors = read_tensors(folder, decoder_shapes(config), ignored)
    digest = weights_hash(tensors)
    count = sum(tensor.numel() for tensor in tensors.values())
    tensors = {name: tensor.to(device=device, dtype=dtype) for name, tensor in tensors.items()}
    embedding = tensors["model.embed_tokens.weight"]
    head = embedding if config.tied else tensors["lm_head.weight"]
    return DecoderWeights(
        config=config,
        embedding=embedding,
        layers=[_layer(tensors, index, config) for index in range(config.num_layers)],
        final_norm=tensors["model.norm.weight"],
        head=transposed(head),
        checkpoint_hash=digest,
        num_parameters=count,
    )


def transposed(weight: torch.Tensor) -> torch.Tensor:
    """A weight [out, in] as [in, out].

    On a CPU it is copied, since few-row products then run 2 to 3 times as fast; elsewhere a view costs nothing.
    """
    return weight.t().contiguous() if weight.device.type == "cpu" else weight.t()


def _layer(tensors: dict[str, torch.Tensor], index: int, config: DecoderConfig) -> LayerWeights:
    prefix = f"model.layers.{index}."

    def merged(*names: str) -> torch.Tensor:
        return transposed(torch.cat([tensors[f"{prefix}{name}.weight"] for name in names]))

    def bias(*names: str) -> torch.Tensor | None:
        found = [tensors[key] for name in names if (key := f"{prefix}{name}.bias") in tensors]
        return torch.cat(found) if found else None

    attention = [f"self_attn.{name}_proj" for name in ("q", "k", "v")]
    gates = ["mlp.gate_proj", "mlp.up_proj"]
    return LayerWeights(
        input_norm=tensors[prefix + "input_layernorm.weight"],
        qkv=merged(*attention),
        qkv_bias=bias(*attention),
        qk_norm=_qk_norm(tensors, prefix, config) if config.qk_norm else None,
        output=merged("self_attn.o_proj"),
        output_bias=bias("self_attn.o_proj"),
        post_norm=tensors[prefix + "post_attention_layernorm.weight"],
        gate_up=merged(*gates),
        gate_up_bias=bias(*gates),
        down=merged("mlp.down_proj"),
        down_bias=bias("mlp.down_proj"),
    )


def _qk_norm(tensors: dict[str, torch.Tensor], prefix: str, config: DecoderConfig) -> torch.Tensor:
    query, key = (tensors[f"{prefix}self_attn.{name}_norm.weight"] for name in ("q", "k"))
    return torch.cat([query.expand(config.num_heads, -1), key.expand(config.num_kv_heads, -1)])
