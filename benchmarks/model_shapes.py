"""Model folders without weights: config.json of a target and of heads for it, for load_format=dummy."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a Qwen3 target."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int  # of its EAGLE-3 head
    captured: tuple[int, ...]  # layers that its DFlash head reads


# The first are the sizes of Qwen/Qwen3-8B and of the heads published for it.
SHAPES = {
    "qwen3-8b": ModelShape(4096, 12288, 36, 32, 8, 128, 151936, 32000, (1, 9, 17, 25, 33)),
    "tiny": ModelShape(64, 128, 8, 4, 2, 16, 2000, 500, (1, 3, 6)),
}
_BLOCK, _DFLASH_LAYERS = 16, 5


def write_shapes(shape: ModelShape, folder: Path, dtype: str) -> dict[str, Path]:
    """Write the folders; returns them by name: target, eagle3, dflash."""
    configs = {"target": _target(shape), "eagle3": _eagle3(shape), "dflash": _dflash(shape)}
    for name, config in configs.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        text = json.dumps(config | {"torch_dtype": dtype}, indent=1)
        (folder / name / "config.json").write_text(text, encoding="utf-8")
    return {name: folder / name for name in configs}


def _common(shape: ModelShape) -> dict[str, Any]:
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": 40960,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": shape.vocab_size,
    }


def _qwen3(shape: ModelShape, layers: int) -> dict[str, Any]:
    sliding = {"sliding_window": None, "use_sliding_window": False, "max_window_layers": layers}
    return _common(shape) | sliding | {"model_type": "qwen3", "num_hidden_layers": layers}


def _target(shape: ModelShape) -> dict[str, Any]:
    return _qwen3(shape, shape.num_layers) | {"architectures": ["Qwen3ForCausalLM"]}


def _eagle3(shape: ModelShape) -> dict[str, Any]:
    return _common(shape) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": shape.draft_vocab_size,
    }


def _dflash(shape: ModelShape) -> dict[str, Any]:
    return _qwen3(shape, _DFLASH_LAYERS) | {
        "architectures": ["DFlashDraftModel"],
        "block_size": _BLOCK,
        "dflash_config": {"mask_token_id": shape.vocab_size - 1, "target_layer_ids": list(shape.captured)},
        "layer_types": ["full_attention"] * _DFLASH_LAYERS,
        "num_target_layers": shape.num_layers,
    }
