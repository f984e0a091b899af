"""Training a DFlash head on blocks at random anchors (Chen et al. 2026, arXiv 2602.06036)."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from specflow.checkpoints.dflash import save_dflash
from specflow.checkpoints.dflash_config import default_capture_layers
from specflow.errors import ConfigError
from specflow.heads.dflash import BlockLayer, DFlashConfig, DFlashHead
from specflow.heads.layers import LayerShape, initialise
from specflow.kernels.rotary import RopeConfig, rotary_table
from specflow.targets.base import TargetFacts, TokenTables
from specflow.training.anchored_blocks import AnchoredBlocks, attend_blocks, decayed, paced, place_blocks
from specflow.training.chunked_loss import ChunkedLoss, LossKind, Teacher, chunked_loss
from specflow.training.objective import LossParts, TrainableHead, TrainBatch

_FEWEST_CAPTURES = 3
_LONG_CONTEXT = 8192  # positions from which on the default rotary base is the larger one


@dataclass(frozen=True, kw_only=True)
class BlockTrainingOptions:
    """Options of every head that is a block. Raises `ConfigError` when a value is out of range."""

    num_layers: int = 3  # decoder layers of the head
    block_size: int = 8  # rows of a block, the anchor included
    sample_from_anchor: bool = False  # False: row j says the token at its place (z-lab); True: the one behind it
    num_anchors: int = 512  # blocks per pack, at most
    gamma: float | None = None  # draft j weighs exp(-j / gamma); None = 7 for blocks of 16 rows and more, else 4
    capture_layers: tuple[int, ...] | None = None  # target layers to read, from 0; None = spread, 3 at least
    mask_token_id: int | None = None  # None = the tokenizer's mask token, or an unused row of the embedding
    sliding_window: int | None = None  # keys that all layers but the last see; None = all
    causal: bool = False  # rows of a block see only rows before them
    intermediate_size: int | None = None  # of the feed-forward; None = three times the target's hidden size
    head_dim: int | None = None  # None = 128, 64 or 16, by the target's hidden size
    num_heads: int | None = None  # query heads; None = hidden size / head_dim
    num_kv_heads: int | None = None  # None = the largest divisor of num_heads that is at most half of it
    rope_theta: float | None = None  # rotary base; None = 10,000, or 1,000,000 for targets past 8,192 positions

    def __post_init__(self) -> None:
        sizes = ("num_layers", "num_anchors", "sliding_window", "intermediate_size", "head_dim", "num_heads")
        for key in (*sizes, "num_kv_heads"):
            value = getattr(self, key)
            _require(value is None or value >= 1, key, value, "1 or more")
        least = 1 if self.sample_from_anchor else 2
        _require(self.block_size >= least, "block_size", self.block_size, f"{least} or more")
        for key in ("gamma", "rope_theta"):
            value = getattr(self, key)
            _require(value is None or value > 0, key, value, "above 0")
        _require(self.head_dim is None or self.head_dim % 2 == 0, "head_dim", self.head_dim, "even")


@dataclass(frozen=True, kw_only=True)
class DFlashTrainingOptions(BlockTrainingOptions):
    """Options of the head `dflash`. Raises `ConfigError` when a value is out of range."""

    loss: LossKind = "kl"  # kl = the target's distribution; ce = the token of the text; tv = 1 - sum min(p, q)
    pace: float | None = None  # weights by what hangs on each draft instead (D-PACE), with this alpha; needs loss ce

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self.loss in get_args(LossKind), "loss", self.loss, "ce, kl or tv")
        _require(self.pace is None or 0 <= self.pace < 1, "pace", self.pace, "at least 0 and below 1")
        _require(self.pace is None or self.loss == "ce", "pace", self.pace, "null unless loss is ce")


class BlockTraining(TrainableHead):
    """What all heads that are a block, or stand on one, share: `measure` says what the block's states are to learn.

    A head with more than a block overrides `make_head` with a subclass of `DFlashHead`, and `save`.
    """

    module: DFlashHead

    def __init__(self, options: BlockTrainingOptions) -> None:
        self.block_options = options

    @abstractmethod
    def measure(self, batch: TrainBatch, blocks: AnchoredBlocks, states: Tensor) -> LossParts:
        """Loss and measures of states [N, J, E] after the final norm, those that say the J drafts of N blocks."""

    def make_head(self, config: DFlashConfig) -> DFlashHead:
        """The module with fresh weights."""
        head = DFlashHead(config)
        initialise(head)
        return head

    def build(self, facts: TargetFacts, tables: TokenTables, token_counts: Tensor | None, device: torch.device) -> None:
        """See `TrainableHead.build`. The vocabulary is the target's, so token_counts is not used."""
        config = self.config_for(facts, tables)
        self.module = self.make_head(config).to(device)
        self.layers, self.num_speculative_tokens = config.capture_layers, config.max_drafts
        self.tables = tables
        positions = facts.max_model_len + config.block_size
        self._rotary = rotary_table(config.shape.rope, positions, device, torch.float32)

    def config_for(self, facts: TargetFacts, tables: TokenTables) -> DFlashConfig:
        """The head that these options mean for a target. Raises `ConfigError`."""
        options, count = self.block_options, self.block_options.num_layers
        window = options.sliding_window
        last = BlockLayer(causal=options.causal)
        return DFlashConfig(
            shape=head_shape(options, facts),
            block_layers=(*(BlockLayer(window, options.causal),) * (count - 1), last),
            block_size=options.block_size,
            sample_from_anchor=options.sample_from_anchor,
            capture_layers=_capture_layers(options, facts),
            target_hidden_size=facts.hidden_size,
            num_target_layers=facts.num_layers,
            mask_token_id=_mask_token(options, facts),
            vocab_size=facts.vocab_size,
            draft_vocab_size=facts.vocab_size,
            logit_softcap=tables.logit_softcap,
        )

    def loss(self, batch: TrainBatch) -> LossParts:
        """See `TrainableHead.loss`. Draft j of every block that has a label, weighted by its place."""
        config, options = self.module.config, self.block_options
        blocks = place_blocks(
            batch, options.num_anchors, config.block_size, sample_from_anchor=config.sample_from_anchor
        )
        states = self.block_states(batch, blocks).unflatten(0, (-1, config.block_size))[:, config.answers]
        return self.measure(batch, blocks, states)

    def block_states(self, batch: TrainBatch, blocks: AnchoredBlocks) -> Tensor:
        """States [N * size, E] after the final norm of all blocks' rows."""
        head, rules = self.module, self.module.config.block_layers
        context = head.context(batch.hidden.to(head.fc.weight.dtype))
        keys_values = head.context_keys_values(context, self._rotary.rows(batch.positions))
        ids = torch.full_like(blocks.positions, head.config.mask_token_id)
        ids[:, 0] = batch.token_ids[blocks.anchors]
        embedded = self.tables.embedding.index_select(0, ids.flatten()).to(head.fc.weight.dtype)
        attend = attend_blocks(batch, blocks, rules, keys_values)
        return head(embedded, self._rotary.rows(blocks.positions.flatten()), attend)

    def place_weights(self, counted: Tensor) -> Tensor:
        """Weights of drafts [N, J] by their place in the block, 0 where they do not count."""
        options = self.block_options
        return decayed(counted, options.gamma or (7.0 if options.block_size >= 16 else 4.0))

    def save(self, folder: Path) -> None:
        """See `TrainableHead.save`: z-lab's format, layout and layer convention spelt out, the target's tables left
        out."""
        save_dflash(folder, self.module)


