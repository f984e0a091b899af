"""Training of EAGLE-3 heads by training-time test (Li et al. 2025, arXiv 2503.01840).

A head is run S times over a pack. The first run reads the target's states, every later one the head's own outputs of
the run before, while tokens are always the true ones; so step s learns what drafting will ask of it at draft s.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from specflow.checkpoints.capture_layers import default_layers
from specflow.checkpoints.eagle3 import save_eagle3
from specflow.core.layer_numbers import check_layers
from specflow.errors import ConfigError
from specflow.heads.eagle3 import Eagle3Config, Eagle3Head
from specflow.heads.layers import LayerShape, initialise
from specflow.kernels.rotary import RopeConfig, RotaryTable, rotary_table
from specflow.targets.base import TargetFacts, TokenTables
from specflow.training.chunked_loss import LossKind, Teacher, chunked_loss
from specflow.training.objective import LossParts, TrainableHead, TrainBatch
from specflow.training.streamed_attention import StreamedAttention, visible_blocks
from specflow.training.unrolled_attention import UnrolledAttention, plan_blocks

__all__ = ["Eagle3Training", "Eagle3TrainingOptions", "choose_ids", "training_layers"]


@dataclass(frozen=True, kw_only=True)
class Eagle3TrainingOptions:
    """Options of a new EAGLE-3 head. Raises `ConfigError` when they cannot work."""

    num_layers: int = 1  # decoder layers; the first reads embedding and state
    layers: tuple[int, ...] | None = None  # target layers to read; None = a low, a middle and a high one
    intermediate_size: int | None = None  # width of the feed-forward; None = 8/3 of the target's width
    num_heads: int | None = None  # query heads; None = the target's width / head_dim
    num_kv_heads: int | None = None  # key and value heads; None = half the query heads where that works
    head_dim: int = 64  # width of a head
    qk_norm: bool = True  # norms on query and key, as in Qwen3
    rope_theta: float = 10_000.0  # rotary base, the head's own

    ttt_length: int = 5  # S, steps of the unrolled head: the number of drafts it learns
    step_loss_decay: float = 0.8  # weight of each step relative to the one before
    loss: LossKind = "kl"  # kl = divergence from the target, ce = cross-entropy of its most likely token
    draft_vocab_size: int | None = None  # ids that can be drafted, the most frequent ones; None = all
    train_head: bool = False  # train the output matrix too; False = the target's rows, frozen

    norm_before_residual: bool = False  # the residual stream starts from the normed state
    norm_before_fc: bool = False  # one norm over all captured layers
    fc_norm: bool = True  # one norm per captured layer (EAGLE-3.1)
    norm_output: bool = True  # the normed output is fed back (EAGLE-3.1)

    def __post_init__(self) -> None:
        for name in ("num_layers", "ttt_length", "head_dim", "intermediate_size", "num_heads", "num_kv_heads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be 1 or more.")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim={self.head_dim} must be even.")
        if self.draft_vocab_size is not None and self.draft_vocab_size < 1:
            raise ConfigError(f"draft_vocab_size={self.draft_vocab_size} must be 1 or more.")
        if not 0 < self.step_loss_decay <= 1:
            raise ConfigError(f"step_loss_decay={self.step_loss_decay} must be above 0 and at most 1.")
        if self.loss not in ("kl", "ce"):
            raise ConfigError(f"loss={self.loss!r} must be kl or ce.")
        if self.norm_before_fc and self.fc_norm:
            raise ConfigError("norm_before_fc and fc_norm are two ways of the same: set one of them to false.")


class Eagle3Training(TrainableHead):
    """An EAGLE-3 head with the loss it is trained by."""

    module: Eagle3Head
    can_recompute = True

    def __init__(self, options: Eagle3TrainingOptions) -> None:
        self.options = options
        self.num_speculative_tokens = options.ttt_length

    def build(self, facts: TargetFacts, tables: TokenTables, token_counts: Tensor | None, device: torch.device) -> None:
        """See `TrainableHead.build`. The output matrix starts as the target's rows."""
        config = self._config(facts)
        self.layers = config.capture_layers
        self._facts, self._tables, self._device = facts, tables, device
        head = Eagle3Head(config)
        initialise(head)
        if config.reduced:
            if token_counts is None:
                raise ConfigError(
                    f"draft_vocab_size={config.draft_vocab_size} needs to know how often each token is an answer's, "
                    "and there are no counts: leave it out."
                )
            head.ids = choose_ids(token_counts.to("cpu"), config.draft_vocab_size, facts.eos_token_ids)
        self.module = head.to(device)
        self._lend(initial=True)
        self._table: RotaryTable | None = None  # as long as the longest pack so far

    def _config(self, facts: TargetFacts) -> Eagle3Config:
        options, width = self.options, facts.hidden_size
        layers = training_layers(facts.num_layers) if options.layers is None else tuple(sorted(set(options.layers)))
        check_layers(layers, facts.num_layers, "layers")
        vocab = options.draft_vocab_size or facts.vocab_size
        if vocab > facts.vocab_size:
            raise ConfigError(f"draft_vocab_size={vocab} is more than the target's {facts.vocab_size} ids.")
        shape = LayerShape(
            hidden_size=width,
            intermediate_size=options.intermediate_size or -(-8 * width // (3 * 64)) * 64,
            num_heads=(heads := options.num_heads or max(1, width // options.head_dim)),
            num_kv_heads=(kv_heads := options.num_kv_heads or (heads // 2 if heads % 2 == 0 else heads)),
            head_dim=options.head_dim,
            norm_eps=1e-6,
            rope=RopeConfig(head_dim=options.head_dim, theta=options.rope_theta),
            qk_norm=options.qk_norm,
        )
        if heads % kv_heads:
            raise ConfigError(f"num_kv_heads={kv_heads} must divide num_heads={heads}.")
        return Eagle3Config(
            layer=shape,
            num_layers=options.num_layers,
            capture_layers=layers,
            target_hidden_size=width,
            vocab_size=facts.vocab_size,
            draft_vocab_size=vocab,
            norm_before_residual=options.norm_before_residual,
            norm_before_fc=options.norm_before_fc,
            fc_norm=options.fc_norm,
            norm_output=options.norm_output,
            own_head=options.train_head,
            windows=(None,) * options.num_layers,
        )

    def _lend(self, initial: bool = False) -> None:
        """Give the head the target's tables; `initial`: and a trained output matrix its first values."""
        head, tables = self.module, self._tables
        rows = tables.head[head.ids] if head.config.reduced else tables.head
        head.borrow(tables.embedding, rows)
        if initial and head.config.own_head:
            with torch.no_grad():
                head.lm_head.weight.copy_(rows)

    def loss(self, batch: TrainBatch) -> LossParts:
        """See `TrainableHead.loss`. Measures are per draft position s: `accuracy/s` and `acceptance/s`."""
        head, options = self.module, self.options
        assert batch.last_hidden is not None
        steps = self.unroll(batch)
        taught, valid = label_rows(batch, len(steps))
        students = torch.stack([shifted(normed, step + 1)[taught] for step, normed in enumerate(steps)], 1)
        decay = options.step_loss_decay ** torch.arange(len(steps), device=valid.device)
        weights = valid * decay
        result = chunked_loss(
            students,
            head.head_table,
            Teacher(batch.last_hidden[taught], self._tables.head, self._tables.logit_softcap),
            weights,
            kind=options.loss,
            ids=head.ids if head.config.reduced else None,
        )
        measures = {}
        for step in range(len(steps)):
            here = valid[:, step]
            measures[f"accuracy/{step}"] = ((result.hits[:, step] & here).sum().float(), here.sum().float())
            measures[f"acceptance/{step}"] = ((result.acceptance[:, step] * here).sum(), here.sum().float())
        return LossParts(total=result.total, weight=weights.sum(), measures=measures)

    def unroll(self, batch: TrainBatch) -> list[Tensor]:
        """The head's output of every step, S tensors [T, E]; row t of step s predicts token t + 2 + s."""
        head, count = self.module, len(batch.token_ids)
        states = head.fuse(batch.hidden.to(head.fc.weight.dtype))
        attend = self._attention(batch.documents)
        rotary = self._rotary(count + self.options.ttt_length)
        outputs = []
        for step in range(self.options.ttt_length):
            if step:
                attend.next_step()
            embedded = head.embed(batch.token_ids.roll(-1 - step))  # rows near the end of a document have no label
            raw, normed = head(embedded, states, rotary.rows(batch.positions + step), attend)
            states = head.feedback(raw, normed)
            outputs.append(normed)
        return outputs

    def _attention(self, documents: Tensor) -> StreamedAttention | UnrolledAttention:
        """On a GPU one kernel per step, elsewhere block by block, where compiled FlexAttention has no gradient."""
        if documents.device.type != "cpu":
            return StreamedAttention(visible_blocks(documents))
        return UnrolledAttention(documents, plan_blocks(documents), self.recompute)

    def _rotary(self, length: int) -> RotaryTable:
        if self._table is None or len(self._table.values) < length:
            rope = self.module.config.layer.rope
            self._table = rotary_table(rope, length, self._device, self.module.fc.weight.dtype)
        return self._table

    def save(self, folder: Path) -> None:
        """See `TrainableHead.save`; the speculators format."""
        save_eagle3(
            folder,
            self.module,
            target_name=self._facts.name,
            target_architecture=self._facts.architecture,
            max_positions=self._facts.max_model_len,
            num_speculative_tokens=self.num_speculative_tokens,
        )

    def state(self) -> dict[str, Tensor]:
        """The ids that can be drafted: they belong to the weights and are never chosen anew."""
        return {"ids": self.module.ids} if self.module.config.reduced else {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """See `TrainableHead.load_state`. Raises `ConfigError` for a state of another draft vocabulary."""
        ids = state.get("ids")
        if (len(ids) if ids is not None else self.module.config.vocab_size) != self.module.config.draft_vocab_size:
            raise ConfigError(
                f"the saved head drafts {'all ids' if ids is None else f'{len(ids)} ids'}, and draft_vocab_size says "
                f"{self.module.config.draft_vocab_size}: go on with the settings it was started with."
            )
        if ids is not None:
            self.module.ids = ids.to(self._device)
        self._lend()


def training_layers(num_layers: int) -> tuple[int, ...]:
    """A low, a middle and a high layer of a target of N layers, as `Taps` counts; all different, fewer if N = 1.

    From 7 layers on those that every tool takes when nothing is said; below, the first, a middle and the last.
    """
    layers = default_layers(num_layers)
    if layers is not None:
        return layers
    low = 0 if num_layers > 2 else -1
    return tuple(sorted({low, (low + num_layers - 1) // 2, num_layers - 1}))


def choose_ids(counts: Tensor, size: int, always: tuple[int, ...]) -> Tensor:
    """The `size` most frequent ids, ascending; the lower of equals, and those in `always` whatever their count.

    counts [V] int64 on the CPU.
    """
    order = counts.clone()
    order[list(always)] = torch.iinfo(counts.dtype).max
    return order.sort(descending=True, stable=True).indices[:size].sort().values


def shifted(values: Tensor, rows: int) -> Tensor:
    """Row t of the result is row t - rows of values [T, E]; the first ones wrap around and have no label."""
    return values.roll(rows, 0)


def label_rows(batch: TrainBatch, steps: int) -> tuple[Tensor, Tensor]:
    """Rows j of a pack whose next token j + 1 is somebody's label, [N] int64, and whose, [N, S] bool.

    At step s it is the label of row j - 1 - s of the head, which must be in the same document; whether a token may be
    a label at all is its own mark alone.
    """
    documents, count = batch.documents, len(batch.documents)
    numbers = torch.arange(count - 1, device=documents.device)
    rows = numbers.unsqueeze(1) - 1 - torch.arange(steps, device=documents.device)
    own = documents[1:]
    valid = (batch.predicted[1:] & (own >= 0)).unsqueeze(1) & (rows >= 0)
    valid &= documents[rows.clamp(min=0)] == own.unsqueeze(1)
    taught = valid.any(1).nonzero().flatten()
    return taught, valid[taught]
