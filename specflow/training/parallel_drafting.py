"""Training a drafter that predicts several tokens in one pass: PARD (An et al. 2025, arXiv 2504.18583).

The text is repeated once per draft. Segment 0 is the text itself; segments 1 … K-1 hold the mask token at every
position. Row (i, t), position t of segment i, stands for "the text ended at t-i, and i masks followed", so it sees
the text up to t-i and the i masks of its own chain, and predicts token t+1 like every row at position t.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specflow.errors import ConfigError
from specflow.training.distillation import continue_text, divergence
from specflow.training.pretrain_options import PretrainOptions

# (model, teacher or None, windows, share of the divergence) -> loss
Objective = Callable[[Any, Any, Tensor, float], Tensor]

_AGREEMENT_PROMPTS = 16
_IGNORED = -100  # of cross_entropy


@dataclass(frozen=True)
class ParallelRows:
    """The N rows that a pass computes of every window, segment after segment."""

    segments: Tensor  # [N] int64
    positions: Tensor  # [N] int64

    def to(self, device: torch.device) -> "ParallelRows":
        """The same on another device."""
        return ParallelRows(self.segments.to(device), self.positions.to(device))

    @property
    def visible(self) -> Tensor:
        """Whether query row (first index) sees key row (second), bool [N, N]; every row sees itself."""
        behind = self.positions.unsqueeze(1) - self.positions
        deeper = self.segments.unsqueeze(1) - self.segments
        text = (self.segments == 0) & (behind >= self.segments.unsqueeze(1))
        chain = (self.segments > 0) & (deeper >= 0) & (behind == deeper)
        return text | chain

    @property
    def counted(self) -> Tensor:
        """Rows whose chain begins inside the window, bool [N]: the first i rows of segment i have no text."""
        return self.positions >= self.segments


def draw_rows(length: int, drafts: int, keep: float, least: float, generator: torch.Generator) -> ParallelRows:
    """Choose the rows of windows of `length` tokens for `drafts` segments ("conditional drop token" of PARD).

    Segment 0 is whole. Segment i keeps int(length * max(keep^i, least)) positions, drawn among those that follow a
    kept position of segment i-1, so every kept row still has its whole chain. Positions wrap around at the end, which
    keeps the number of rows the same in every draw; wrapped rows are not counted.
    """
    kept = [torch.arange(length)]
    for segment in range(1, drafts):
        candidates = (kept[-1] + 1) % length
        count = int(length * max(keep**segment, least))
        order = torch.randperm(len(candidates), generator=generator)
        kept.append(candidates[order[:count]].sort().values)
    segments = [torch.full_like(positions, segment) for segment, positions in enumerate(kept)]
    return ParallelRows(torch.cat(segments), torch.cat(kept))


def parallel_logits(model: Any, tokens: Tensor, rows: ParallelRows, mask_token: int) -> Tensor:
    """Logits of the rows, [B, N, V], for windows tokens [B, length] int64."""
    inputs = tokens[:, rows.positions].masked_fill(rows.segments > 0, mask_token)
    return model(
        input_ids=inputs,
        position_ids=rows.positions.unsqueeze(0),
        attention_mask=rows.visible[None, None],
        use_cache=False,
    ).logits


def parallel_loss(
    model: Any, teacher: Any, windows: Tensor, share: float, segments: Tensor, positions: Tensor, mask_token: int
) -> Tensor:
    """Cross-entropy of the counted rows, mixed with their divergence from a teacher if there is one; a scalar.

    windows: int64 [B, length + 1]. segments, positions: those of `ParallelRows`. Whatever its segment, a row at t
    imitates the teacher's distribution after the whole text up to t, so one pass of the teacher serves all segments.
    """
    rows = ParallelRows(segments, positions)
    inputs = windows[:, :-1]
    logits = parallel_logits(model, inputs, rows, mask_token)
    counted = rows.counted
    expected = windows[:, positions + 1].masked_fill(~counted, _IGNORED)
    entropy = F.cross_entropy(logits.float().flatten(0, 1), expected.flatten(), ignore_index=_IGNORED)
    if teacher is None:
        return entropy
    with torch.no_grad():
        wanted = teacher(input_ids=inputs, use_cache=False).logits[:, positions]
    return (1 - share) * entropy + share * divergence(logits, wanted, counted.expand(len(windows), -1))


class ParallelObjective:
    """`parallel_loss` over rows drawn anew for every training batch, and over the same rows in every measurement.

    All windows of a batch share their rows: one attention mask [N, N] then serves them all.
    """

    def __init__(self, options: PretrainOptions, mask_token: int) -> None:
        self._options, self._mask_token = options, mask_token
        self._generator = torch.Generator().manual_seed(options.seed)
        self._loss = torch.compile(parallel_loss) if options.compile else parallel_loss

    def __call__(self, model: Any, teacher: Any, windows: Tensor, share: float) -> Tensor:
        """The loss of windows [B, length + 1] int64, a scalar."""
        options = self._options
        generator = self._generator if model.training else torch.Generator().manual_seed(options.seed)
        length = windows.shape[1] - 1
        rows = draw_rows(
            length, options.parallel_drafts, options.parallel_keep, options.parallel_keep_least, generator
        ).to(windows.device)
        loss = self._loss if model.training else parallel_loss
        return loss(model, teacher, windows, share, rows.segments, rows.positions, self._mask_token)


def find_mask_token(tokenizer: Any) -> int:
    """The id that stands for a token to be drafted. ConfigError when the tokenizer has no mask token."""
    if tokenizer.mask_token_id is None:
        raise ConfigError(
            "parallel_drafts needs a mask token, and the tokenizer has none: add one with "
            "tokenizer.add_special_tokens({'mask_token': ...}) or set parallel_drafts to 0"
        )
    return int(tokenizer.mask_token_id)


def mark_parallel(config: Any, mask_token: int, drafts: int) -> None:
    """Enter in a model's configuration what `proposer=pard` (and other programs that run PARD) look for."""
    config.spd_type, config.pard_token, config.para_num = "pard", mask_token, drafts