class DFlashTraining(BlockTraining):
    """A DFlash head to `task=train`."""

    def __init__(self, options: DFlashTrainingOptions) -> None:
        super().__init__(options)
        self.options = options

    def measure(self, batch: TrainBatch, blocks: AnchoredBlocks, states: Tensor) -> LossParts:
        """Loss and measures of states [N, J, E]."""
        options, counted = self.options, blocks.counted
        kept = counted.flatten().nonzero().squeeze(1)
        flat, labels = states.flatten(0, 1)[kept], blocks.labels.flatten()[kept]
        if options.pace is None:
            weights = self.place_weights(counted)
        else:
            with torch.no_grad():
                plain = self.compare(batch, flat, labels, torch.ones_like(labels, dtype=torch.float32)).losses
            losses = torch.zeros(counted.numel(), device=plain.device).index_copy_(0, kept, plain.squeeze(1))
            weights = paced(losses.view_as(counted), counted, options.pace)
        weights = weights.flatten()[kept]
        result = self.compare(batch, flat, labels, weights)
        return LossParts(result.total, weights.sum(), per_draft(result, kept % counted.shape[1], counted.shape[1]))

    def compare(self, batch: TrainBatch, states: Tensor, labels: Tensor, weights: Tensor) -> ChunkedLoss:
        """Loss of states [M, E] against the target's law of the tokens at rows `labels` [M] of the pack."""
        assert batch.last_hidden is not None
        softcap = self.tables.logit_softcap
        teacher = Teacher(batch.last_hidden[labels - 1], self.tables.head, softcap)
        ids = batch.token_ids[labels] if self.options.loss == "ce" else None
        return chunked_loss(
            states, self.tables.head, teacher, weights, kind=self.options.loss, labels=ids, softcap=softcap
        )


