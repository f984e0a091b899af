"""Rejection sampling (Leviathan et al. 2022, sections 2.3 and A.1; Chen et al. 2023, algorithm 2) in plain torch.

Draft d of a row is accepted with probability min(1, p(d)/q(d)); on the first rejection one token is drawn from
[p - q]+ normalised, and when all are accepted one more from p. A deterministic draft has a one-hot q: it is accepted
with probability p(d), and the residual is p without d. At temperature 0 a draft is accepted iff it is the argmax.
"""

from dataclasses import dataclass

import torch

from specflow.core.draft import Verdict, VerifyInputs
from specflow.samplers.base import Sampler
from specflow.samplers.noise import COIN, TARGET, gumbel_argmax, gumbel_noise, uniform


@dataclass(frozen=True, kw_only=True)
class StandardOptions:
    """Options of `sampler=standard`."""

    use_fp64_gumbel: bool = False  # draw with float64 logarithms; slower, finer in the far tail


class StandardSampler(Sampler):
    """Lossless verification of greedy and probabilistic drafts, every request with its own temperature."""

    name = "standard"

    def __init__(self, options: StandardOptions) -> None:
        self._noise_dtype = torch.float64 if options.use_fp64_gumbel else torch.float32

    def verify(self, logits: torch.Tensor, inputs: VerifyInputs) -> Verdict:
        """See `Sampler.verify`; no host read and no branch on values."""
        # A NaN would win every argmax; as -inf it can never be chosen beside a finite logit.
        logits = torch.nan_to_num(logits, nan=float("-inf"), posinf=torch.finfo(logits.dtype).max, neginf=float("-inf"))
        rows = _padded_rows(inputs, logits.shape[0])
        best = torch.argmax(logits, dim=-1)
        accept = best[rows[:, :-1]] == inputs.draft_ids
        if not inputs.all_greedy:
            sampled = _accept_sampled(logits, rows, inputs)
            accept = torch.where((inputs.temperature == 0).unsqueeze(1), accept, sampled)
        steps = torch.arange(inputs.draft_ids.shape[1], device=logits.device)
        accept &= steps < inputs.num_drafts.unsqueeze(1)
        num_accepted = accept.to(torch.int64).cumprod(1).sum(1)
        last_row = inputs.cu_rows[:-1] + num_accepted
        final = best[last_row]
        if not inputs.all_greedy:
            drawn = self._draw_final(logits[last_row].float(), inputs, num_accepted)
            final = torch.where(inputs.temperature == 0, final, drawn)
        return _verdict(inputs.draft_ids, num_accepted, final)

    def _draw_final(self, logits: torch.Tensor, inputs: VerifyInputs, num_accepted: torch.Tensor) -> torch.Tensor:
        """The recovered token where a draft was rejected, the bonus token elsewhere; logits [B, V] -> int64 [B]."""
        if inputs.draft_ids.shape[1]:
            logits = _residual(logits, inputs, num_accepted)
        noise = gumbel_noise(inputs.seeds, inputs.positions + num_accepted, TARGET, logits.shape[1], self._noise_dtype)
        return gumbel_argmax(logits, noise)

    def describe(self) -> dict[str, str]:
        """Method and precision."""
        return {
            "method": "rejection sampling, torch reference",
            "gumbel": str(self._noise_dtype).removeprefix("torch."),
        }


def _padded_rows(inputs: VerifyInputs, num_rows: int) -> torch.Tensor:
    """Logits row of every (request, draft) pair, [B, K+1] int64; past the last row of a request it is arbitrary."""
    steps = torch.arange(inputs.draft_ids.shape[1] + 1, device=inputs.cu_rows.device)
    return (inputs.cu_rows[:-1].unsqueeze(1) + steps).clamp_(max=num_rows - 1)


def _accept_sampled(logits: torch.Tensor, rows: torch.Tensor, inputs: VerifyInputs) -> torch.Tensor:
    """Coins of all drafts at once, [B, K] bool: log p(d) > log u + log q(d)."""
    draft_ids = inputs.draft_ids.clamp(min=0)
    steps = torch.arange(draft_ids.shape[1], device=logits.device)
    positions = inputs.positions.unsqueeze(1) + steps
    log_norm = torch.logsumexp(logits.float(), dim=-1)
    log_p = logits[rows[:, :-1], draft_ids].float() - log_norm[rows[:, :-1]]
    log_q = torch.zeros_like(log_p)
    if inputs.draft_logits is not None:
        log_q = torch.log_softmax(inputs.draft_logits, -1).gather(2, draft_ids.unsqueeze(2)).squeeze(2)
    coins = uniform(inputs.seeds.unsqueeze(1).expand_as(positions), positions, COIN)
    # q(d) = 0 cannot have been sampled; without the second test a wrong q would accept everything.
    possible = (inputs.draft_ids >= 0) & (log_q > float("-inf"))
    return (log_p > torch.log(coins) + log_q) & possible


def _residual(logits: torch.Tensor, inputs: VerifyInputs, num_accepted: torch.Tensor) -> torch.Tensor:
    """Log of the law the last token is drawn from, up to a constant, [B, V].

    A zero or undefined residual can only come from rounding (p equals q, or p(d) is 1): then the row is drawn from p.
    """
    last = inputs.draft_ids.shape[1] - 1
    step = num_accepted.clamp(max=last).unsqueeze(1)
    rejected_id = inputs.draft_ids.gather(1, step)
    rejected = ((num_accepted < inputs.num_drafts).unsqueeze(1)) & (rejected_id >= 0)
    if inputs.draft_logits is None:
        columns = torch.arange(logits.shape[1], device=logits.device)
        residual = logits.masked_fill(columns == rejected_id, float("-inf"))
    else:
        draft = inputs.draft_logits.gather(1, step.unsqueeze(2).expand(-1, -1, logits.shape[1])).squeeze(1)
        residual = _log_difference(torch.log_softmax(logits, -1), torch.log_softmax(draft, -1))
    best = residual.amax(-1, keepdim=True)
    usable = rejected & (best > float("-inf")) & ~torch.isnan(best)
    return torch.where(usable, residual, logits)


def _log_difference(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """log [p - q]+ from logs, -inf where q >= p; stable where the two are close."""
    ratio = torch.exp(log_q - log_p)
    return torch.where(ratio < 1, log_p + torch.log1p(-ratio.clamp(max=1)), float("-inf"))


def _verdict(draft_ids: torch.Tensor, num_accepted: torch.Tensor, final: torch.Tensor) -> Verdict:
    """Accepted drafts, then the final token, then -1."""
    steps = torch.arange(draft_ids.shape[1] + 1, device=draft_ids.device)
    accepted = num_accepted.unsqueeze(1)
    padded = torch.cat([draft_ids, final.unsqueeze(1)], 1)
    tokens = torch.where(steps == accepted, final.unsqueeze(1), padded).masked_fill_(steps > accepted, -1)
    return Verdict(tokens, num_accepted + 1, num_accepted)
