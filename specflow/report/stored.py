"""Finished runs by the names a user has for them: folders, and run ids of MLflow."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from specflow.errors import ConfigError, StorageError
from specflow.report.records import CONFIG_FILE, JOB_FILE, RUN_FILE, SUMMARY_FILE, RunRecord, read_record, run_folders
from specflow.tracking.mlflow_run import connect, search_runs
from specflow.tracking.store_uri import without_password

__all__ = ["records_of"]

_FILES = (RUN_FILE, CONFIG_FILE, SUMMARY_FILE, JOB_FILE)
_STATUSES = {"FINISHED": "finished", "FAILED": "failed", "KILLED": "killed"}


def records_of(names: Sequence[str], experiment: str | None, uri: str | None) -> list[RunRecord]:
    """The runs named, a sweep standing for its jobs, then every run of the experiment; each run once.

    names: folders of runs or sweeps, or ids of MLflow's store at `uri`. uri None: there is no store, only folders can
    be named. Raises `ConfigError` for a name that is nothing, `StorageError` for files that cannot be read.
    """
    records: list[RunRecord] = []
    ids = []
    for name in names:
        if Path(name).is_dir():
            records += _from_folder(Path(name))
        else:
            ids.append(name)
    if ids or experiment is not None:
        records += _from_store(ids, experiment, uri)
    unique = {record.run_id or record.folder: record for record in records}
    return list(unique.values())


def _from_folder(folder: Path) -> list[RunRecord]:
    found = run_folders(folder)
    if not found:
        raise ConfigError(f"{folder} holds neither a run nor a sweep: there is no {RUN_FILE} in it or right below it.")
    return [read_record(one) for one in found]


def _from_store(ids: Sequence[str], experiment: str | None, uri: str | None) -> list[RunRecord]:
    if uri is None:
        missing = ", ".join(ids) or f"experiment {experiment}"
        raise ConfigError(f"{missing}: there is no such folder, and run ids need a store: tracking=mlflow.")
    try:
        client = connect(uri)
        found = [run for run_id in ids for run in _run_or_jobs(client, run_id, uri)]
        if experiment is not None:
            found += _of_experiment(client, experiment, uri)
    except ConfigError:
        raise
    except Exception as error:
        raise StorageError(f"the MLflow store {without_password(uri)} cannot be read: {error}") from error
    return [_record(client, run) for run in found]


def _run_or_jobs(client: Any, run_id: str, uri: str) -> list[Any]:
    from mlflow.exceptions import MlflowException

    try:
        run = client.get_run(run_id)
    except MlflowException:
        raise ConfigError(
            f"{run_id} is neither a folder nor a run of the MLflow store {without_password(uri)} (tracking.uri)."
        ) from None
    jobs = search_runs(client, run.info.experiment_id, f"tags.`mlflow.parentRunId` = '{run_id}'")
    return _last_attempts(jobs) if jobs else [run]


def _of_experiment(client: Any, name: str, uri: str) -> list[Any]:
    found = client.get_experiment_by_name(name)
    if found is None:
        names = ", ".join(one.name for one in client.search_experiments()) or "none"
        raise ConfigError(
            f"task.experiment={name}: the MLflow store {without_password(uri)} has no such experiment. It has: {names}."
        )
    runs = search_runs(client, found.experiment_id, "")
    return _last_attempts([run for run in runs if run.data.tags.get("task") != "sweep"])


def _last_attempts(runs: Iterable[Any]) -> list[Any]:
    """Of a job that a resumed sweep ran again, the last run only."""
    return list({run.data.tags.get("output_dir", run.info.run_id): run for run in runs}.values())


def _record(client: Any, run: Any) -> RunRecord:
    """A run's record from the files it left in the store; one that left none has its tags."""
    run_id, tags = str(run.info.run_id), run.data.tags
    there = {item.path for item in client.list_artifacts(run_id)}
    folder = tags.get("output_dir", run_id)
    if RUN_FILE not in there:
        status = _STATUSES.get(str(run.info.status), "running")
        name = str(run.info.run_name)
        return RunRecord(name=name, status=status, reason=tags.get("reason"), folder=folder, run_id=run_id)
    with TemporaryDirectory() as place:
        for file in _FILES:
            if file in there:
                client.download_artifacts(run_id, file, place)
        return replace(read_record(Path(place), run_id), folder=folder)
