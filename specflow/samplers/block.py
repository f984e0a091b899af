"""Block verification (Sun et al. 2024, arXiv 2403.10444; acceptance Eq. 5, residual Eq. 4).

The drafts of a step are judged together: with w_0 = 1 and w_i = min(1, w_{i-1} p(d_i)/q(d_i)), the longest prefix i
is kept whose own coin falls below h_i = S_i / (S_i + 1 - w_i), where S_i is the mass of [w_i p - q]+ at the next
place; h_k = w_k after the last draft. A later success overrides earlier failures, which accepts at least as many
drafts as rejection sampling in expectation. Then one token comes from [w p - q]+ normalised, or from p after all k.
With deterministic drafts the law of the accepted length is that of rejection sampling.

All coins and drafts of a step decide how many are kept, so a place behind the last kept draft is verified again with
numbers that have been looked at. Position-keyed coins or draft noise would therefore bias the output: coins, residual
noise and the drafter's noise are keyed by the request's verification step as well.
"""

from dataclasses import dataclass, replace

import torch

from specflow.core.draft import Verdict, VerifyInputs
from specflow.kernels.noise import fresh_seeds
from specflow.samplers.rejection import (
    GumbelOptions,
    Judgement,
    SequentialSampler,
    coins,
    count_leading,
    draft_log_probs,
    finite_or_masked,
    log_difference,
)


@dataclass(frozen=True, kw_only=True)
class BlockOptions(GumbelOptions):
    """Options of `sampler=block`."""


class BlockSampler(SequentialSampler):
    """Lossless; accepts more than rejection sampling when drafts are probabilistic."""

    name = "block"
    fresh_draft_noise = True

    def __init__(self, options: BlockOptions) -> None:
        super().__init__(options)

    def verify(self, logits: torch.Tensor, inputs: VerifyInputs) -> Verdict:
        """See `Sampler.verify`; every number is fresh in every step."""
        return super().verify(logits, replace(inputs, seeds=fresh_seeds(inputs.seeds, inputs.rounds)))

    def judge(self, logits: torch.Tensor, rows: torch.Tensor, inputs: VerifyInputs) -> Judgement:
        """True for the drafts up to the longest successful prefix, and the weights w of all prefixes."""
        log_p, log_q = draft_log_probs(logits, rows, inputs)
        num_valid = _valid_drafts(log_q, inputs)
        log_weights = prefix_weights(log_p - log_q)
        lengths = torch.arange(1, log_p.shape[1] + 1, device=logits.device)
        chances = torch.where(
            lengths < num_valid.unsqueeze(1),
            _inner_chances(logits, rows, inputs, log_p, log_weights),
            log_weights[:, 1:].exp(),
        )
        success = (coins(inputs) <= chances) & (lengths <= num_valid.unsqueeze(1))
        longest = (success * lengths).amax(1, keepdim=True)
        return Judgement(lengths <= longest, log_weights)


def _valid_drafts(log_q: torch.Tensor, inputs: VerifyInputs) -> torch.Tensor:
    """Length of the block, [B] int64: it ends before a placeholder and before a draft that q cannot have produced."""
    return count_leading((inputs.draft_ids >= 0) & (log_q > float("-inf")), inputs)


def prefix_weights(log_ratio: torch.Tensor) -> torch.Tensor:
    """log w_0 … log w_K, [B, K+1], from log p(d)/q(d) [B, K]: w_i = min(1, w_{i-1} p(d_i)/q(d_i))."""
    log_ratio = finite_or_masked(log_ratio)
    weights = [torch.zeros_like(log_ratio[:, 0])]
    for index in range(log_ratio.shape[1]):
        weights.append((weights[-1] + log_ratio[:, index]).clamp(max=0))
    return torch.stack(weights, 1)


def _inner_chances(
    logits: torch.Tensor, rows: torch.Tensor, inputs: VerifyInputs, log_p: torch.Tensor, log_weights: torch.Tensor
) -> torch.Tensor:
    """h_1 … h_{K-1} for prefixes inside a block, [B, K]; the last column is unused.

    Place by place, so that no more than [B, V] is held at once.
    """
    chances = torch.ones_like(log_p)
    for index in range(1, log_p.shape[1]):
        log_weight = log_weights[:, index]
        if inputs.draft_logits is None:
            mass = log_weight.exp() * (1 - log_p[:, index].exp()).clamp(min=0)
        else:
            weighted = torch.log_softmax(logits[rows[:, index]].float(), -1) + log_weight.unsqueeze(1)
            mass = log_difference(weighted, torch.log_softmax(inputs.draft_logits[:, index], -1)).exp().sum(-1)
        # Nothing left over and w = 1: p equals q there, and the prefix is certain to be kept.
        chances[:, index - 1] = torch.nan_to_num(mass / (mass + 1 - log_weight.exp()), nan=1.0)
    return chances
