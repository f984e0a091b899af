"""Builders of tiny random models and tokenizers, saved as ordinary checkpoint folders.

Every builder takes the folder to write, a seed, a vocabulary size, the number of layers and any further config
entry, and returns the folder. Weights are larger than at a usual initialisation, so that greedy text varies and
a mistake in attention moves the logits well beyond rounding.
"""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models

VOCAB = 384
LAYERS = 4
EOS = "<|endoftext|>"
_PAIRS = ("e t a o i n s h r d l u", "e t a o i n s h r d")


def make_tokenizer(vocab_size: int = VOCAB) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer with exactly `vocab_size` ids; id 0 is the end of text.

    With 257 ids or more it is byte-level (any text round-trips) with two-letter merges on top; with fewer it is
    one word per id ("t1 t2 …"), for tests that need a vocabulary of a few tokens.
    """
    if vocab_size < 257:
        words = {EOS: 0} | {f"t{index}": index for index in range(1, vocab_size)}
        tokenizer = Tokenizer(tokenizer_models.WordLevel(words, unk_token=EOS))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    else:
        tokenizer = _byte_level(vocab_size)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=EOS)


def _byte_level(vocab_size: int) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {EOS: 0} | {symbol: index + 1 for index, symbol in enumerate(alphabet)}
    letters, more = (group.split() for group in _PAIRS)
    pairs = [(first, second) for first in letters for second in more]
    pairs += [("Ġ", letter) for letter in letters] + [(f"{a}{b}", "Ġ") for a in letters for b in more]
    pairs += [(first, second) for first in alphabet for second in alphabet if (first, second) not in set(pairs)]
    merges = pairs[: vocab_size - len(vocabulary)]
    vocabulary |= {a + b: len(vocabulary) + index for index, (a, b) in enumerate(merges)}
    tokenizer = Tokenizer(tokenizer_models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def save_model(
    path: Path, config: transformers.PretrainedConfig, seed: int, dtype: torch.dtype = torch.float32
) -> Path:
    """Initialise a causal LM of this config at `seed`, and save it with a tokenizer that fits; returns `path`."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().to(dtype)
    model.generation_config.eos_token_id = 0
    model.save_pretrained(path)
    make_tokenizer(config.get_text_config().vocab_size).save_pretrained(path)
    return path


def add_to_config(path: Path, **entries: Any) -> Path:
    """Enter something in the config.json of a saved model; returns `path`."""
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))
    return path


def _common(vocab: int, layers: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "num_hidden_layers": layers,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "initializer_range": 0.25,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }


def tiny_llama(path: Path, seed: int = 0, vocab: int = VOCAB, layers: int = LAYERS, **config: Any) -> Path:
    """Llama: grouped heads, nothing special."""
    return save_model(path, transformers.LlamaConfig(**_common(vocab, layers) | config), seed)


def tiny_mistral(path: Path, seed: int = 0, vocab: int = VOCAB, layers: int = LAYERS, **config: Any) -> Path:
    """Mistral: a sliding window of 8 on every layer."""
    special = {"sliding_window": 8}
    return save_model(path, transformers.MistralConfig(**_common(vocab, layers) | special | config), seed)


def tiny_qwen2(path: Path, seed: int = 0, vocab: int = VOCAB, layers: int = LAYERS, **config: Any) -> Path:
    """Qwen2: bias on query, key and value."""
    return save_model(path, transformers.Qwen2Config(**_common(vocab, layers) | config), seed)


def tiny_qwen3(path: Path, seed: int = 0, vocab: int = VOCAB, layers: int = LAYERS, **config: Any) -> Path:
    """Qwen3: norms on query and key; the architecture of the bundled models."""
    return save_model(path, transformers.Qwen3Config(**_common(vocab, layers) | config), seed)


def tiny_gemma2(path: Path, seed: int = 0, vocab: int = VOCAB, layers: int = LAYERS, **config: Any) -> Path:
    """Gemma-2: soft-capped scores and logits, every other layer with a window of 8."""
    special = {
        "sliding_window": 8,
        "attn_logit_softcapping": 5.0,
        "query_pre_attn_scalar": 24,
        "tie_word_embeddings": True,
    }
    return save_model(path, transformers.Gemma2Config(**_common(vocab, layers) | special | config), seed)


def tiny_gemma3(path: Path, seed: int = 0, vocab: int = VOCAB, layers: int = LAYERS, **config: Any) -> Path:
    """Gemma-3: norms on query and key, window of 8 on all but every third layer, two rotary bases."""
    special = {"sliding_window": 8, "query_pre_attn_scalar": 24, "tie_word_embeddings": True}
    special["layer_types"] = ["full_attention" if i % 3 == 2 else "sliding_attention" for i in range(layers)]
    return save_model(path, transformers.Gemma3TextConfig(**_common(vocab, layers) | special | config), seed)


def tiny_gemma4(path: Path, seed: int = 0, vocab: int = VOCAB, layers: int = LAYERS, **config: Any) -> Path:
    """Gemma-4 text: two head sizes, window of 8 on every other layer; the second half reads the first half's keys."""
    special: dict[str, Any] = {"sliding_window": 8, "global_head_dim": 32}
    special |= {"num_kv_shared_layers": layers // 2, "hidden_size_per_layer_input": 8, "tie_word_embeddings": True}
    special |= {"vocab_size_per_layer_input": vocab}
    special["layer_types"] = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
    return save_model(path, transformers.Gemma4TextConfig(**_common(vocab, layers) | special | config), seed)


def tiny_gpt_oss(path: Path, seed: int = 0, vocab: int = VOCAB, layers: int = LAYERS, **config: Any) -> Path:
    """GPT-OSS: a sink per head, every other layer with a window of 8, experts."""
    special = {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64}
    special["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    return save_model(path, transformers.GptOssConfig(**_common(vocab, layers) | special | config), seed)


def tiny_qwen3_moe(path: Path, seed: int = 0, vocab: int = VOCAB, layers: int = LAYERS, **config: Any) -> Path:
    """Qwen3-MoE: four experts, two per token."""
    special = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1}
    return save_model(path, transformers.Qwen3MoeConfig(**_common(vocab, layers) | special | config), seed)


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
    settings = _common(vocab, layers) | special
    del settings["head_dim"]
    return save_model(path, transformers.DeepseekV3Config(**settings | config), seed)