def per_draft(result: ChunkedLoss, drafts: Tensor, count: int) -> Mapping[str, tuple[Tensor, Tensor]]:
    """`accuracy/j` and `acceptance/j` of M rows that are draft number `drafts` [M] of `count`."""
    device = drafts.device
    found: dict[str, tuple[Tensor, Tensor]] = {}
    numbers = torch.zeros(count, device=device).index_add_(0, drafts, torch.ones_like(drafts, dtype=torch.float32))
    for name, values in (("accuracy", result.hits.float()), ("acceptance", result.acceptance)):
        sums = torch.zeros(count, device=device).index_add_(0, drafts, values.squeeze(1))
        found |= {f"{name}/{j}": (sums[j], numbers[j]) for j in range(count)}
    return found


def head_shape(options: BlockTrainingOptions, facts: TargetFacts) -> LayerShape:
    """Sizes of the layers; the residual stream is as wide as the target's, whose tables the head uses."""
    width = facts.hidden_size
    head_dim = options.head_dim or (128 if width >= 2048 else 64 if width >= 256 else 16)
    heads = options.num_heads or max(1, width // head_dim)
    kv_heads = options.num_kv_heads or max(n for n in range(1, max(1, heads // 2) + 1) if heads % n == 0)
    _require(heads % kv_heads == 0, "num_kv_heads", kv_heads, f"a divisor of num_heads={heads}")
    theta = options.rope_theta or (10_000.0 if facts.max_model_len <= _LONG_CONTEXT else 1_000_000.0)
    return LayerShape(
        hidden_size=width,
        intermediate_size=options.intermediate_size or 3 * width,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=1e-6,
        rope=RopeConfig(head_dim=head_dim, theta=theta),
        qk_norm=True,
    )


def _capture_layers(options: BlockTrainingOptions, facts: TargetFacts) -> tuple[int, ...]:
    given = options.capture_layers
    if given is None:
        return default_capture_layers(facts.num_layers, max(_FEWEST_CAPTURES, options.num_layers))
    fits = bool(given) and list(given) == sorted(set(given)) and given[0] >= -1 and given[-1] < facts.num_layers
    _require(fits, "capture_layers", list(given), f"different layers from -1 to {facts.num_layers - 1}, ascending")
    return tuple(given)


def _mask_token(options: BlockTrainingOptions, facts: TargetFacts) -> int:
    """The mask token; an unused row is one past the tokenizer's ids, which no text contains."""
    given = options.mask_token_id
    if given is not None:
        _require(0 <= given < facts.vocab_size, "mask_token_id", given, f"an id from 0 to {facts.vocab_size - 1}")
        return given
    if facts.mask_token_id is not None:
        return facts.mask_token_id
    if facts.num_token_ids < facts.vocab_size:
        return facts.num_token_ids
    raise ConfigError(
        f"task.head.mask_token_id must be given: the tokenizer of {facts.name} has no mask token, and all "
        f"{facts.vocab_size} rows of its embedding are in use. Choose an id that never occurs in text."
    )


def _require(holds: bool, option: str, value: object, allowed: str) -> None:
    if not holds:
        raise ConfigError(f"task.head.{option}={value} is out of range: it must be {allowed}.")
