"""The tokenizer of the bundled models: byte-level byte-pair encoding, fitted to source code."""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
MASK = "<|mask|>"
RESERVED = tuple(f"<|reserved_{index}|>" for index in range(6))
SPECIAL_TOKENS = (END_OF_TEXT, MASK, *RESERVED)
VOCABULARY_SIZE = 4096

# Tried from left to right at every position; together they match every character, so nothing is lost.
_PIECES = (
    r"(?:\r?\n)+[ \t]*",  # line breaks with the indentation of the next line: one token for "new block, two levels in"
    r"[^\r\n\p{L}\p{N}]?\p{L}+",  # a word with at most one sign before it: " name", ".append", "(self", "_id"
    r"\p{N}",  # every digit by itself, so that numbers are spelled one way
    r" ?[^\s\p{L}\p{N}]+",  # runs of punctuation
    r"\s+",  # any other white space
)


def train_tokenizer(
    texts: Iterable[str], vocabulary_size: int = VOCABULARY_SIZE, max_length: int = 2048
) -> PreTrainedTokenizerFast:
    """Fit a tokenizer.

    texts: the documents to fit it to.
    vocabulary_size: number of tokens, the special ones (ids 0 to 7) and the 256 bytes included.
    max_length: the context of the models it serves, in tokens; recorded in the saved tokenizer.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("|".join(_PIECES)), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _wrap(tokenizer, max_length)


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path | str) -> None:
    """Write the files that `transformers.AutoTokenizer.from_pretrained(folder)` reads."""
    tokenizer.save_pretrained(str(folder))


def _wrap(tokenizer: Tokenizer, max_length: int) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        mask_token=MASK,
        additional_special_tokens=list(RESERVED),
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
