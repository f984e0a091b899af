"""Acceptance of drafts: the one definition used by tables, trackers and tests.

A *round* is one verification of one request that had at least one draft. A round with k drafts of which the first a
are accepted emits a + 1 tokens: the accepted ones and one recovered or bonus token, which is never counted as
accepted. Accepted drafts count as the sampler judged them, before stop rules cut the output.

Names without a prefix are micro averages (all rounds of all requests pooled); names that begin with `macro_` are means
over requests, in which a short answer weighs as much as a long one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Protocol

__all__ = ["AcceptanceCounts", "RequestCounts", "macro_acceptance_rate", "macro_mean_acceptance_length"]


class RequestCounts(Protocol):
    """Counts of one request; `tracking.events.RequestRow` has them."""

    @property
    def rounds(self) -> int:
        """Verification rounds."""

    @property
    def drafted(self) -> int:
        """Drafts verified."""

    @property
    def accepted(self) -> int:
        """Drafts accepted."""


@dataclass
class AcceptanceCounts:
    """Accumulator of verification rounds. All lists are indexed by draft position, 0 the first behind the anchor."""

    num_rounds: int = 0  # vLLM: num_drafts
    num_draft_tokens: int = 0  # sum of k
    num_accepted_tokens: int = 0  # sum of a
    drafted_at: list[int] = field(default_factory=list)  # rounds with k > i
    reached_at: list[int] = field(default_factory=list)  # rounds with k > i and a >= i: everything before was accepted
    accepted_at: list[int] = field(default_factory=list)  # rounds with a > i

    def add(self, drafted: int, accepted: int) -> None:
        """Count one round; one without drafts is no round and changes nothing."""
        if not 0 <= accepted <= drafted:
            raise ValueError(f"accepted={accepted} must be in 0 … drafted={drafted}")
        if drafted == 0:
            return
        self._widen(drafted)
        self.num_rounds += 1
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        for position in range(drafted):
            self.drafted_at[position] += 1
            self.reached_at[position] += accepted >= position
            self.accepted_at[position] += accepted > position

    def add_all(self, drafted: Iterable[int], accepted: Iterable[int]) -> None:
        """Count the rounds of one step, both in the same order."""
        for one_drafted, one_accepted in zip(drafted, accepted, strict=True):
            self.add(one_drafted, one_accepted)

    def merge(self, other: "AcceptanceCounts") -> None:
        """Add another accumulator's rounds to this one."""
        self._widen(other.num_positions)
        self.num_rounds += other.num_rounds
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_tokens += other.num_accepted_tokens
        for position in range(other.num_positions):
            self.drafted_at[position] += other.drafted_at[position]
            self.reached_at[position] += other.reached_at[position]
            self.accepted_at[position] += other.accepted_at[position]

    def _widen(self, positions: int) -> None:
        missing = positions - len(self.drafted_at)
        for counts in (self.drafted_at, self.reached_at, self.accepted_at):
            counts.extend([0] * missing)

    @property
    def num_positions(self) -> int:
        """Most drafts any round had."""
        return len(self.drafted_at)

    @property
    def acceptance_rate(self) -> float | None:
        """accepted / drafted, in 0 … 1; None when nothing was drafted."""
        return _ratio(self.num_accepted_tokens, self.num_draft_tokens)

    @property
    def mean_acceptance_length(self) -> float | None:
        """1 + accepted / rounds, in tokens per round with the bonus token; None without rounds."""
        accepted = self.mean_accepted_drafts
        return None if accepted is None else 1 + accepted

    @property
    def mean_accepted_drafts(self) -> float | None:
        """accepted / rounds, in tokens per round without the bonus token; None without rounds."""
        return _ratio(self.num_accepted_tokens, self.num_rounds)

    @property
    def mean_draft_length(self) -> float | None:
        """drafted / rounds, in tokens; None without rounds."""
        return _ratio(self.num_draft_tokens, self.num_rounds)

    @property
    def per_position_unconditional(self) -> list[float]:
        """rounds that accepted position i / all rounds (vLLM's per-position rate)."""
        return _ratios(self.accepted_at, [self.num_rounds] * self.num_positions)

    @property
    def per_position_per_drafted(self) -> list[float | None]:
        """rounds that accepted position i / rounds that drafted position i; not biased by short drafts.

        None where the latter were not counted, as by another engine.
        """
        return [_ratio(*pair) for pair in zip(self.accepted_at, self.drafted_at, strict=True)]

    @property
    def per_position_conditional(self) -> list[float | None]:
        """rounds that accepted position i / rounds that reached it; None where no round did."""
        pairs = zip(self.accepted_at, self.reached_at, strict=True)
        return [_ratio(accepted, reached) for accepted, reached in pairs]

    @property
    def accepted_length_histogram(self) -> list[int]:
        """Rounds by number of accepted drafts, 0 first; empty without rounds."""
        if not self.num_rounds:
            return []
        at_least = [self.num_rounds, *self.accepted_at, 0]
        return [more - fewer for more, fewer in pairwise(at_least)]

    @property
    def system_efficiency(self) -> float | None:
        """(accepted + rounds) / (drafted + rounds): emitted tokens per verified one, in 0 … 1; None without rounds."""
        return _ratio(self.num_accepted_tokens + self.num_rounds, self.num_draft_tokens + self.num_rounds)

    def system_efficiency_at(self, num_speculative_tokens: int) -> float | None:
        """(accepted + rounds) / (rounds · (K + 1)): the same as if every round had had K drafts."""
        return _ratio(self.num_accepted_tokens + self.num_rounds, self.num_rounds * (num_speculative_tokens + 1))


def macro_acceptance_rate(requests: Sequence[RequestCounts]) -> float | None:
    """Mean over requests of accepted / drafted; requests without drafts are left out; None when none has any."""
    rates = [request.accepted / request.drafted for request in requests if request.drafted]
    return fmean(rates) if rates else None


def macro_mean_acceptance_length(requests: Sequence[RequestCounts]) -> float | None:
    """Mean over requests of 1 + accepted / rounds; requests without rounds are left out; None when none has any."""
    lengths = [1 + request.accepted / request.rounds for request in requests if request.rounds]
    return fmean(lengths) if lengths else None


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _ratios(parts: Sequence[int], wholes: Sequence[int]) -> list[float]:
    return [part / whole for part, whole in zip(parts, wholes, strict=True)]
