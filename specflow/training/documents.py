"""What is trained on, as token ids on the host."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from specflow.errors import ConfigError
from specflow.training.responses import Response

__all__ = ["Document", "data_hash", "documents_of", "label_counts"]

_LEAST_LABELS = 2  # a head's first draft is the token after the next


@dataclass(frozen=True)
class Document:
    """One answer with its prompt, cut to what fits into a pack."""

    id: str
    ids: tuple[int, ...]
    num_prompt_tokens: int
    temperature: float  # that the answer was sampled at; 0 = greedy

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def token_ids(self) -> Tensor:
        """[T] int64."""
        return torch.tensor(self.ids, dtype=torch.int64)

    @property
    def num_labels(self) -> int:
        """Tokens that are the target's own."""
        return len(self.ids) - self.num_prompt_tokens

    def cut(self, length: int) -> "Document":
        """The first `length` tokens."""
        return self if len(self) <= length else Document(self.id, self.ids[:length], *self._rest)

    @property
    def _rest(self) -> tuple[int, float]:
        return self.num_prompt_tokens, self.temperature


@dataclass(frozen=True)
class DocumentSet:
    """Documents of one side of the split, and what was done to make them fit."""

    documents: tuple[Document, ...]
    num_cut: int  # longer than a pack
    num_dropped: int  # with too few tokens of the target's own left

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return sum(map(len, self.documents))


def documents_of(rows: Iterable[Response], pack_length: int) -> DocumentSet:
    """Documents in the order of their ids, so that the order in which requests happened to end does not matter.

    Raises `ConfigError` when none is left.
    """
    kept, cut, dropped = [], 0, 0
    for row in sorted(rows, key=lambda row: row.id):
        whole = Document(row.id, row.token_ids, row.num_prompt_tokens, row.temperature)
        document = whole.cut(pack_length)
        cut += len(document) < len(whole)
        if document.num_labels < _LEAST_LABELS:
            dropped += 1
        else:
            kept.append(document)
    if not kept:
        raise ConfigError(
            f"no response has {_LEAST_LABELS} tokens of the target's own within task.pack_length={pack_length}: raise "
            "it, or let the target write longer answers (task.response_tokens)."
        )
    return DocumentSet(tuple(kept), cut, dropped)


def data_hash(documents: Sequence[Document]) -> str:
    """SHA-256 of ids, tokens and borders, first 16 hex digits."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(f"{document.id}\0{document.num_prompt_tokens}\0{document.ids}\n".encode())
    return digest.hexdigest()[:16]


def label_counts(documents: Sequence[Document], vocab_size: int) -> Tensor:
    """How often each id is the target's own, [V] int64."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for document in documents:
        counts += torch.bincount(document.token_ids[document.num_prompt_tokens :], minlength=vocab_size)
    return counts
