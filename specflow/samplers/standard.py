"""Rejection sampling (Leviathan et al. 2022, sections 2.3 and A.1; Chen et al. 2023, algorithm 2) in plain torch.

Draft d of a row is accepted with probability min(1, p(d)/q(d)); on the first rejection one token is drawn from
[p - q]+ normalised, and when all are accepted one more from p. A deterministic draft has a one-hot q: it is accepted
with probability p(d), and the residual is p without d. At temperature 0 a draft is accepted iff it is the argmax.

Coins and noise are keyed by (seed, position). That is safe here although a position past the first rejection is
verified again in the next step: what lies past the first rejection has not been looked at.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from specflow.core.draft import Verdict, VerifyInputs
from specflow.core.limits import EngineLimits
from specflow.samplers.rejection import GumbelOptions, Judgement, SequentialSampler, coins, draft_log_probs
from specflow.samplers.triton_pipeline import KernelChoice, check_kernels, pipeline_for

if TYPE_CHECKING:
    from specflow.kernels.rejection.pipeline import RejectionPipeline


@dataclass(frozen=True, kw_only=True)
class StandardOptions(GumbelOptions):
    """Options of `sampler=standard`."""

    kernels: KernelChoice = "auto"  # auto: Triton on a GPU where it is installed, else torch


class StandardSampler(SequentialSampler):
    """Lossless verification of greedy and probabilistic drafts, every request with its own temperature."""

    name = "standard"

    def __init__(self, options: StandardOptions) -> None:
        super().__init__(options)
        check_kernels(options.kernels)
        self._kernels = options.kernels
        self._pipeline: RejectionPipeline | None = None

    def configure(self, limits: EngineLimits) -> None:
        """Choose the kernels; a subclass with another rule keeps the torch path, which asks it."""
        if type(self).judge is StandardSampler.judge and type(self).final_law is SequentialSampler.final_law:
            self._pipeline = pipeline_for(self._kernels, limits.device, self._noise_dtype)
        self.applies_temperature = self.reads_draft_slots = self._pipeline is not None

    def warm_up(self, limits: EngineLimits, *, draft_laws: bool) -> None:
        """See `Sampler.warm_up`."""
        if self._pipeline is not None:
            self._pipeline.warm_up(limits, draft_laws=draft_laws)

    def verify(self, logits: torch.Tensor, inputs: VerifyInputs) -> Verdict:
        """See `Sampler.verify`; both ways emit the same tokens under the same seeds."""
        if self._pipeline is not None:
            return self._pipeline.verify(logits, inputs, inputs.draft_slots)
        return super().verify(logits, inputs)

    def judge(self, logits: torch.Tensor, rows: torch.Tensor, inputs: VerifyInputs) -> Judgement:
        """Coins of all drafts at once: log p(d) > log u + log q(d)."""
        log_p, log_q = draft_log_probs(logits, rows, inputs)
        # q(d) = 0 cannot have been sampled; without this test a wrong q would accept everything.
        possible = (inputs.draft_ids >= 0) & (log_q > float("-inf"))
        return Judgement((log_p > torch.log(coins(inputs)) + log_q) & possible)

    def describe(self) -> dict[str, str]:
        """Method and precision."""
        kernels = "torch reference" if self._pipeline is None else "triton kernels"
        return {**super().describe(), "method": f"rejection sampling, {kernels}"}
