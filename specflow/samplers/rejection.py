"""What rejection sampling and its relatives share: rows of a ragged batch, residuals, the verdict.

A method of this family scans the drafts from the left, keeps those before the first one it does not accept, and draws
one more token. Methods differ in the rule of acceptance (`judge`) and in the law of that last token (`final_law`).
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch

from specflow.core.draft import Verdict, VerifyInputs
from specflow.kernels.argmax import lowest_argmax
from specflow.kernels.noise import COIN, two_level_draw, uniform
from specflow.samplers.base import Sampler


@dataclass(frozen=True, kw_only=True)
class GumbelOptions:
    """Options of every sampler that draws tokens by the Gumbel trick."""

    use_fp64_gumbel: bool = False  # draw with float64 logarithms; slower, finer in the far tail

    @property
    def noise_dtype(self) -> torch.dtype:
        """Precision of the noise."""
        return torch.float64 if self.use_fp64_gumbel else torch.float32


class Judgement(NamedTuple):
    """What a rule says about the drafts of a step."""

    accept: torch.Tensor  # [B, K] bool: the leading True of a row are kept
    log_weights: torch.Tensor | None = None  # [B, K+1] float32: log w of the residual [w p - q]+; None: w = 1


class SequentialSampler(Sampler):
    """Drafts are accepted from the left up to the first failure; then one token is drawn."""

    greedy_by_argmax: bool = True  # greedy requests accept a draft iff it is the argmax; False: `judge` decides
    reads_logits: bool = True  # whether `judge` looks at them

    def __init__(self, options: GumbelOptions) -> None:
        self._noise_dtype = options.noise_dtype

    def verify(self, logits: torch.Tensor, inputs: VerifyInputs) -> Verdict:
        """See `Sampler.verify`; no host read and no branch on values."""
        whole = not inputs.all_greedy or (self.reads_logits and not self.greedy_by_argmax)
        if whole:  # more than the argmax is taken of them
            logits = finite_or_masked(logits)
        rows = padded_rows(inputs, logits.shape[0])
        best = lowest_argmax(logits, skip_nan=not whole)
        judged = self._judge_all(logits, rows, best, inputs)
        num_accepted = count_leading(judged.accept, inputs)
        last_row = inputs.cu_rows[:-1] + num_accepted
        final = best[last_row]
        if not inputs.all_greedy:
            weights = judged.log_weights
            weight = None if weights is None else weights.gather(1, num_accepted.unsqueeze(1)).squeeze(1)
            law = self.final_law(logits[last_row].float(), inputs, num_accepted, weight)
            drawn = two_level_draw(law, inputs.seeds, inputs.positions + num_accepted, self._noise_dtype)
            final = torch.where(inputs.temperature == 0, final, drawn)
        return make_verdict(inputs.draft_ids, num_accepted, final)

    def _judge_all(
        self, logits: torch.Tensor, rows: torch.Tensor, best: torch.Tensor, inputs: VerifyInputs
    ) -> Judgement:
        """The rule of the method, and for greedy requests the argmax; best [N] int64 is the argmax of each row."""
        by_argmax = best[rows[:, :-1]] == inputs.draft_ids
        if not inputs.draft_ids.shape[1] or (inputs.all_greedy and self.greedy_by_argmax):
            return Judgement(by_argmax)
        judged = self.judge(logits, rows, inputs)
        if not self.greedy_by_argmax:
            return judged
        greedy = (inputs.temperature == 0).unsqueeze(1)
        return judged._replace(accept=torch.where(greedy, by_argmax, judged.accept))

    @abstractmethod
    def judge(self, logits: torch.Tensor, rows: torch.Tensor, inputs: VerifyInputs) -> Judgement:
        """Which drafts to accept; logits [N, V] without NaN, rows [B, K+1] as from `padded_rows`, K >= 1."""

    def final_law(
        self, logits: torch.Tensor, inputs: VerifyInputs, num_accepted: torch.Tensor, log_weight: torch.Tensor | None
    ) -> torch.Tensor:
        """Log of the last token's law up to a constant, [B, V]: the residual after a rejection, else p."""
        return residual_logits(logits, inputs, num_accepted, log_weight)

    def describe(self) -> dict[str, str]:
        """Method and precision."""
        return {"method": f"{self.name}, torch reference", "gumbel": str(self._noise_dtype).removeprefix("torch.")}


def finite_or_masked(logits: torch.Tensor) -> torch.Tensor:
    """NaN would win every argmax; as -inf it can never be chosen beside a finite logit."""
    most = torch.finfo(logits.dtype).max
    return torch.nan_to_num(logits, nan=float("-inf"), posinf=most, neginf=float("-inf"))


