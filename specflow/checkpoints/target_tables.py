"""Fitting a head to its target: the same widths and vocabulary, and tables of the target for those it lacks."""

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specflow.errors import CheckpointError
from specflow.heads.tables import TableConfig, TableHead

if TYPE_CHECKING:
    from specflow.targets.base import TargetFacts, TokenTables

_PADDING = 1024  # rows by which two models of one tokenizer may differ
OTHER_TARGET = "the head belongs to another target"


class FittedConfig(TableConfig, Protocol):
    """What decides whether a head fits a target."""

    @property
    def target_hidden_size(self) -> int:
        """Width of the states it reads."""


def check_fit(folder: Path, config: FittedConfig, hidden_size: int, facts: "TargetFacts") -> None:
    """Raise `CheckpointError` where a head, `hidden_size` wide itself, was made for another target."""
    if config.target_hidden_size != facts.hidden_size:
        raise CheckpointError(
            f"{folder} reads states of width {config.target_hidden_size}, and target {facts.name} has "
            f"{facts.hidden_size}: {OTHER_TARGET}."
        )
    vocab = config.vocab_size
    if vocab < facts.num_token_ids or abs(vocab - facts.vocab_size) >= _PADDING:
        raise CheckpointError(
            f"{folder} is for a vocabulary of {vocab}, and target {facts.name} has {facts.num_token_ids} tokens in "
            f"{facts.vocab_size} rows: {OTHER_TARGET}."
        )
    if config.draft_vocab_size > vocab:
        raise CheckpointError(f"{folder} has draft_vocab_size={config.draft_vocab_size} above vocab_size={vocab}.")
    for name, own in (("embed_tokens.weight", config.own_embedding), ("lm_head.weight", config.own_head)):
        if not own and hidden_size != facts.hidden_size:
            raise CheckpointError(
                f"{folder} lacks {name}, and the target's table has width {facts.hidden_size} where the head needs "
                f"{hidden_size}: the checkpoint is incomplete."
            )


def is_copy(own: Tensor, table: Tensor) -> bool:
    """Whether a head's table [V, E] is the target's, which then need not be kept twice."""
    return own.shape == table.shape and torch.equal(own.to(table.device, table.dtype), table)


def check_ids(folder: Path, config: TableConfig, ids: Tensor, facts: "TargetFacts") -> None:
    """Raise `CheckpointError` when a reduced head says ids [Vd] that the target does not have."""
    if config.reduced and int(ids.max()) >= facts.vocab_size:
        raise CheckpointError(f"{folder} drafts id {int(ids.max())}, and target {facts.name} has {facts.vocab_size}.")


def fit_rows(head: TableHead, facts: "TargetFacts") -> None:
    """Make every id of the target an input and only ids of its tokenizer an output: either side may pad."""
    config = head.config
    if config.own_embedding and config.vocab_size < facts.vocab_size:
        table = F.pad(head.embed_tokens.weight, (0, 0, 0, facts.vocab_size - config.vocab_size))
        head.embed_tokens.weight = nn.Parameter(table, requires_grad=False)
    if config.own_head and not config.reduced:
        head.lm_head.weight = nn.Parameter(head.lm_head.weight[: facts.num_token_ids], requires_grad=False)


def borrow_tables(
    folder: Path, head: TableHead, facts: "TargetFacts", tables: "TokenTables | None", dtype: torch.dtype
) -> tuple[str, ...]:
    """Lend the head what it lacks, output rows in its dtype; returns what that was.

    Raises `CheckpointError` when there is no target to borrow from.
    """
    config = head.config
    lacking = [name for name, own in (("embedding", config.own_embedding), ("head", config.own_head)) if not own]
    if not lacking:
        return ()
    if tables is None:
        raise CheckpointError(f"{folder} ships no {' and no '.join(lacking)}, and there is no target to borrow from.")
    rows = None
    if not config.own_head:
        rows = (tables.head[head.ids] if config.reduced else tables.head[: facts.num_token_ids]).detach().to(dtype)
    head.borrow(tables.embedding, rows)
    return tuple(lacking)
