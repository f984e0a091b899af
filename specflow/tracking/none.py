"""No tracker: results stay in the run's folder, and nothing of MLflow is imported."""

from dataclasses import dataclass

from specflow.tracking.base import Tracker

__all__ = ["NoOptions", "NoTracker"]


@dataclass(kw_only=True)
class NoOptions:
    """`tracking=none` has no options."""


class NoTracker(Tracker):
    """Listens to nothing."""

    name = "none"

    def __init__(self, options: NoOptions | None = None) -> None:
        self.options = options or NoOptions()

    def describe(self) -> dict[str, str]:
        """Says that there is no tracker."""
        return {"tracker": "none: the run's folder only"}