def padded_rows(inputs: VerifyInputs, num_rows: int) -> torch.Tensor:
    """Logits row of every (request, draft) pair, [B, K+1] int64; past the last row of a request it is arbitrary."""
    steps = torch.arange(inputs.draft_ids.shape[1] + 1, device=inputs.cu_rows.device)
    return (inputs.cu_rows[:-1].unsqueeze(1) + steps).clamp_(max=num_rows - 1)


def count_leading(accept: torch.Tensor, inputs: VerifyInputs) -> torch.Tensor:
    """Drafts of each request before its first failure, [B] int64; accept [B, K] bool."""
    steps = torch.arange(accept.shape[1], device=accept.device)
    return (accept & (steps < inputs.num_drafts.unsqueeze(1))).to(torch.int64).cumprod(1).sum(1)


def coins(inputs: VerifyInputs, seeds: torch.Tensor | None = None) -> torch.Tensor:
    """One uniform per draft, [B, K] float32 in (0, 1), keyed by the position the draft stands at."""
    steps = torch.arange(inputs.draft_ids.shape[1], device=inputs.positions.device)
    positions = inputs.positions.unsqueeze(1) + steps
    keys = inputs.seeds if seeds is None else seeds
    return uniform(keys.unsqueeze(1).expand_as(positions), positions, COIN)


def draft_log_probs(
    logits: torch.Tensor, rows: torch.Tensor, inputs: VerifyInputs
) -> tuple[torch.Tensor, torch.Tensor]:
    """log p(d) and log q(d) of every draft, [B, K] float32 each; log q is 0 where drafts are deterministic."""
    draft_ids = inputs.draft_ids.clamp(min=0)
    log_norm = torch.logsumexp(logits.float(), dim=-1)
    log_p = logits[rows[:, :-1], draft_ids].float() - log_norm[rows[:, :-1]]
    if inputs.draft_logits is None:
        return log_p, torch.zeros_like(log_p)
    log_q = torch.log_softmax(inputs.draft_logits, -1).gather(2, draft_ids.unsqueeze(2)).squeeze(2)
    return log_p, log_q


def residual_logits(
    logits: torch.Tensor, inputs: VerifyInputs, num_accepted: torch.Tensor, log_weight: torch.Tensor | None = None
) -> torch.Tensor:
    """Log of the law the last token is drawn from, up to a constant, [B, V].

    logits: [B, V] of the row after the accepted drafts. After a rejection the law is [w p - q]+ normalised, with w = 1
    unless log_weight ([B]) is given; without a rejection, or without a proposal at that place (draft -1), it is p.
    A zero or undefined residual can only come from rounding (p equals q, or p(d) is 1): then the row is drawn from p.
    """
    if not inputs.draft_ids.shape[1]:
        return logits
    step = num_accepted.clamp(max=inputs.draft_ids.shape[1] - 1).unsqueeze(1)
    rejected_id = inputs.draft_ids.gather(1, step)
    rejected = ((num_accepted < inputs.num_drafts).unsqueeze(1)) & (rejected_id >= 0)
    if inputs.draft_logits is None:
        columns = torch.arange(logits.shape[1], device=logits.device)
        residual = logits.masked_fill(columns == rejected_id, float("-inf"))
    else:
        draft = inputs.draft_logits.gather(1, step.unsqueeze(2).expand(-1, -1, logits.shape[1])).squeeze(1)
        log_p = torch.log_softmax(logits, -1)
        log_p = log_p if log_weight is None else log_p + log_weight.unsqueeze(1)
        residual = log_difference(log_p, torch.log_softmax(draft, -1))
    best = residual.amax(-1, keepdim=True)
    usable = rejected & (best > float("-inf")) & ~torch.isnan(best)
    return torch.where(usable, residual, logits)


def log_difference(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """log [p - q]+ from logs, -inf where q >= p; stable where the two are close."""
    ratio = torch.exp(log_q - log_p)
    return torch.where(ratio < 1, log_p + torch.log1p(-ratio.clamp(max=1)), float("-inf"))


def make_verdict(draft_ids: torch.Tensor, num_accepted: torch.Tensor, final: torch.Tensor) -> Verdict:
    """Accepted drafts, then the final token, then -1; draft_ids [B, K], num_accepted and final [B] int64."""
    steps = torch.arange(draft_ids.shape[1] + 1, device=draft_ids.device)
    accepted = num_accepted.unsqueeze(1)
    padded = torch.cat([draft_ids, final.unsqueeze(1)], 1)
    tokens = torch.where(steps == accepted, final.unsqueeze(1), padded).masked_fill_(steps > accepted, -1)
    return Verdict(tokens, num_accepted + 1, num_accepted)
