"""One MLflow run through an explicit client. This is the only module that imports MLflow, and it does so late."""

import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specflow.tracking.events import Point
from specflow.tracking.flatten import chunks, cut, finite, flatten, safe_name
from specflow.tracking.store_uri import artifact_location

__all__ = ["MlflowRun"]

_METRICS_PER_CALL = 1000
_NAMES_PER_CALL = 100  # parameters or tags
_TAG_LENGTH = 5000


class MlflowRun:
    """A run in a store. Creating it imports MLflow and, the first time, makes the store's tables: seconds of work."""

    def __init__(self, uri: str, launch_dir: Path, experiment: str, name: str, tags: Mapping[str, str]) -> None:
        _quiet()
        from mlflow.entities import Metric, Param, RunTag
        from mlflow.tracking import MlflowClient

        self._metric, self._param, self._tag = Metric, Param, RunTag
        _make_folder(uri)
        self._client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        experiment_id = _experiment(self._client, experiment, artifact_location(uri, launch_dir))
        run = self._client.create_run(experiment_id, run_name=name, tags=_tags(tags))
        self.run_id: str = run.info.run_id

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

    def end(self, status: str) -> None:
        """FINISHED, FAILED or KILLED."""
        self._client.set_terminated(self.run_id, status)

    def _log(self, metrics: Sequence[Any]) -> None:
        for part in chunks(metrics, _METRICS_PER_CALL):
            self._client.log_batch(self.run_id, metrics=part)


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
