"""What a trainable head is to the trainer: a module, a loss over packed documents, and a way to save itself."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from specflow.targets.base import TargetFacts, TokenTables


@dataclass(frozen=True)
class TrainBatch:
    """One pack: T tokens of several documents side by side, padded at the end.

    Hidden states follow the convention of `specflow.targets.base.Taps`. Row t of every field is the same token.
    """

    token_ids: Tensor  # [T] int64
    predicted: Tensor  # [T] bool: the token is the target's own (an answer, its end included) and may be a label
    documents: Tensor  # [T] int64: 0, 1, … in order of appearance; -1 = padding
    positions: Tensor  # [T] int64: position in its document
    hidden: Tensor  # [T, A, E_target]: captured layers, in the order of `TrainableHead.layers`
    last_hidden: Tensor | None  # [T, E_target] after the final norm; the target's logits are head @ last_hidden
    sample_ids: tuple[str, ...]  # per document, for messages
    seed: int  # of everything random in this pack: a function of the run's seed and the pack's number alone


@dataclass(frozen=True)
class LossParts:
    """A loss as sums, so that packs of unequal size, and ranks, can be averaged exactly."""

    total: Tensor  # scalar float32 with a gradient: weighted sum over labels
    weight: Tensor  # scalar float32: sum of the weights
    # name -> (sum, count), scalars without a gradient. `accuracy/0` is the share of labels of draft position 0 that
    # the head's argmax hits, `acceptance/0` the mean of sum_v min(p, q) there.
    measures: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


class TrainableHead(ABC):
    """A drafting method that `task=train` can train. Built from its options; `build` makes the weights.

    Weights that are trained are float32 parameters of `module`; the trainer runs `loss` under autocast and owns
    optimiser, schedule, checkpoints and resume. Frozen tables of the target are plain tensors outside the module's
    parameters.
    """

    layers: tuple[int, ...]  # target layers to capture; known after `build`
    needs_last_hidden: bool = True
    module: nn.Module
    can_recompute: bool = False  # understands `recompute`
    recompute: bool = False  # set by the trainer: layers are computed again in the backward pass, to save memory
    num_speculative_tokens: int  # draft positions that training prepares; the length that evaluation drafts

    @abstractmethod
    def build(self, facts: TargetFacts, tables: TokenTables, token_counts: Tensor | None, device: torch.device) -> None:
        """Make fresh weights for a target. token_counts [V] int64: how often each id is a label, for a smaller draft
        vocabulary. Raises `ConfigError` for options that do not fit the target."""

    @abstractmethod
    def loss(self, batch: TrainBatch) -> LossParts:
        """Loss of one pack; all randomness from `batch.seed`. Full-vocabulary logits never exist for all rows."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write a checkpoint that the proposer of the same name loads: config.json and model.safetensors (bfloat16)."""

    def rate_factors(self) -> dict[str, float]:
        """Parameters, by their names in `module`, that learn at this multiple of `task.learning_rate`. Tables of which
        a step sees few rows learn too slowly at the rate of the layers."""
        return {}

    def state(self) -> dict[str, Tensor]:
        """What a resumable checkpoint must hold besides the module's parameters (vocabulary maps)."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take back what `state` gave."""
