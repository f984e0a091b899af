"""Results in MLflow: a listener of the life-cycle hooks.

The first use of a SQLite store takes seconds, so the run is opened in a thread while weights are loaded, and awaited
before the first series: nothing of it runs during a measurement. Points of curves are kept in memory and written
between series; during a long one at most every half minute.
"""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specflow.errors import ConfigError, SpecflowError, StorageError
from specflow.plugins.hookspecs import hookimpl
from specflow.tracking.base import Tracker
from specflow.tracking.curves import StepCurves
from specflow.tracking.events import Point, RunFinished, RunStarted, Series, StepRecord, SweepStarted
from specflow.tracking.mlflow_run import MlflowRun
from specflow.tracking.mlflow_sweep import STATUSES, MlflowSweep, cannot_open, first_line
from specflow.tracking.store_uri import refuse_file_store, resolve_uri, without_password

__all__ = ["MlflowOptions", "MlflowTracker"]

_FLUSH_SECONDS = 30.0  # a write of points takes tens of milliseconds: a thousandth of this


@dataclass(kw_only=True)
class MlflowOptions:
    """Options of `tracking=mlflow`."""

    uri: str | None = None  # tracking server or database; None = MLFLOW_TRACKING_URI, or SQLite in runs/
    experiment: str = "specflow"
    run_name: str | None = None  # None = made of proposer and target
    log_steps: int = 10  # engine steps per point of the curves by step; 0 = no curves
    parent_run_id: str | None = None  # run under which this one is shown

    def __post_init__(self) -> None:
        refuse_file_store(self.uri)
        if self.log_steps < 0:
            raise ConfigError(f"tracking.log_steps={self.log_steps}: must be 1 or more steps per point, or 0 for none.")
        if not self.experiment.strip():
            raise ConfigError("tracking.experiment is empty: give a name, such as tracking.experiment=specflow")


