"""The MLflow run above the runs of a sweep."""

from pathlib import Path

from specflow.errors import StorageError
from specflow.tracking.base import SweepTracker, TrackedRun
from specflow.tracking.events import SweepFinished, SweepStarted
from specflow.tracking.mlflow_run import MlflowRun
from specflow.tracking.store_uri import without_password

__all__ = ["STATUSES", "MlflowSweep", "cannot_open", "first_line"]

STATUSES = {"finished": "FINISHED", "failed": "FAILED", "killed": "KILLED"}


class MlflowSweep(SweepTracker):
    """Opened before the first job, so that the store's tables exist when jobs start side by side.

    Raises `StorageError` when the store cannot be opened.
    """

    def __init__(self, event: SweepStarted, uri: str, experiment: str, run_name: str | None) -> None:
        self._uri, self._folder = uri, event.folder
        tags = {**event.facts, "task": "sweep", "output_dir": str(event.folder), "overrides": " ".join(event.words)}
        if "commit" in event.facts:
            tags["mlflow.source.git.commit"] = event.facts["commit"]
        launch_dir = Path(event.facts.get("launch_dir", Path.cwd()))
        try:
            self._run = MlflowRun(uri, launch_dir, experiment, run_name or event.name, tags, event.run_id)
            if event.run_id is None:
                self._run.log_params({"sweep": {"command": " ".join(event.words)}})
        except Exception as error:
            raise cannot_open(without_password(uri), error) from error
        self.run_id = self._run.run_id

    def runs(self) -> list[TrackedRun]:
        """See `SweepTracker.runs`."""
        names = {stored: status for status, stored in STATUSES.items()}
        return [
            TrackedRun(run.info.run_id, run.data.tags.get("output_dir", ""), names.get(str(run.info.status), "running"))
            for run in self._run.children()
        ]

    def end_lost(self, run_id: str, reason: str) -> None:
        """See `SweepTracker.end_lost`."""
        self._run.end_other(run_id, "KILLED", {"status": "killed", "reason": reason})

    def finish(self, event: SweepFinished) -> None:
        """See `SweepTracker.finish`."""
        tags = {"status": event.status, **event.tags} | ({"reason": event.reason} if event.reason else {})
        try:
            self._run.log_metrics(event.metrics)
            self._run.set_tags(tags)
            for file in event.files:
                self._run.log_file(file)
            self._run.end(STATUSES.get(event.status, "FAILED"))
        except Exception as error:
            raise StorageError(
                f"the results of the sweep could not be saved in the MLflow store {without_password(self._uri)}: "
                f"{first_line(error)}\nAll files of it are in {self._folder}"
            ) from error


def cannot_open(shown_uri: str, error: Exception) -> StorageError:
    """The error about a store that does not open."""
    return StorageError(
        f"the MLflow store {shown_uri} cannot be opened: {first_line(error)}\n"
        "Check tracking.uri, or run without a tracker: tracking=none"
    )


def first_line(error: Exception) -> str:
    """The beginning of an error's text, or its class."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
