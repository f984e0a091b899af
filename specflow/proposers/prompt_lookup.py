"""What the prompt lookup methods share: options, their checks, and the bounds in force."""

from dataclasses import dataclass
from typing import Literal, get_args

from specflow.errors import ConfigError

MatchPolicy = Literal["earliest", "latest"]
DEFAULT_LOOKUP = 5


@dataclass(frozen=True, kw_only=True)
class PromptLookupOptions:
    """Options of prompt lookup. Raises `ConfigError` when a bound is below 1 or they exclude each other.

    Bounds that are left out follow vLLM: with neither set both are 5, with one set the other equals it.
    `lookup_min` and `lookup_max` are the bounds in force.
    """

    num_speculative_tokens: int = 5  # K, most tokens drafted per round
    prompt_lookup_max: int | None = None  # longest n-gram looked for
    prompt_lookup_min: int | None = None  # shortest n-gram that counts as a match
    match_policy: MatchPolicy = "earliest"  # which of several matches of the same length wins

    def __post_init__(self) -> None:
        _require_positive("num_speculative_tokens", self.num_speculative_tokens)
        for key in ("prompt_lookup_min", "prompt_lookup_max"):
            if getattr(self, key) is not None:
                _require_positive(key, getattr(self, key))
        if self.lookup_min > self.lookup_max:
            raise ConfigError(
                f"proposer.prompt_lookup_min={self.prompt_lookup_min} is above "
                f"proposer.prompt_lookup_max={self.prompt_lookup_max}, so nothing could ever match. "
                "Lower the first or raise the second; with only one of them set, the other equals it."
            )
        if self.match_policy not in get_args(MatchPolicy):
            raise ConfigError(f"proposer.match_policy={self.match_policy!r} must be one of {get_args(MatchPolicy)}.")

    @property
    def lookup_max(self) -> int:
        """Longest n-gram looked for."""
        return self.prompt_lookup_max or self.prompt_lookup_min or DEFAULT_LOOKUP

    @property
    def lookup_min(self) -> int:
        """Shortest n-gram that counts as a match."""
        return self.prompt_lookup_min or self.prompt_lookup_max or DEFAULT_LOOKUP

    def in_force(self) -> dict[str, str]:
        """Bounds in force and the choice among equal matches, for the report."""
        return {
            "num_speculative_tokens": str(self.num_speculative_tokens),
            "prompt_lookup_max": str(self.lookup_max),
            "prompt_lookup_min": str(self.lookup_min),
            "match_policy": self.match_policy,
        }


def _require_positive(key: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"proposer.{key}={value} must be 1 or more.")
