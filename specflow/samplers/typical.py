"""Typical acceptance (Cai et al. 2024, "Medusa", arXiv 2401.10774, section 2.3.1). Not lossless.

A draft is accepted when the target finds it likely enough for how uncertain it is:
p(d) > min(posterior_threshold, posterior_alpha * exp(-H(p))), with H the entropy of p in nats. No coin is tossed, so
the output is sharper than the target's law. After the accepted drafts one token is drawn from p of that row.
Greedy requests accept a draft iff it is the argmax, so their output is unchanged.
"""

from dataclasses import dataclass

import torch

from specflow.core.draft import VerifyInputs
from specflow.errors import ConfigError
from specflow.samplers.rejection import GumbelOptions, Judgement, SequentialSampler


@dataclass(frozen=True, kw_only=True)
class TypicalOptions(GumbelOptions):
    """Options of `sampler=typical`; the defaults are Medusa's. Raises `ConfigError` when a value is out of range."""

    posterior_threshold: float = 0.09  # a draft at least this likely is always accepted
    posterior_alpha: float = 0.3  # share of exp(-entropy) that is enough where the target is uncertain

    def __post_init__(self) -> None:
        for key in ("posterior_threshold", "posterior_alpha"):
            if not 0 <= getattr(self, key) <= 1:
                raise ConfigError(f"sampler.{key}={getattr(self, key)} must be in [0, 1].")


class TypicalSampler(SequentialSampler):
    """Lossy at temperature above 0."""

    name = "typical"
    lossless = False
    needs_draft_logits = False

    def __init__(self, options: TypicalOptions) -> None:
        super().__init__(options)
        self.options = options

    def judge(self, logits: torch.Tensor, rows: torch.Tensor, inputs: VerifyInputs) -> Judgement:
        """Compare p(d) with the threshold of its row."""
        log_p = torch.log_softmax(logits.float(), -1)
        entropy = -torch.special.xlogy(log_p.exp(), log_p.exp()).sum(-1)
        threshold = (self.options.posterior_alpha * torch.exp(-entropy)).clamp(max=self.options.posterior_threshold)
        of_draft = rows[:, :-1]
        likely = log_p[of_draft, inputs.draft_ids.clamp(min=0)].exp() > threshold[of_draft]
        return Judgement(likely & (inputs.draft_ids >= 0))

    def final_law(
        self, logits: torch.Tensor, inputs: VerifyInputs, num_accepted: torch.Tensor, log_weight: torch.Tensor | None
    ) -> torch.Tensor:
        """p itself: a draft that was refused may still be drawn."""
        return logits

    def describe(self) -> dict[str, str]:
        """Method, precision and thresholds."""
        options = self.options
        thresholds = f"min({options.posterior_threshold:g}, {options.posterior_alpha:g} exp(-entropy))"
        return {**super().describe(), "method": "typical acceptance", "accepts p above": thresholds, "lossless": "no"}
