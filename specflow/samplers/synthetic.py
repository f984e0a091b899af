"""Synthetic acceptance: drafts are accepted at rates that the user sets. Not lossless; the text means nothing.

For measuring what a system would gain from a drafter of a given quality. Options, conversion and errors are vLLM's:
entry i of `synthetic_acceptance_rates` is the probability that the first i+1 drafts are all accepted, and
`synthetic_acceptance_length` is turned into the rates of smallest variance with that mean length.
A rejected draft is replaced as in rejection sampling (at temperature 0 by the argmax, which may be the draft itself).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from specflow.core.draft import Verdict, VerifyInputs
from specflow.core.limits import EngineLimits
from specflow.errors import ConfigError
from specflow.kernels.argmax import lowest_argmax
from specflow.kernels.triton_choice import triton_available
from specflow.samplers.rejection import GumbelOptions, Judgement, SequentialSampler, coins


@dataclass(frozen=True, kw_only=True)
class SyntheticOptions(GumbelOptions):
    """Options of `sampler=synthetic`; exactly one of the first two. Raises `ConfigError` otherwise."""

    synthetic_acceptance_rates: tuple[float, ...] | None = None  # K numbers in [0, 1], none above the one before
    synthetic_acceptance_length: float | None = None  # mean tokens per verification step, in [1, K+1]

    def __post_init__(self) -> None:
        rates, length = self.synthetic_acceptance_rates, self.synthetic_acceptance_length
        if (rates is None) == (length is None):
            given = "neither is set" if rates is None else "both are set"
            raise ConfigError(
                "sampler=synthetic needs exactly one of sampler.synthetic_acceptance_rates and "
                f"sampler.synthetic_acceptance_length: {given}."
            )
        if rates is not None:
            _check_rates(rates)
        elif length is not None and not length >= 1:
            raise ConfigError(
                f"sampler.synthetic_acceptance_length={length} must be in [1, K+1], K the number of drafts: "
                "a verification step always emits one token."
            )

    def rates(self, num_drafts: int) -> tuple[float, ...]:
        """Unconditional acceptance rates for K = num_drafts. Raises `ConfigError` when they do not fit."""
        rates, length = self.synthetic_acceptance_rates, self.synthetic_acceptance_length
        if rates is None:
            assert length is not None
            return rates_of_length(length, num_drafts)
        if len(rates) != num_drafts:
            raise ConfigError(
                f"sampler.synthetic_acceptance_rates={list(rates)} has {len(rates)} entries, but the proposer drafts "
                f"{num_drafts} tokens (proposer.num_speculative_tokens): give one rate per draft."
            )
        return rates


def _check_rates(rates: Sequence[float]) -> None:
    shown = f"sampler.synthetic_acceptance_rates={list(rates)}"
    if not rates:
        raise ConfigError(f"{shown} is empty: give one rate per draft.")
    if not all(0 <= rate <= 1 for rate in rates):
        raise ConfigError(f"{shown} must hold probabilities: every entry in [0, 1].")
    if any(later > earlier for earlier, later in pairwise(rates)):
        raise ConfigError(f"{shown} must not increase: entry i is the chance that the first i+1 drafts are accepted.")


def rates_of_length(length: float, num_drafts: int) -> tuple[float, ...]:
    """The rates of smallest variance whose mean emitted length is `length`: ones, one fraction, zeros.

    Raises `ConfigError` outside [1, num_drafts + 1].
    """
    if not 1 <= length <= num_drafts + 1:
        raise ConfigError(
            f"sampler.synthetic_acceptance_length={length} must be in [1, {num_drafts + 1}]: a verification step of "
            f"{num_drafts} drafts emits between 1 and {num_drafts + 1} tokens."
        )
    whole = int(length - 1)
    rates = [1.0] * whole + [length - 1 - whole] + [0.0] * num_drafts
    return tuple(rates[:num_drafts])


def conditional_rates(rates: Sequence[float]) -> tuple[float, ...]:
    """Chance of draft i given that all before it were accepted; 0 after a rate of 0."""
    before = (1.0, *rates)
    return tuple(rate / earlier if earlier > 0 else 0.0 for earlier, rate in zip(before, rates, strict=False))


class SyntheticSampler(SequentialSampler):
    """Lossy by design: acceptance has nothing to do with the drafts."""

    name = "synthetic"
    lossless = False
    greedy_by_argmax = False
    reads_logits = False

    def __init__(self, options: SyntheticOptions) -> None:
        super().__init__(options)
        self.options = options
        self._rates: tuple[float, ...] = ()
        self._chances = torch.zeros(0)

    def check_num_drafts(self, num_drafts: int) -> None:
        """See `Sampler.check_num_drafts`."""
        if num_drafts:  # plain decoding verifies nothing
            self.options.rates(num_drafts)

    def configure(self, limits: EngineLimits) -> None:
        """Resolve the rates for the engine's number of drafts. Raises `ConfigError` when they do not fit."""
        if limits.num_speculative_tokens:
            self._rates = self.options.rates(limits.num_speculative_tokens)
            self._chances = torch.tensor(conditional_rates(self._rates), dtype=torch.float32, device=limits.device)

    def verify(self, logits: torch.Tensor, inputs: VerifyInputs) -> Verdict:
        """See `Sampler.verify`."""
        if inputs.all_greedy and inputs.draft_ids.shape[1] and logits.is_cuda and triton_available():
            from specflow.kernels.synthetic_triton import accept_by_chance

            return accept_by_chance(lowest_argmax(logits, skip_nan=True), self._chances, inputs)
        return super().verify(logits, inputs)

    def judge(self, logits: torch.Tensor, rows: torch.Tensor, inputs: VerifyInputs) -> Judgement:
        """Coins against the configured chances; the drafts only have to be there."""
        return Judgement((coins(inputs) < self._chances) & (inputs.draft_ids >= 0))

    def describe(self) -> dict[str, str]:
        """Method, precision and what was configured; what was realised is in the acceptance metrics."""
        facts = {**super().describe(), "method": "synthetic acceptance, output meaningless", "lossless": "no"}
        if self._rates:
            facts["configured rates"] = ", ".join(f"{rate:g}" for rate in self._rates)
            facts["configured acceptance length"] = f"{1 + sum(self._rates):g}"
        return facts
