"""Curves of a series by engine step, thinned so that logging them costs next to nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from specflow.tracking.events import Point, Series, StepRecord

__all__ = ["Point", "StepCurves"]

_MOST_POINTS = 200  # per curve and repeat: more than a plot can show


@dataclass
class _Window:
    """Sums over consecutive steps."""

    last: int = 0
    count: int = 0
    emitted: int = 0
    drafted: int = 0
    accepted: int = 0
    rounds: int = 0
    seconds: float = 0.0

    def add(self, record: StepRecord, index: int) -> None:
        self.last = index
        self.count += 1
        self.emitted += record.num_emitted
        self.drafted += sum(record.drafted)
        self.accepted += sum(record.accepted)
        self.rounds += len(record.drafted)
        self.seconds += record.total_seconds

    def merged(self, later: "_Window") -> "_Window":
        names = ("count", "emitted", "drafted", "accepted", "rounds", "seconds")
        return _Window(later.last, *(getattr(self, name) + getattr(later, name) for name in names))

    def values(self) -> Mapping[str, float]:
        """What the curves show: throughput while stepping, acceptance of the drafts, seconds per step."""
        found = {"step_seconds": self.seconds / self.count}
        if self.seconds > 0:
            found["tokens_per_second"] = self.emitted / self.seconds
        if self.drafted:
            found["acceptance_rate"] = self.accepted / self.drafted
            found["mean_acceptance_length"] = 1 + self.accepted / self.rounds
        return found


@dataclass
class StepCurves:
    """Collects steps of the current series and gives points of `steps/METHOD/batch_N/NAME`.

    interval: engine steps per point; 0 collects nothing.
    """

    interval: int
    _prefix: str = ""
    _windows: list[_Window] = field(default_factory=list)
    _seen: dict[str, int] = field(default_factory=dict)  # steps so far, by prefix

    def start(self, series: Series) -> None:
        """The next steps belong to this series; warm-up steps are not collected."""
        self._prefix = "" if series.warmup else f"steps/{series.method}/batch_{series.batch_size}"

    def add(self, record: StepRecord) -> None:
        """Count one step; cheap, because it runs within the measurement."""
        if not self.interval or not self._prefix:
            return
        index = self._seen.get(self._prefix, 0)
        self._seen[self._prefix] = index + 1
        if not self._windows or self._windows[-1].count >= self.interval:
            self._windows.append(_Window())
        self._windows[-1].add(record, index)

    def take(self) -> list[Point]:
        """Points since the last call."""
        windows, self._windows = _thinned(self._windows), []
        return [
            Point(f"{self._prefix}/{name}", value, window.last)
            for window in windows
            for name, value in window.values().items()
        ]


def _thinned(windows: Sequence[_Window]) -> list[_Window]:
    """Neighbours merged until few enough are left."""
    result = list(windows)
    while len(result) > _MOST_POINTS:
        pairs = [result[index : index + 2] for index in range(0, len(result), 2)]
        result = [pair[0].merged(pair[1]) if len(pair) == 2 else pair[0] for pair in pairs]
    return result
