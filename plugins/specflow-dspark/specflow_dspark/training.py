"""Training the block, the Markov head and the confidence head together (arXiv 2607.05147).

Every draft of every block at once: the token before a draft is the text's own, as it will be at decoding wherever the
draft counts, namely behind drafts that were accepted.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specflow.checkpoints.dflash import save_dflash
from specflow.errors import ConfigError
from specflow.heads.dflash import DFlashConfig, DFlashHead
from specflow.training.anchored_blocks import AnchoredBlocks
from specflow.training.chunked_loss import ChunkedLoss, LossKind, Teacher, chunked_loss
from specflow.training.dflash import BlockTraining, BlockTrainingOptions
from specflow.training.objective import LossParts, TrainBatch
from specflow_dspark.calibration import Calibration
from specflow_dspark.description import complete_config
from specflow_dspark.heads import MARKOV_KINDS, DSparkHead, MarkovKind, SerialConfig

_CALIBRATION_RATE = 10.0  # AdamW moves a weight by about its rate per step: too little for these few numbers


@dataclass(frozen=True, kw_only=True)
class DSparkTrainingOptions(BlockTrainingOptions):
    """Options of the head `dspark`. Raises `ConfigError` when a value is out of range."""

    num_layers: int = 2  # decoder layers of the head
    block_size: int = 7  # rows of a block, the anchor included
    sample_from_anchor: bool = True  # True: row j says the token behind it; False: the one at its place (z-lab)
    markov_rank: int = 64  # columns of the Markov head's two tables; 0 = none
    markov_head_type: MarkovKind = "vanilla"  # vanilla = embedding of the token before; gated; rnn
    markov_rate: float = 5.0  # their learning rate, as a multiple of task.learning_rate; a step sees few of the rows
    confidence_with_markov: bool = True  # the confidence head reads that embedding as well
    ce: float = 0.1  # weight of the cross-entropy of the target's most likely token
    l1: float = 0.9  # weight of sum |p - q|, twice the chance of a rejection
    kl: float = 0.0  # weight of the divergence from the target's distribution
    confidence: float = 1.0  # weight of the confidence head's cross-entropy; 0 = no confidence head
    confidence_moves_block: bool = False  # its gradient reaches the block and the Markov table too

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self.markov_rate > 0, "markov_rate", self.markov_rate, "above 0")
        for key in ("ce", "l1", "kl", "confidence"):
            _require(getattr(self, key) >= 0, key, getattr(self, key), "0 or more")
        _require(self.ce + self.l1 + self.kl > 0, "ce", self.ce, "above 0 where l1 and kl are 0")
        rank, kind = self.markov_rank, self.markov_head_type
        _require(rank >= 0, "markov_rank", rank, "0 or more")
        _require(rank > 0 or self.confidence > 0, "markov_rank", rank, "1 or more without a confidence head")
        _require(kind in MARKOV_KINDS, "markov_head_type", kind, "vanilla, gated or rnn")
        _require(
            kind != "rnn" or self.sample_from_anchor, "markov_head_type", kind, "another without sample_from_anchor"
        )
        reads = self.confidence > 0 and self.confidence_with_markov
        _require(rank > 0 or not reads, "confidence_with_markov", True, "false where markov_rank is 0")

    @property
    def serial(self) -> SerialConfig:
        """The heads on top of the block."""
        return SerialConfig(
            markov_rank=self.markov_rank,
            markov_kind=self.markov_head_type,
            confidence=self.confidence > 0,
            confidence_with_markov=self.confidence_with_markov,
        )


class TrainedHead(DSparkHead):
    """The head and, beside what is saved as weights, the calibration of its confidences."""

    def __init__(self, block: DFlashConfig, serial: SerialConfig) -> None:
        super().__init__(block, serial)
        self.calibration = nn.Parameter(torch.zeros(2, 2, block.max_drafts)) if serial.confidence else None

    def calibrated(self, logits: Tensor) -> Tensor:
        """Confidence logits [N, J] without a gradient -> [2, N, J]: of a sampled draft, of a greedy one."""
        assert self.calibration is not None
        scale, shift = self.calibration.unsqueeze(2).unbind(1)
        return logits * (1 + scale) + shift


class DSparkTraining(BlockTraining):
    """A DSpark head to `task=train`."""

    module: TrainedHead

    def __init__(self, options: DSparkTrainingOptions) -> None:
        super().__init__(options)
        self.options = options

    def make_head(self, config: DFlashConfig) -> DFlashHead:
        """See `BlockTraining.make_head`."""
        head = TrainedHead(config, self.options.serial)
        head.fresh()
        return head

    def rate_factors(self) -> dict[str, float]:
        """See `TrainableHead.rate_factors`: the Markov tables and the calibration."""
        tables = {f"markov_head.{name}.weight": self.options.markov_rate for name in ("markov_w1", "markov_w2")}
        factors = tables | {"calibration": _CALIBRATION_RATE}
        return {name: factors[name] for name, _ in self.module.named_parameters() if name in factors}

    def measure(self, batch: TrainBatch, blocks: AnchoredBlocks, states: Tensor) -> LossParts:
        """See `BlockTraining.measure`. Drafts that do not count are carried along with weight 0: shapes stay, and
        nothing waits for the device."""
        head, weights = self.module, self.place_weights(blocks.counted)
        embedded = None
        if head.markov_head is not None:
            embedded = head.markov_head.embed(batch.token_ids[blocks.labels - 1])
        result = self._compare(batch, blocks, states, embedded, weights)
        shape = blocks.counted.shape
        acceptance, hits = result.acceptance.view(shape), result.hits.view(shape)
        total, measures = result.total, {"accuracy": hits.float(), "acceptance": acceptance}
        if head.confidence_head is not None:
            further, found = self._foresee(states, embedded, blocks.counted, weights, acceptance, hits)
            total, measures = total + further, measures | found
        return LossParts(total, weights.sum(), _per_draft(measures, blocks.counted))

    def _compare(
        self, batch: TrainBatch, blocks: AnchoredBlocks, states: Tensor, embedded: Tensor | None, weights: Tensor
    ) -> ChunkedLoss:
        """Loss of all drafts against the target's law of their tokens."""
        assert batch.last_hidden is not None
        head, options = self.module, self.options
        added = None
        if head.markov_head is not None and embedded is not None:
            latents = head.markov_head.latents(embedded, states)
            added = (latents.flatten(0, 1), head.markov_head.markov_w2.weight)
        kinds: dict[LossKind, float] = {"ce": options.ce, "tv": 2 * options.l1, "kl": options.kl}
        softcap = self.tables.logit_softcap
        return chunked_loss(
            states.flatten(0, 1),
            self.tables.head,
            Teacher(batch.last_hidden[blocks.labels.flatten() - 1], self.tables.head, softcap),
            weights.flatten(),
            kind={kind: weight for kind, weight in kinds.items() if weight},
            softcap=softcap,
            added=added,
        )

    def _foresee(
        self,
        states: Tensor,
        embedded: Tensor | None,
        counted: Tensor,
        weights: Tensor,
        acceptance: Tensor,
        hits: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of the confidence head and its calibration, and what they are off by, [N, J] each."""
        head = self.module
        assert head.confidence_head is not None
        if not self.options.confidence_moves_block:
            states = states.detach()
            embedded = None if embedded is None else embedded.detach()
        logits = head.confidence_head(states, embedded).float()
        chance = acceptance.clamp(0, 1)
        loss = F.binary_cross_entropy_with_logits(logits, chance, weights, reduction="sum")
        wanted = torch.stack([chance, hits.float()])
        calibrated = head.calibrated(logits.detach())
        fit = F.binary_cross_entropy_with_logits(calibrated, wanted, counted.float().expand_as(wanted), reduction="sum")
        off = calibrated.detach().sigmoid() - wanted
        found = {"confidence_off": off[0], "greedy_confidence_off": off[1]}
        return self.options.confidence * loss + fit, found

    def save(self, folder: Path) -> None:
        """See `TrainableHead.save`: z-lab's format with the further heads' tensors under their published names."""
        trained = self.module
        with torch.device("meta"):
            head = DSparkHead(trained.config, trained.serial)
        weights = trained.state_dict()
        head.load_state_dict({name: weights[name] for name in head.state_dict()}, assign=True)
        save_dflash(folder, head)
        calibration = None
        if trained.calibration is not None:
            scale, shift = trained.calibration.detach().float().cpu().unbind(1)
            calibration = Calibration(sampled=(1 + scale[0], shift[0]), greedy=(1 + scale[1], shift[1]))
        complete_config(folder, trained.serial, calibration)


def _per_draft(values: Mapping[str, Tensor], counted: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """`NAME/j`: sum and count of values [N, J] over the drafts j that count."""
    numbers = counted.sum(0).float().unbind(0)
    sums = (torch.stack(list(values.values())) * counted).sum(1)
    return {
        f"{name}/{j}": (total, numbers[j])
        for name, row in zip(values, sums.unbind(0), strict=True)
        for j, total in enumerate(row.unbind(0))
    }


def _require(holds: bool, option: str, value: object, allowed: str) -> None:
    if not holds:
        raise ConfigError(f"task.head.{option}={value} is out of range: it must be {allowed}.")
