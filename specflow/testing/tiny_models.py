"""Tiny random models, made on the spot and saved as ordinary checkpoint folders: targets for tests, no download.

Weights are larger than at a usual initialisation, so that greedy text varies and a mistake in attention moves the
logits well beyond rounding.
"""

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models

__all__ = ["EOS", "LAYERS", "VOCAB", "make_tokenizer", "save_model", "tiny_llama", "tiny_sizes", "tiny_target"]

VOCAB = 384
LAYERS = 4
EOS = "<|endoftext|>"
SECOND_EOS = 1  # a further id that ends a text, of `tiny_target` only
_PAIRS = ("e t a o i n s h r d l u", "e t a o i n s h r d")
_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []  # removed when the process ends


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
    path: Path,
    config: transformers.PretrainedConfig,
    seed: int,
    dtype: torch.dtype = torch.float32,
    eos_token_id: int | list[int] = 0,
) -> Path:
    """Initialise a causal LM of this config at `seed`, and save it with a tokenizer that fits; returns `path`."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().to(dtype)
    model.generation_config.eos_token_id = eos_token_id
    model.save_pretrained(path)
    make_tokenizer(config.get_text_config().vocab_size).save_pretrained(path)
    return path


def tiny_sizes(vocab: int, layers: int) -> dict[str, Any]:
    """Config entries of a tiny model that most architectures share."""
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
    return save_model(path, transformers.LlamaConfig(**tiny_sizes(vocab, layers) | config), seed)


@cache
def tiny_target() -> Path:
    """The conformance kit's target: a Llama of 4 layers, width 64 and 384 tokens, of which 0 and 1 end a text.

    Made on the first call (half a second) in a temporary folder, which lives as long as the process.
    """
    _FOLDERS.append(tempfile.TemporaryDirectory(prefix="specflow-tiny-"))
    config = transformers.LlamaConfig(**tiny_sizes(VOCAB, LAYERS))
    return save_model(Path(_FOLDERS[-1].name), config, seed=0, eos_token_id=[0, SECOND_EOS])
