"""Contract of a target: the model whose output speculation must not change."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from specflow.core.batch import PackedBatch, TargetOutput
from specflow.core.limits import EngineLimits, PagedKernelsName
from specflow.errors import UnsupportedModelError

if TYPE_CHECKING:
    from specflow.backends.base import Backend


@dataclass(frozen=True, kw_only=True)
class TargetFacts:
    """What the rest of the engine may know of a loaded target."""

    name: str
    architecture: str
    vocab_size: int  # V: columns of the logits
    num_token_ids: int  # ids that the tokenizer knows; the rest of the columns is padding
    hidden_size: int
    num_layers: int
    max_model_len: int  # positions the checkpoint was made for
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    num_parameters: int
    checkpoint_hash: str  # short hash of the weights in memory
    kv_bytes_per_token: int  # over all layers
    mask_token_id: int | None = None  # the tokenizer's, if it has one
    paged_kernels: PagedKernelsName = "torch"  # what reads and writes KV pages, those of proposers as well


@dataclass(frozen=True, kw_only=True)
class Taps:
    """Hidden states a proposer reads after every target pass.

    Layer convention, used everywhere: l is the residual stream after decoder layer l, counted from 0;
    -1 is the embedding output. The raw stream, never the final norm.
    """

    layers: tuple[int, ...] = ()
    last_hidden: bool = False  # states after the final norm, at every packed token


@dataclass(frozen=True)
class TokenTables:
    """The two tables that drafting heads borrow from their target. Never written to."""

    embedding: torch.Tensor  # [V, E]
    head: torch.Tensor  # [V, E]; the same storage as the embedding when the target ties them
    logit_softcap: float | None = None  # logits l are c * tanh(l / c)


class Target(ABC):
    """A causal language model that runs one packed batch. Built from its options, before any weight is read."""

    tokenizer: Any  # a transformers tokenizer
    facts: TargetFacts

    @abstractmethod
    def load(self, backend: "Backend") -> None:
        """Read the checkpoint onto the backend's device and fill `tokenizer` and `facts`.

        Raises `CheckpointError` (missing, half-written, no tokenizer) or `UnsupportedModelError`.
        """

    @abstractmethod
    def attach(self, limits: EngineLimits, taps: Taps) -> None:
        """Allocate KV pages and buffers, register attention and taps, and prove the fit on a few tokens."""

    @abstractmethod
    def forward(self, batch: PackedBatch) -> TargetOutput:
        """Run one packed batch, writing its keys and values to the pages."""

    def token_tables(self) -> TokenTables:
        """Embedding and output head, for heads that ship neither. Raises `UnsupportedModelError` where a head could
        not use them as they are."""
        raise UnsupportedModelError(f"target {type(self).__name__} has no token tables to share with a drafting head.")

    @abstractmethod
    def describe(self) -> dict[str, str]:
        """What really ran: attention, experts, dtype, weights; shown in the report."""


def lent_tables(target: Target) -> TokenTables | None:
    """The target's tables, None when it has none to lend: a head that ships its own does not need them."""
    try:
        return target.token_tables()
    except UnsupportedModelError:
        return None
