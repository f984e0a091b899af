"""What a Hugging Face config says about a Llama- or Qwen-style decoder, checked for what we can run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specflow.checkpoints.folder import read_json
from specflow.errors import CheckpointError, UnsupportedModelError
from specflow.kernels.rotary import RopeConfig

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")
_ROPE_KINDS = ("default", "linear", "llama3")


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes and options of a decoder-only transformer with RMSNorm, rotary positions and a gated feed-forward."""

    architecture: str
    vocab_size: int
    hidden_size: int  # E
    intermediate_size: int  # I
    num_layers: int
    num_heads: int  # Hq
    num_kv_heads: int  # Hkv
    head_dim: int  # D
    norm_eps: float
    rope: RopeConfig
    windows: tuple[int | None, ...]  # per layer: keys a token sees, None = all before it
    qk_norm: bool  # RMSNorm over each head of query and key
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    tied: bool  # the output head is the embedding
    max_positions: int  # positions it was trained for

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of keys and values of one token over all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * dtype.itemsize


def read_decoder_config(folder: Path) -> DecoderConfig:
    """Read config.json. Raises `CheckpointError`, or `UnsupportedModelError` naming what we cannot run."""
    from transformers import AutoConfig

    model_type = read_json(folder / "config.json").get("model_type")
    if model_type not in SUPPORTED:
        raise UnsupportedModelError(
            f"{folder} is a model of type {model_type!r}; as a draft model we run {', '.join(SUPPORTED)}."
        )
    try:
        config = AutoConfig.from_pretrained(str(folder))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / 'config.json'} is not a usable config: {error}") from error
    _refuse(folder, config)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention_bias = bool(getattr(config, "attention_bias", False))
    return DecoderConfig(
        architecture=(getattr(config, "architectures", None) or [model_type])[0],
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=head_dim,
        norm_eps=config.rms_norm_eps,
        rope=_rope(folder, config, head_dim),
        windows=_windows(config),
        qk_norm=model_type == "qwen3",
        qkv_bias=model_type == "qwen2" or attention_bias,
        output_bias=attention_bias,
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        tied=bool(config.tie_word_embeddings),
        max_positions=config.max_position_embeddings,
    )


def _refuse(folder: Path, config: Any) -> None:
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModelError(f"{folder} is quantised; as a draft model give the full-precision checkpoint.")
    if config.hidden_act != "silu":
        raise UnsupportedModelError(f"{folder} uses hidden_act={config.hidden_act!r}; draft models need 'silu'.")


def _rope(folder: Path, config: Any, head_dim: int) -> RopeConfig:
    parameters = config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind not in _ROPE_KINDS or parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError(
            f"{folder} has rotary embeddings of type {kind!r} ({parameters}); "
            f"draft models are run with {', '.join(_ROPE_KINDS)} over the whole head."
        )
    return RopeConfig(
        head_dim=head_dim,
        theta=float(parameters["rope_theta"]),
        kind=kind,
        factor=float(parameters.get("factor", 1.0)),
        low_freq_factor=float(parameters.get("low_freq_factor", 1.0)),
        high_freq_factor=float(parameters.get("high_freq_factor", 4.0)),
        original_max_positions=int(parameters.get("original_max_position_embeddings", config.max_position_embeddings)),
    )


def _windows(config: Any) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return (window if config.model_type == "mistral" else None,) * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
