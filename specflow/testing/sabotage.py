"""Samplers that are wrong on purpose, each in a way that somebody shipped: a gate that passes one of them is no gate.

All of them look right in the text they produce.
"""

from dataclasses import replace

import torch

from specflow.core.draft import Verdict, VerifyInputs
from specflow.kernels.noise import DRAFT, TARGET
from specflow.samplers.block import BlockOptions, BlockSampler
from specflow.samplers.rejection import Judgement, SequentialSampler, coins, draft_log_probs, padded_rows
from specflow.samplers.standard import StandardOptions, StandardSampler


class _Wrong(StandardSampler):
    """Rejection sampling with one thing changed."""

    def __init__(self, options: StandardOptions | None = None) -> None:
        super().__init__(options or StandardOptions())


class ArgmaxMatch(_Wrong):
    """Accepts a draft iff it is the argmax, also when the request samples."""

    name = "argmax_match"

    def judge(self, logits: torch.Tensor, rows: torch.Tensor, inputs: VerifyInputs) -> Judgement:
        """No coin."""
        return Judgement(torch.argmax(logits, -1)[rows[:, :-1]] == inputs.draft_ids)


class PlainResidual(_Wrong):
    """After a rejection draws from p itself, neither subtracting q nor leaving out the draft."""

    name = "plain_residual"

    def final_law(
        self, logits: torch.Tensor, inputs: VerifyInputs, num_accepted: torch.Tensor, log_weight: torch.Tensor | None
    ) -> torch.Tensor:
        """Always p."""
        return logits


class SoftmaxResidual(_Wrong):
    """Normalises the residual by a softmax over its probabilities (transformers PR 28508)."""

    name = "softmax_residual"

    def final_law(
        self, logits: torch.Tensor, inputs: VerifyInputs, num_accepted: torch.Tensor, log_weight: torch.Tensor | None
    ) -> torch.Tensor:
        """exp of a probability where its logarithm belongs."""
        law = super().final_law(logits, inputs, num_accepted, log_weight)
        residual = torch.softmax(law, -1)
        rejected = (num_accepted < inputs.num_drafts).unsqueeze(1)
        return torch.where(rejected, residual, law)


class UnclampedResidual(_Wrong):
    """Draws from |p - q| instead of [p - q]+."""

    name = "unclamped_residual"

    def final_law(
        self, logits: torch.Tensor, inputs: VerifyInputs, num_accepted: torch.Tensor, log_weight: torch.Tensor | None
    ) -> torch.Tensor:
        """The absolute difference; with one-hot q the draft keeps the mass 1 - p(d)."""
        if not inputs.draft_ids.shape[1]:
            return logits
        step = num_accepted.clamp(max=inputs.draft_ids.shape[1] - 1).unsqueeze(1)
        ids = inputs.draft_ids.gather(1, step).clamp(min=0)
        q = torch.zeros_like(logits).scatter_(1, ids, 1.0)
        if inputs.draft_logits is not None:
            index = step.unsqueeze(2).expand(-1, -1, logits.shape[1])
            q = torch.softmax(inputs.draft_logits.gather(1, index).squeeze(1), -1)
        residual = (torch.softmax(logits, -1) - q).abs().log()
        return torch.where((num_accepted < inputs.num_drafts).unsqueeze(1), residual, logits)


class SharedNoise(_Wrong):
    """Drafts and residual draw from one stream of noise (vLLM PR 54282). Wrong for probabilistic drafts."""

    name = "shared_noise"
    draft_domain = TARGET


class IgnoredDraftLaw(_Wrong):
    """Tests coins against p(d) as if q were 1, but keeps the residual of the real q. Wrong for probabilistic drafts."""

    name = "ignored_draft_law"

    def judge(self, logits: torch.Tensor, rows: torch.Tensor, inputs: VerifyInputs) -> Judgement:
        """q := 1 in the ratio."""
        log_p, _ = draft_log_probs(logits, rows, inputs)
        return Judgement((log_p > torch.log(coins(inputs))) & (inputs.draft_ids >= 0))


class LenientRatio(_Wrong):
    """Accepts with probability min(1, 2 p/q)."""

    name = "lenient_ratio"

    def judge(self, logits: torch.Tensor, rows: torch.Tensor, inputs: VerifyInputs) -> Judgement:
        """Twice the right ratio."""
        log_p, log_q = draft_log_probs(logits, rows, inputs)
        return Judgement((log_p + 0.6931 > torch.log(coins(inputs)) + log_q) & (inputs.draft_ids >= 0))


class OffByOneRow(_Wrong):
    """Judges every draft by the row after its own."""

    name = "off_by_one_row"

    def judge(self, logits: torch.Tensor, rows: torch.Tensor, inputs: VerifyInputs) -> Judgement:
        """Rows shifted by one."""
        return super().judge(logits, padded_rows(inputs, len(logits) - 1).add(1).clamp(max=len(logits) - 1), inputs)


class UncheckedFirst(_Wrong):
    """Keeps the first draft without looking at it."""

    name = "unchecked_first"

    def judge(self, logits: torch.Tensor, rows: torch.Tensor, inputs: VerifyInputs) -> Judgement:
        """The first column is always true."""
        judged = super().judge(logits, rows, inputs)
        return judged._replace(accept=judged.accept.index_fill(1, torch.tensor([0], device=rows.device), True))


class ArgmaxBonus(_Wrong):
    """Takes the argmax as the bonus token after a fully accepted draft."""

    name = "argmax_bonus"

    def final_law(
        self, logits: torch.Tensor, inputs: VerifyInputs, num_accepted: torch.Tensor, log_weight: torch.Tensor | None
    ) -> torch.Tensor:
        """All the mass on one token where nothing was rejected."""
        law = super().final_law(logits, inputs, num_accepted, log_weight)
        best = torch.full_like(law, float("-inf")).scatter_(1, logits.argmax(-1, keepdim=True), 0.0)
        bonus = (num_accepted == inputs.num_drafts) & (inputs.num_drafts > 0)
        return torch.where(bonus.unsqueeze(1), best, law)


class ReusedCoins(BlockSampler):
    """Block verification with coins and draft noise keyed by position alone: right in one step, wrong over several."""

    name = "reused_coins"
    fresh_draft_noise = False
    draft_domain = DRAFT

    def __init__(self, options: BlockOptions | None = None) -> None:
        super().__init__(options or BlockOptions())

    def verify(self, logits: torch.Tensor, inputs: VerifyInputs) -> Verdict:
        """The same numbers in every step."""
        return super().verify(logits, replace(inputs, rounds=torch.zeros_like(inputs.rounds)))


# Wrong for both kinds of draft, and those that are wrong only when drafts are sampled.
ALWAYS_WRONG: tuple[type[SequentialSampler], ...] = (
    ArgmaxMatch, PlainResidual, SoftmaxResidual, UnclampedResidual, LenientRatio, OffByOneRow, UncheckedFirst,
    ArgmaxBonus, ReusedCoins,
)  # fmt: skip
WRONG_WITH_SAMPLED_DRAFTS: tuple[type[SequentialSampler], ...] = (SharedNoise, IgnoredDraftLaw)
