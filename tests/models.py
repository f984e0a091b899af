"""Builders of tiny random models and tokenizers, saved as ordinary checkpoint folders.

Every builder takes the folder to write, a seed, a vocabulary size, the number of layers and any further config
entry, and returns the folder. Llama and the tokenizer are those of the conformance kit.
"""

import json
from pathlib import Path
from typing import Any

import transformers

from specflow.testing.tiny_models import (
    EOS,
    LAYERS,
    VOCAB,
    make_tokenizer,
    save_model,
    tiny_llama,
    tiny_sizes,
)

__all__ = ["EOS", "LAYERS", "VOCAB", "make_tokenizer", "save_model", "tiny_llama"]


def add_to_config(path: Path, **entries: Any) -> Path:
    """Enter something in the config.json of a saved model; returns `path`."""
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))
    return path


def tiny_mistral(path: Path, seed: int = 0, vocab: int = VOCAB, layers: int = LAYERS, **config: Any) -> Path:
    """Mistral: a sliding window of 8 on every layer."""
    special = {"sliding_window": 8}
    return save_model(path, transformers.MistralConfig(**tiny_sizes(vocab, layers) | special | config), seed)


def tiny_qwen2(path: Path, seed: int = 0, vocab: int = VOCAB, layers: int = LAYERS, **config: Any) -> Path:
    """Qwen2: bias on query, key and value."""
    return save_model(path, transformers.Qwen2Config(**tiny_sizes(vocab, layers) | config), seed)


def tiny_qwen3(path: Path, seed: int = 0, vocab: int = VOCAB, layers: int = LAYERS, **config: Any) -> Path:
    """Qwen3: norms on query and key; the architecture of the bundled models."""
    return save_model(path, transformers.Qwen3Config(**tiny_sizes(vocab, layers) | config), seed)


def tiny_gemma2(path: Path, seed: int = 0, vocab: int = VOCAB, layers: int = LAYERS, **config: Any) -> Path:
    """Gemma-2: soft-capped scores and logits, every other layer with a window of 8."""
    special = {
        "sliding_window": 8,
        "attn_logit_softcapping": 5.0,
        "query_pre_attn_scalar": 24,
        "tie_word_embeddings": True,
    }
    return save_model(path, transformers.Gemma2Config(**tiny_sizes(vocab, layers) | special | config), seed)


def tiny_gemma3(path: Path, seed: int = 0, vocab: int = VOCAB, layers: int = LAYERS, **config: Any) -> Path:
    """Gemma-3: norms on query and key, window of 8 on all but every third layer, two rotary bases."""
    special = {"sliding_window": 8, "query_pre_attn_scalar": 24, "tie_word_embeddings": True}
    special["layer_types"] = ["full_attention" if i % 3 == 2 else "sliding_attention" for i in range(layers)]
    return save_model(path, transformers.Gemma3TextConfig(**tiny_sizes(vocab, layers) | special | config), seed)


def tiny_gemma4(path: Path, seed: int = 0, vocab: int = VOCAB, layers: int = LAYERS, **config: Any) -> Path:
    """Gemma-4 text: two head sizes, window of 8 on every other layer; the second half reads the first half's keys."""
    special: dict[str, Any] = {"sliding_window": 8, "global_head_dim": 32}
    special |= {"num_kv_shared_layers": layers // 2, "hidden_size_per_layer_input": 8, "tie_word_embeddings": True}
    special |= {"vocab_size_per_layer_input": vocab}
    special["layer_types"] = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
    return save_model(path, transformers.Gemma4TextConfig(**tiny_sizes(vocab, layers) | special | config), seed)


def tiny_gpt_oss(path: Path, seed: int = 0, vocab: int = VOCAB, layers: int = LAYERS, **config: Any) -> Path:
    """GPT-OSS: a sink per head, every other layer with a window of 8, experts."""
    special = {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64}
    special["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    return save_model(path, transformers.GptOssConfig(**tiny_sizes(vocab, layers) | special | config), seed)


def tiny_qwen3_moe(path: Path, seed: int = 0, vocab: int = VOCAB, layers: int = LAYERS, **config: Any) -> Path:
    """Qwen3-MoE: four experts, two per token."""
    special = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1}
    return save_model(path, transformers.Qwen3MoeConfig(**tiny_sizes(vocab, layers) | special | config), seed)


def tiny_deepseek_v3(path: Path, seed: int = 0, vocab: int = VOCAB, layers: int = LAYERS, **config: Any) -> Path:
    """DeepSeek-V3: latent attention whose keys (16 + 8) and values (16) differ in size, grouped experts."""
    special = {
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 32,
    }
    settings = tiny_sizes(vocab, layers) | special
    del settings["head_dim"]
    return save_model(path, transformers.DeepseekV3Config(**settings | config), seed)
