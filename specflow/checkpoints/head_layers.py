"""What a head's config.json says of its decoder layers, in every spelling that published heads use."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specflow.errors import CheckpointError, UnsupportedModelError
from specflow.heads.layers import LayerShape
from specflow.kernels.rotary import RopeConfig

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_ROPE_KINDS = ("default", "linear", "llama3")


def read_layer_shape(folder: Path, raw: Mapping[str, Any], *, default_theta: float = 10_000.0) -> LayerShape:
    """Sizes of the layers from a Hugging Face style mapping (config.json, or its `transformer_layer_config`).

    default_theta: rotary base when the mapping names none; a head never inherits the target's.
    Raises `CheckpointError` for a missing size, `UnsupportedModelError` for another family or rotary embedding.
    """
    family = str(raw.get("model_type", "llama"))
    if family not in FAMILIES:
        raise UnsupportedModelError(
            f"{folder} has layers of type {family!r}; heads are run with {', '.join(FAMILIES)}."
        )
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise UnsupportedModelError(f"{folder} uses hidden_act={raw['hidden_act']!r}; heads need 'silu'.")
    if raw.get("quantization_config"):
        raise UnsupportedModelError(f"{folder} is quantised; give the head's full-precision checkpoint.")
    hidden, heads = _size(folder, raw, "hidden_size"), _size(folder, raw, "num_attention_heads")
    head_dim = int(raw.get("head_dim") or hidden // heads)
    attention_bias = bool(raw.get("attention_bias", False))
    return LayerShape(
        hidden_size=hidden,
        intermediate_size=_size(folder, raw, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=read_rope(folder, raw, head_dim, default_theta),
        qk_norm=family == "qwen3",
        qkv_bias=attention_bias or family == "qwen2" or bool(raw.get("qkv_bias", False)),
        output_bias=attention_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
    )


def read_rope(folder: Path, raw: Mapping[str, Any], head_dim: int, default_theta: float) -> RopeConfig:
    """Rotary embedding in the new spelling (`rope_parameters`) or the old one (`rope_theta`, `rope_scaling`).

    Raises `UnsupportedModelError` for a kind that we cannot run.
    """
    parameters = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    partial = parameters.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if kind not in _ROPE_KINDS or partial != 1.0:
        raise UnsupportedModelError(
            f"{folder} has rotary embeddings of type {kind!r} ({parameters}); heads are run with "
            f"{', '.join(_ROPE_KINDS)} over the whole head."
        )
    theta = float(parameters.get("rope_theta", raw.get("rope_theta") or default_theta))
    if kind == "default":
        return RopeConfig(head_dim=head_dim, theta=theta)
    positions = parameters.get("original_max_position_embeddings", raw.get("max_position_embeddings", 8192))
    return RopeConfig(
        head_dim=head_dim,
        theta=theta,
        kind=kind,
        factor=float(parameters.get("factor", 1.0)),
        low_freq_factor=float(parameters.get("low_freq_factor", 1.0)),
        high_freq_factor=float(parameters.get("high_freq_factor", 4.0)),
        original_max_positions=int(positions),
    )


def layer_windows(raw: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Per layer the number of keys a row sees, None for all: from `layer_types` and `sliding_window`."""
    kinds = raw.get("layer_types") or ["full_attention"] * num_layers
    window = raw.get("sliding_window")
    return tuple(int(window) if kind == "sliding_attention" and window else None for kind in kinds)


def describe_layers(shape: LayerShape, num_layers: int, vocab_size: int) -> dict[str, Any]:
    """The mapping that `read_layer_shape` reads, for a head of our own making."""
    rope: dict[str, Any] = {"rope_type": shape.rope.kind, "rope_theta": shape.rope.theta}
    if shape.rope.kind != "default":
        rope["factor"] = shape.rope.factor
    if shape.rope.kind == "llama3":
        rope |= {
            "low_freq_factor": shape.rope.low_freq_factor,
            "high_freq_factor": shape.rope.high_freq_factor,
            "original_max_position_embeddings": shape.rope.original_max_positions,
        }
    return {
        "model_type": "qwen3" if shape.qk_norm else "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "attention_bias": shape.qkv_bias,
        "mlp_bias": shape.mlp_bias,
        "rope_theta": shape.rope.theta,
        "rope_parameters": rope,
        "vocab_size": vocab_size,
    }


def _size(folder: Path, raw: Mapping[str, Any], key: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{folder / 'config.json'} has {key}={value!r}: it must be a number of 1 or more.")
    return value