class MlflowTracker(Tracker):
    """Parameters, tags, metrics and files of one run."""

    name = "mlflow"

    def __init__(self, options: MlflowOptions | None = None) -> None:
        self.options = options or MlflowOptions()
        self._uri: str | None = None
        self._output_dir: Path | None = None
        self._opening: Future[MlflowRun] | None = None
        self._open_failed = False
        self._curves = StepCurves(self.options.log_steps)
        self._pending: list[Point] = []  # not yet in the store
        self._flushed = 0.0

    @property
    def run_id(self) -> str | None:
        """Id of the MLflow run; None before it was opened."""
        opening = self._opening
        return opening.result().run_id if opening and opening.done() and not opening.exception() else None

    def describe(self) -> dict[str, str]:
        """Store, experiment and run."""
        facts = {"tracker": "mlflow", "store": self._shown_uri}
        facts["experiment"] = self.options.experiment
        return facts | ({"run": self.run_id} if self.run_id else {})

    @property
    def _shown_uri(self) -> str:
        return without_password(self._uri or self.options.uri or "SQLite in runs/")

    def nesting_id(self) -> str | None:
        """See `Tracker.nesting_id`: waits until the run is open. Raises `StorageError` when it cannot be opened."""
        return self._run().run_id

    def open_sweep(self, event: SweepStarted) -> MlflowSweep:
        """See `Tracker.open_sweep`: a run, below which those of the jobs are shown. Raises `StorageError`."""
        refuse_file_store(self.options.uri)
        uri = resolve_uri(self.options.uri, Path(event.facts.get("launch_dir", Path.cwd())))
        return MlflowSweep(event, uri, self.options.experiment, self.options.run_name)

    # -- hooks -----------------------------------------------------------------------------------------------------
    @hookimpl
    def specflow_run_started(self, event: RunStarted) -> None:
        """Begin to open the run, in a thread."""
        refuse_file_store(self.options.uri)
        launch_dir = Path(event.facts.get("launch_dir", Path.cwd()))
        self._uri = resolve_uri(self.options.uri, launch_dir)
        self._output_dir = event.output_dir
        executor = ThreadPoolExecutor(1, thread_name_prefix="mlflow")
        self._opening = executor.submit(self._open, event, self._uri, launch_dir)
        executor.shutdown(wait=False)  # no more work for it; the thread ends by itself

    @hookimpl
    def specflow_series_started(self, series: Series) -> None:
        """Wait for the open run, and write what the series before has left."""
        self._run()
        self._flush()
        self._curves.start(series)

    @hookimpl
    def specflow_step_finished(self, record: StepRecord) -> None:
        """Collect a step."""
        self._curves.add(record)
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self._flush()

    @hookimpl
    def specflow_points_measured(self, points: Sequence[Point]) -> None:
        """Collect points that a task measured itself."""
        self._pending += points
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self._flush()

    @hookimpl(trylast=True)
    def specflow_run_finished(self, event: RunFinished) -> None:
        """Write results, upload the folder and close. Last of all listeners, so that their files are there."""
        if self._opening is None or self._open_failed:
            return
        run = self._run()
        try:
            run.log_points(self._taken())
            run.log_metrics(_metrics_of(event))
            run.set_tags(_ending(event))
            if self._output_dir is not None:
                run.log_files(self._output_dir)
            run.end(STATUSES.get(event.status, "FAILED"))
        except Exception as error:
            self._try_to_end(run, "FAILED")
            raise self._storage_error(error) from error

    # -- steps of them ---------------------------------------------------------------------------------------------
    def _open(self, event: RunStarted, uri: str, launch_dir: Path) -> MlflowRun:
        tags = {**event.facts, "task": event.task, "output_dir": str(event.output_dir)}
        if "commit" in event.facts:
            tags["mlflow.source.git.commit"] = event.facts["commit"]
        if self.options.parent_run_id:
            tags["mlflow.parentRunId"] = self.options.parent_run_id
        name = self.options.run_name or event.name
        run = MlflowRun(uri, launch_dir, self.options.experiment, name, tags)
        run.log_params(event.config)
        return run

    def _run(self) -> MlflowRun:
        """The open run. Raises `StorageError` if it could not be opened, before anything was measured."""
        assert self._opening is not None
        try:
            return self._opening.result()
        except SpecflowError:
            self._open_failed = True
            raise
        except Exception as error:
            self._open_failed = True
            raise cannot_open(self._shown_uri, error) from error

    def _taken(self) -> list[Point]:
        self._pending += self._curves.take()
        return self._pending

    def _flush(self) -> None:
        """Write pending points. A store that is locked or full now may not be at the end, so points are only kept then:
        the last attempt, when the run ends, reports the failure.
        """
        self._flushed = time.monotonic()
        points = self._taken()
        try:
            self._run().log_points(points)
        except StorageError:
            raise
        except Exception:
            return
        self._pending = []

    def _storage_error(self, error: Exception) -> StorageError:
        return StorageError(
            f"results could not be saved in the MLflow store {self._shown_uri}: {first_line(error)}\n"
            f"All files of the run are in {self._output_dir}"
        )

    @staticmethod
    def _try_to_end(run: MlflowRun, status: str) -> None:
        try:
            run.end(status)
        except Exception:
            return  # the store does not answer: the error that came first says so


def _metrics_of(event: RunFinished) -> dict[str, Any]:
    to_metrics = getattr(event.summary, "to_metrics", None)
    return {**(to_metrics() if to_metrics else {}), **event.metrics}


def _ending(event: RunFinished) -> Mapping[str, str]:
    tags = {"status": event.status}
    if event.reason:
        tags["reason"] = event.reason
    lossless = getattr(event.summary, "lossless", None)
    if lossless is not None:
        tags["lossless"] = lossless.status
        tags["mlflow.note.content"] = lossless.sentence()
    if getattr(event.summary, "lossy", False):
        tags["lossy"] = "true"
    return tags | _what_ran(getattr(event.summary, "really_ran", {}))


def _what_ran(sections: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """The report's part "what really ran" as tags `SECTION.FACT`, and `backend` and `device` under their own names."""
    tags = {f"{section}.{fact}": text for section, facts in sections.items() for fact, text in facts.items()}
    ran = sections.get("backend", {})
    return tags | {name: ran[name] for name in ("backend", "device") if name in ran}
