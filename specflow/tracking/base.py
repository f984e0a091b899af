"""Contract of a tracker: a listener of the life-cycle hooks.

A tracker is built from its options and registered with the plugin manager for the length of the run, so it implements
whichever of the `specflow_run_started … specflow_run_finished` hooks it needs, marked with `hookimpl`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from specflow.tracking.events import (
    RequestRow,
    RunFinished,
    RunStarted,
    Series,
    StepRecord,
    SweepFinished,
    SweepStarted,
)


@dataclass(frozen=True)
class TrackedRun:
    """A run of a sweep as the tracker's store has it."""

    run_id: str
    output_dir: str
    status: str  # running, finished, failed, killed


class SweepTracker(ABC):
    """The run above the runs of a sweep."""

    run_id: str  # given to the jobs as tracking.parent_run_id

    @abstractmethod
    def runs(self) -> list[TrackedRun]:
        """The runs below it, in the order they were started."""

    @abstractmethod
    def end_lost(self, run_id: str, reason: str) -> None:
        """End a run below it whose process is gone."""

    @abstractmethod
    def finish(self, event: SweepFinished) -> None:
        """Write the results of the sweep and end it. Raises `StorageError`."""


class Tracker:
    """Base without any hook: subclasses add the ones they listen to."""

    name: str = "tracker"

    def describe(self) -> dict[str, str]:
        """Where results go; shown in the report."""
        return {}

    def nesting_id(self) -> str | None:
        """Id under which runs within this run are shown, for their `tracking.parent_run_id`; None: there is none."""
        return None

    def open_sweep(self, event: SweepStarted) -> SweepTracker | None:
        """Begin a sweep, or go on with it; None for a tracker that shows its runs side by side only."""
        return None


__all__ = [
    "RequestRow",
    "RunFinished",
    "RunStarted",
    "Series",
    "StepRecord",
    "SweepFinished",
    "SweepStarted",
    "SweepTracker",
    "TrackedRun",
    "Tracker",
]
