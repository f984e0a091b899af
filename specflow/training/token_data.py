"""Text as one long row of tokens, and the windows that training cuts from it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specflow.errors import ConfigError
from specflow.zoo.corpus import Documents, held_out_files, read_documents, training_files


@dataclass(frozen=True)
class Corpus:
    """Decoded documents of both sides of the split."""

    training: Documents
    held_out: Documents


def read_corpus(root: Path | str | None) -> Corpus:
    """Read the corpus below `root` (None: the standard library). ConfigError when either side is empty."""
    corpus = Corpus(read_documents(training_files(root)), read_documents(held_out_files(root)))
    if not corpus.training.texts or not corpus.held_out.texts:
        raise ConfigError(
            f"the corpus at {root or 'the standard library'} has {len(corpus.training.texts)} training and "
            f"{len(corpus.held_out.texts)} held-out files; both are needed: set corpus_root to a folder with both"
        )
    return corpus


def encode(tokenizer: Any, texts: Sequence[str]) -> Tensor:
    """All texts as one row of token ids, int32 [tokens], each followed by the end-of-text token."""
    rows = tokenizer(list(texts), verbose=False)["input_ids"]
    ids = [token for row in rows for token in (*row, tokenizer.eos_token_id)]
    return torch.tensor(ids, dtype=torch.int32)


def join_rows(rows: Tensor, separator: int) -> Tensor:
    """Rows [count, length] as one row of tokens, int32 [count * (length + 1)], the separator after each."""
    ends = torch.full_like(rows[:, :1], separator)
    return torch.cat([rows, ends], dim=1).flatten().to(torch.int32)


def random_windows(tokens: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """`count` windows at random places, int64 [count, length].

    The places come from a generator on the CPU, so that every device trains on the same windows.
    ConfigError when the text is shorter than a window.
    """
    if len(tokens) < length:
        raise ConfigError(f"the text has {len(tokens)} tokens, fewer than one window of {length}; shorten the windows")
    starts = torch.randint(len(tokens) - length + 1, (count, 1), generator=generator).to(tokens.device)
    return tokens[starts + torch.arange(length, device=tokens.device)].long()


def even_windows(tokens: Tensor, length: int, count: int | None = None) -> Tensor:
    """Windows at even distances, int64 [count, length]; without `count` as many as fit side by side."""
    available = len(tokens) // length
    if available == 0:
        raise ConfigError(f"the held-out text has {len(tokens)} tokens, fewer than one window of {length}")
    wanted = available if count is None else min(count, available)
    starts = torch.arange(wanted, device=tokens.device) * (len(tokens) // wanted)
    return tokens[starts[:, None] + torch.arange(length, device=tokens.device)].long()


class WindowSampler:
    """Draws training batches evenly from several texts."""

    def __init__(self, texts: Sequence[Tensor], seed: int) -> None:
        """texts: rows of tokens, int32 [tokens] each, all on one device."""
        self.texts = list(texts)
        self.generator = torch.Generator().manual_seed(seed)

    def batch(self, count: int, length: int) -> Tensor:
        """int64 [count, length]; text i gives every window whose number is i modulo the number of texts."""
        shares = [len(range(index, count, len(self.texts))) for index in range(len(self.texts))]
        parts = [
            random_windows(text, share, length, self.generator)
            for text, share in zip(self.texts, shares, strict=True)
            if share
        ]
        return torch.cat(parts)
