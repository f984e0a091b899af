"""Contract of a tracker: a listener of the life-cycle hooks.

A tracker is built from its options and registered with the plugin manager for the length of the run, so it implements
whichever of the `specflow_run_started … specflow_run_finished` hooks it needs, marked with `hookimpl`.
"""

from specflow.tracking.events import RequestRow, RunFinished, RunStarted, Series, StepRecord


class Tracker:
    """Base without any hook: subclasses add the ones they listen to."""

    name: str = "tracker"

    def describe(self) -> dict[str, str]:
        """Where results go; shown in the report."""
        return {}


__all__ = ["RequestRow", "RunFinished", "RunStarted", "Series", "StepRecord", "Tracker"]
