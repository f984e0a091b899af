"""Sampling options of one request; names, defaults and order of application are vLLM's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from specflow.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen and when the request stops.

    Every option works with speculation exactly as without it: the processors run on each row of a verified block
    as if the drafts before that row had been committed.

    Raises `ConfigError` on construction when a value is out of range.
    """

    max_tokens: int = 128  # most output tokens; 0 returns an empty output
    min_tokens: int = 0  # EOS and stop ids are masked until this many tokens are out
    temperature: float = 0.0  # 0 = greedy
    top_k: int = 0  # 0 or -1 = all
    top_p: float = 1.0
    min_p: float = 0.0  # least probability relative to the most likely token
    repetition_penalty: float = 1.0  # counts prompt and output
    presence_penalty: float = 0.0  # counts output only
    frequency_penalty: float = 0.0  # counts output only
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # token id -> added logit; -inf bans
    bad_words: Sequence[str] = ()  # strings that must not be completed
    stop: Sequence[str] = ()  # stop strings, across token borders
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    seed: int | None = None  # None = a fresh one per request
    logprobs: int | None = None  # number of most likely tokens to report beside the chosen one

    def __post_init__(self) -> None:
        _check(self.max_tokens >= 0, "max_tokens", self.max_tokens, "0 or more")
        _check(self.min_tokens >= 0, "min_tokens", self.min_tokens, "0 or more")
        _check(
            self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, f"at most max_tokens={self.max_tokens}"
        )
        _check(self.temperature >= 0, "temperature", self.temperature, "0 (greedy) or more")
        _check(self.top_k >= -1, "top_k", self.top_k, "1 or more, or 0 or -1 for all tokens")
        _check(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        _check(0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]")
        _check(0 < self.repetition_penalty <= 2, "repetition_penalty", self.repetition_penalty, "in (0, 2]; 1 = off")
        _check(-2 <= self.presence_penalty <= 2, "presence_penalty", self.presence_penalty, "in [-2, 2]; 0 = off")
        _check(-2 <= self.frequency_penalty <= 2, "frequency_penalty", self.frequency_penalty, "in [-2, 2]; 0 = off")
        _check(self.logprobs is None or self.logprobs >= 0, "logprobs", self.logprobs, "0 or more")
        for name in ("stop", "bad_words"):
            _check(not isinstance(getattr(self, name), str), name, getattr(self, name), "a list of strings")
            _check(all(getattr(self, name)), name, getattr(self, name), "a list of non-empty strings")
        _check(
            all(token_id >= 0 for token_id in self.stop_token_ids), "stop_token_ids", self.stop_token_ids, "ids >= 0"
        )

    @property
    def greedy(self) -> bool:
        """True when the highest processed logit is taken; exactly temperature 0, without an epsilon."""
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        """True when any penalty changes the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def has_filters(self) -> bool:
        """True when top-k, top-p or min-p cuts the sampled distribution."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


def seeded(sampling: SamplingParams, seed: int, index: int) -> SamplingParams:
    """The same options with a seed of its own for request `index`, derived from the run's unless given."""
    base = sampling.seed if sampling.seed is not None else seed
    own = int(np.random.SeedSequence([base & (2**64 - 1), index]).generate_state(1, np.uint64)[0] >> np.uint64(2))
    return replace(sampling, seed=own)


def _check(holds: bool, option: str, value: object, allowed: str) -> None:
    if not holds:
        raise ConfigError(f"sampling option {option}={value!r} is out of range: it must be {allowed}.")