@torch.no_grad()
def parallel_agreement(
    draft: Any, target: Any, prompts: Tensor, new_tokens: int, end_of_text: int, drafts: int, mask_token: int
) -> tuple[float, ...]:
    """How often the first i+1 drafts are all what the target chose, for i = 0 … drafts-1.

    Measured from every place of the target's greedy continuations of prompts [B, length] int64, each up to its first
    end-of-text token; real rounds begin after rejections more often than that. new_tokens must be drafts or more.
    """
    hits = torch.zeros(drafts, dtype=torch.float64)
    places = torch.zeros(drafts, dtype=torch.float64)
    for part in prompts.split(_AGREEMENT_PROMPTS):
        text = continue_text(target, part, new_tokens)
        inputs, chosen = text[:, :-1], text[:, 1:]
        length = inputs.shape[1]
        rows = draw_rows(length, drafts, 1.0, 1.0, torch.Generator()).to(text.device)
        drafted = parallel_logits(draft, inputs, rows, mask_token).argmax(dim=-1).view(len(part), drafts, length)
        first = part.shape[1] - 1
        ends = (chosen[:, first:] == end_of_text).long()
        live = (ends.cumsum(dim=1) - ends) == 0
        right = torch.ones_like(live)
        for index in range(drafts):
            # Column a: the draft number `index` of the round whose anchor is at position first + a.
            last = live.shape[1] - index
            right = right[:, :last] & (drafted[:, index, first + index :] == chosen[:, first + index :])
            hits[index] += (right & live[:, index:]).sum().item()
            places[index] += live[:, index:].sum().item()
    return tuple((hits / places.clamp(min=1)).tolist())
