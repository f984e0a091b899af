"""One MLflow run through an explicit client. This is the only module that imports MLflow, and it does so late."""

import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specflow.tracking.events import Point
from specflow.tracking.flatten import chunks, cut, finite, flatten, safe_name
from specflow.tracking.patience import Patient
from specflow.tracking.store_uri import artifact_location

__all__ = ["MlflowRun", "connect", "search_runs"]

_METRICS_PER_CALL = 1000
_NAMES_PER_CALL = 100  # parameters or tags
_TAG_LENGTH = 5000


def connect(uri: str) -> Any:
    """A client of the store. Imports MLflow and, the first time, makes the store's tables: seconds of work."""
    _quiet()
    from mlflow.tracking import MlflowClient

    _make_folder(uri)
    return Patient(MlflowClient(tracking_uri=uri, registry_uri=uri))


class MlflowRun:
    """A run in a store: a new one, or with `run_id` one that goes on."""

    def __init__(
        self,
        uri: str,
        launch_dir: Path,
        experiment: str,
        name: str,
        tags: Mapping[str, str],
        run_id: str | None = None,
    ) -> None:
        self._client = connect(uri)
        from mlflow.entities import Metric, Param, RunTag

        self._metric, self._param, self._tag = Metric, Param, RunTag
        if run_id is None:
            experiment_id = _experiment(self._client, experiment, artifact_location(uri, launch_dir))
            run_id = self._client.create_run(experiment_id, run_name=name, tags=_tags(tags)).info.run_id
        else:
            self._client.update_run(run_id, status="RUNNING")
        self.run_id: str = str(run_id)

    def log_params(self, config: Mapping[str, Any]) -> None:
        """Every leaf of the configuration as a parameter."""
        params = [self._param(name, value) for name, value in flatten(config).items()]
        for part in chunks(params, _NAMES_PER_CALL):
            self._client.log_batch(self.run_id, params=part)

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Tags, cut to what stores accept."""
        entries = [self._tag(name, value) for name, value in _tags(tags).items()]
        for part in chunks(entries, _NAMES_PER_CALL):
            self._client.log_batch(self.run_id, tags=part)

    def log_points(self, points: Iterable[Point]) -> None:
        """Points of curves."""
        now = _milliseconds()
        self._log([self._metric(safe_name(point.name), point.value, now, point.step) for point in points])

    def log_metrics(self, metrics: Mapping[str, float]) -> None:
        """Single values; those that are not finite are left out."""
        now = _milliseconds()
        self._log([self._metric(name, value, now, 0) for name, value in finite(metrics).items()])

    def log_files(self, folder: Path) -> None:
        """Every file of the folder as an artifact."""
        self._client.log_artifacts(self.run_id, str(folder))

    def log_file(self, file: Path) -> None:
        """One file as an artifact."""
        self._client.log_artifact(self.run_id, str(file))

    def children(self) -> list[Any]:
        """MLflow's runs that have this one as their parent, the first one first."""
        own = self._client.get_run(self.run_id)
        return search_runs(self._client, own.info.experiment_id, f"tags.`mlflow.parentRunId` = '{self.run_id}'")

    def end_other(self, run_id: str, status: str, tags: Mapping[str, str]) -> None:
        """End another run of the store, with tags that say why."""
        for name, value in _tags(tags).items():
            self._client.set_tag(run_id, name, value)
        self._client.set_terminated(run_id, status)

    def end(self, status: str) -> None:
        """FINISHED, FAILED or KILLED."""
        self._client.set_terminated(self.run_id, status)

    def _log(self, metrics: Sequence[Any]) -> None:
        for part in chunks(metrics, _METRICS_PER_CALL):
            self._client.log_batch(self.run_id, metrics=part)


def search_runs(client: Any, experiment_id: str, wanted: str) -> list[Any]:
    """MLflow's runs of an experiment that fit the filter, the first one first, however many there are."""
    found: list[Any] = []
    token: str | None = None
    while True:
        page = client.search_runs([experiment_id], wanted, max_results=1000, page_token=token)
        found += page
        token = page.token
        if not token:
            return sorted(found, key=lambda run: (run.info.start_time, run.info.run_id))


def _experiment(client: Any, name: str, location: str | None) -> str:
    """Id of the experiment, made if need be; another process may make it at the same moment."""
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return str(client.create_experiment(name, artifact_location=location))
        except MlflowException:
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    if found.lifecycle_stage == "deleted":
        client.restore_experiment(found.experiment_id)
    return str(found.experiment_id)


def _make_folder(uri: str) -> None:
    if uri.startswith("sqlite:///"):
        Path(uri.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)


def _tags(tags: Mapping[str, str]) -> dict[str, str]:
    return {safe_name(name): cut(str(value), _TAG_LENGTH) for name, value in tags.items()}


def _milliseconds() -> int:
    return int(time.time() * 1000)


def _quiet() -> None:
    """Settings that MLflow reads when it is imported; what the user has set stays.

    It would tell of every table it makes, count uploaded files on the console, and report its use to its makers.
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
    for name in ("mlflow.store.db.utils", "mlflow.tracking.fluent", "alembic.runtime.migration"):
        logging.getLogger(name).setLevel(logging.WARNING)
