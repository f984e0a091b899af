"""What a decode step costs, by its requests, its tokens and the drafts it asks for.

The shape over tokens comes from passes of the target that were measured at the start, or from the user. While steps
run, their own times correct it, for each number of requests apart: the ratio of a step's pass to the measured one, by
further tokens per request; what a step takes besides (sampling, the host); and drafting, by drafts. Given costs are
taken as they are, so that everything that is decided by them repeats.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

__all__ = ["StepCosts", "cost_steps"]

_TRUSTED = 3  # times of a kind before they are believed: the first may compile or load something
_RECENT = 9  # times that are remembered of each kind

Points = list[tuple[float, float]]


def cost_steps(points: Sequence[tuple[int, float]], most_tokens: int) -> np.ndarray:
    """Cost of passes over 0 … most_tokens tokens, [most_tokens + 1] float64, from measured (tokens, cost) points.

    A line from point to point, never falling: a wider pass does the work of a narrower one. The last slope goes on.
    """
    known = sorted(dict(points).items())
    tokens = np.array([one for one, _ in known], dtype=np.float64)
    costs = np.maximum.accumulate([cost for _, cost in known])
    wanted = np.arange(most_tokens + 1, dtype=np.float64)
    table = np.interp(wanted, tokens, costs)
    if len(known) > 1:
        slope = (costs[-1] - costs[-2]) / (tokens[-1] - tokens[-2])
        table += np.maximum(wanted - tokens[-1], 0.0) * slope
    return table


class _Recent:
    """The newest values by a number, and of each the lower quartile: whatever disturbs a step adds to its time."""

    def __init__(self) -> None:
        self._values: dict[int, deque[float]] = {}
        self.points: Points = []  # (number, lower quartile), ascending; only what was seen often enough

    def add(self, number: int, value: float) -> None:
        values = self._values.setdefault(number, deque(maxlen=_RECENT))
        values.append(value)
        if len(values) >= _TRUSTED:
            known = dict(self.points) | {number: sorted(values)[len(values) // 4]}
            self.points = sorted(known.items())


class StepCosts:
    """Seconds of steps, without drafting and of drafting."""

    def __init__(
        self,
        points: Sequence[tuple[int, float]],
        drafting: Sequence[tuple[int, float]] | None,
        most_tokens: int,
        learns: bool,
    ) -> None:
        """points: (tokens, seconds) of passes. drafting: (drafts per request, seconds), None = learnt or else nothing.
        learns: let the times of steps correct both."""
        self.points, self.given_drafting, self.learns = list(points), drafting, learns
        self.table = cost_steps(points or [(1, 1e-3)], most_tokens)
        self._costs: list[float] = self.table.tolist()
        self._ratios: dict[int, _Recent] = {}  # by requests: of passes, by further tokens per request
        self._besides: dict[int, _Recent] = {}
        self._drafting: dict[int, _Recent] = {}

    # -- learning --------------------------------------------------------------------------------------------------
    def add_pass(self, requests: int, tokens: int, seconds: float) -> None:
        """Learn from a pass of the target over decoding requests."""
        if self.learns and tokens < len(self._costs):
            further = round(tokens / requests - 1)
            self._ratios.setdefault(requests, _Recent()).add(further, seconds / self._costs[tokens])

    def add_besides(self, requests: int, seconds: float) -> None:
        """Learn what a step takes besides the pass and drafting."""
        if self.learns:
            self._besides.setdefault(requests, _Recent()).add(0, seconds)

    def believe(self, requests: int, tokens: int, seconds: float) -> None:
        """Start with a pass that was measured with care."""
        for _ in range(_TRUSTED):
            self.add_pass(requests, tokens, seconds)

    def knows_plain(self, requests: int) -> bool:
        """Whether steps without drafts of so many requests were timed."""
        found = self._ratios.get(requests)
        return not self.learns or (found is not None and bool(found.points) and found.points[0][0] == 0)

    def add_drafting(self, requests: int, drafts: int, seconds: float) -> None:
        """Learn the time of drafting when no request asked for more than `drafts`."""
        if self.learns:
            self._drafting.setdefault(requests, _Recent()).add(drafts, seconds)

    # -- asking ----------------------------------------------------------------------------------------------------
    def pass_seconds(self, requests: int, tokens: np.ndarray) -> np.ndarray:
        """Seconds of steps over so many tokens (any shape, fractions allowed) without drafting."""
        whole = np.minimum(tokens.astype(np.int64), len(self._costs) - 2)
        base = self.table[whole] + (tokens - whole) * (self.table[whole + 1] - self.table[whole])
        ratios = _nearest(self._ratios, requests) or [(0.0, 1.0)]
        numbers, values = zip(*ratios, strict=True)
        return base * np.interp(tokens / requests - 1, numbers, values) + self._beside(requests)

    def pass_at(self, requests: int, tokens: int) -> float:
        """The same for one whole number of tokens, in plain numbers, which is quicker."""
        whole = min(tokens, len(self._costs) - 2)
        base = self._costs[whole] + (tokens - whole) * (self._costs[whole + 1] - self._costs[whole])
        ratios = _nearest(self._ratios, requests) or [(0.0, 1.0)]
        return base * _between(ratios, tokens / requests - 1) + self._beside(requests)

    def _beside(self, requests: int) -> float:
        found = _nearest(self._besides, requests)
        return found[0][1] if found else 0.0

    def draft_seconds(self, requests: int, most: int) -> list[float]:
        """Seconds of drafting when no request asks for more than 0 … most drafts.

        What was never tried lies on the line between what was; below that, on the line to nothing: cheap enough to be
        tried once.
        """
        given = self.given_drafting
        known = _nearest(self._drafting, requests) if given is None else given
        points = sorted(({0: 0.0} | dict(known)).items())
        if len(points) > 1:  # so that the last slope goes on
            (first, low), (last, high) = points[-2:]
            points.append((most + last, high + max(0.0, high - low) / (last - first) * most))
        return [_between(points, drafts) for drafts in range(most + 1)]

    def describe(self) -> dict[str, str]:
        """The costs in milliseconds, in the form of the options that fix them."""
        facts = {"verify_costs": _milliseconds(self.points)}
        if self.given_drafting is not None:
            facts["draft_costs"] = _milliseconds(self.given_drafting)
        for requests, recent in sorted(self._drafting.items()):
            if recent.points:
                facts[f"draft_costs at {requests} requests"] = _milliseconds(recent.points)
        return facts


def _nearest(found: Mapping[int, _Recent], requests: int) -> Points:
    """What is known of so many requests, or of the number nearest to it; empty when nothing is."""
    own = found.get(requests)
    if own is not None and own.points:
        return own.points
    known = [seen for seen, recent in found.items() if recent.points]
    if not known:
        return []
    return found[min(known, key=lambda seen: abs(math.log(seen / max(requests, 1))))].points


def _between(points: Sequence[tuple[float, float]], number: float) -> float:
    """The value at a number on the line from point to point, level outside of them."""
    before = points[0]
    if number <= before[0]:
        return before[1]
    for point in points[1:]:
        if number <= point[0]:
            return before[1] + (point[1] - before[1]) * (number - before[0]) / (point[0] - before[0])
        before = point
    return before[1]


def _milliseconds(points: Iterable[tuple[float, float]]) -> str:
    return str([[number, round(1000 * seconds, 3)] for number, seconds in points])
