"""The two tables of a head, which are its own or its target's: embedding and output rows."""

from typing import Protocol

import torch
from torch import Tensor, nn


class TableConfig(Protocol):
    """What a head's configuration says of its tables."""

    @property
    def vocab_size(self) -> int:
        """V, ids that may come in."""

    @property
    def draft_vocab_size(self) -> int:
        """Vd, ids that may come out."""

    @property
    def reduced(self) -> bool:
        """Whether the head can say fewer ids than it reads."""

    @property
    def own_embedding(self) -> bool:
        """Whether it has an embedding of its own."""

    @property
    def own_head(self) -> bool:
        """Whether it has output rows of its own."""


class TableHead(nn.Module):
    """A head whose tables may be lent by `borrow`; lent ones are no part of the module's state."""

    config: TableConfig
    ids: Tensor  # [Vd] int64: target id of each output row; only when reduced
    embed_tokens: nn.Embedding  # only when its own
    lm_head: nn.Linear  # only when its own

    def add_tables(self, config: TableConfig, hidden_size: int) -> None:
        """Make the tables that are the head's own, and room for the map of a reduced vocabulary."""
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, hidden_size)
        if config.own_head:
            self.lm_head = nn.Linear(hidden_size, config.draft_vocab_size, bias=False)
        if config.reduced:
            self.register_buffer("ids", torch.arange(config.draft_vocab_size), persistent=False)

    def borrow(self, embedding: Tensor | None, head: Tensor | None) -> None:
        """Lend tables of the target, [V, E] and [Vd, E] (rows in the order of `ids`), for those the head lacks."""
        if not self.config.own_embedding:
            assert embedding is not None
            self._embedding = embedding.detach()
        if not self.config.own_head:
            assert head is not None
            self._head = head.detach()

    @property
    def embedding_table(self) -> Tensor:
        """[V, E]."""
        return self.embed_tokens.weight if self.config.own_embedding else self._embedding

    @property
    def head_table(self) -> Tensor:
        """[Vd, E]."""
        return self.lm_head.weight if self.config.own_head else self._head
