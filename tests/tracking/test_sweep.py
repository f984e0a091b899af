"""The MLflow run above the runs of a sweep, and a store that several processes write at the same time."""

import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from specflow.errors import StorageError
from specflow.tracking.base import Tracker
from specflow.tracking.events import RunFinished, RunStarted, SweepFinished, SweepStarted
from specflow.tracking.mlflow import MlflowOptions, MlflowTracker
from specflow.tracking.mlflow_run import connect, search_runs
from tests.report import scenario


@pytest.fixture(scope="module")
def launch_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one store for all tests."""
    folder = tmp_path_factory.mktemp("launch")
    connect(f"sqlite:///{folder}/runs/mlflow.db").search_experiments()
    return folder


@pytest.fixture(autouse=True)
def _no_user_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def begun(launch_dir: Path, run_id: str | None = None) -> Any:
    facts = {**scenario.FACTS, "launch_dir": str(launch_dir)}
    return MlflowTracker().open_sweep(SweepStarted("sweep of K", ["K=1,2"], {}, launch_dir / "sweep", facts, run_id))


def child(launch_dir: Path, parent: str, number: int, status: str | None = "finished") -> None:
    """One job's run; status None leaves it open."""
    folder = launch_dir / "sweep" / f"{number}-ngram"
    folder.mkdir(parents=True, exist_ok=True)
    tracker = MlflowTracker(MlflowOptions(parent_run_id=parent))
    event = scenario.started(folder)
    facts = {**event.facts, "launch_dir": str(launch_dir)}
    tracker.specflow_run_started(RunStarted(event.task, f"K={number}", event.config, folder, facts))
    for point in range(3):
        tracker.specflow_points_measured(points=[])
        tracker.specflow_series_started(scenario.series("plain", 1, repeat=point))
        for record in scenario.steps("plain", 1, 20):
            tracker.specflow_step_finished(record)
    if status is not None:
        tracker.specflow_run_finished(RunFinished(status, metrics={"speedup": float(number)}))


def test_children_results_and_end(launch_dir: Path, tmp_path: Path) -> None:
    sweep = begun(launch_dir)
    child(launch_dir, sweep.run_id, 1)
    child(launch_dir, sweep.run_id, 2, "failed")
    child(launch_dir, sweep.run_id, 3, None)
    runs = sweep.runs()
    assert [Path(run.output_dir).name for run in runs] == ["1-ngram", "2-ngram", "3-ngram"]
    assert [run.status for run in runs] == ["finished", "failed", "running"]
    sweep.end_lost(runs[2].run_id, "its process was killed")
    (tmp_path / "results.html").write_text("page")
    sweep.finish(SweepFinished("failed", "1 of 3", {"jobs": 3.0}, {"best_run": "K=1"}, [tmp_path / "results.html"]))
    client = connect(f"sqlite:///{launch_dir}/runs/mlflow.db")
    lost, parent = client.get_run(runs[2].run_id), client.get_run(sweep.run_id)
    assert (lost.info.status, lost.data.tags["reason"]) == ("KILLED", "its process was killed")
    assert (parent.info.status, parent.data.tags["reason"]) == ("FAILED", "1 of 3")
    assert parent.data.metrics == {"jobs": 3.0}
    assert parent.data.tags["best_run"] == "K=1"
    assert [item.path for item in client.list_artifacts(sweep.run_id)] == ["results.html"]
    assert parent.data.params == {"sweep.command": "K=1,2"}


def test_a_sweep_goes_on_in_the_same_run(launch_dir: Path) -> None:
    first = begun(launch_dir)
    first.finish(SweepFinished("killed", "SIGTERM"))
    again = begun(launch_dir, first.run_id)
    assert again.run_id == first.run_id
    client = connect(f"sqlite:///{launch_dir}/runs/mlflow.db")
    assert client.get_run(first.run_id).info.status == "RUNNING"
    again.finish(SweepFinished("finished"))
    assert client.get_run(first.run_id).info.status == "FINISHED"


def test_a_store_that_does_not_open(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("in the way")
    with pytest.raises(StorageError, match="cannot be opened"):
        begun(tmp_path)


def test_other_trackers_need_no_sweep() -> None:
    assert Tracker().open_sweep(SweepStarted("x", [], {}, Path(), {})) is None


def test_processes_side_by_side_lose_nothing(launch_dir: Path) -> None:
    """Four processes write runs, curves and tags into one SQLite file at the same time."""
    sweep = begun(launch_dir)
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_write_jobs, args=(launch_dir, sweep.run_id, first)) for first in range(0, 12, 3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * 4
    client = connect(f"sqlite:///{launch_dir}/runs/mlflow.db")
    experiment = client.get_experiment_by_name("specflow").experiment_id
    runs = search_runs(client, experiment, f"tags.`mlflow.parentRunId` = '{sweep.run_id}'")
    assert sorted(run.data.metrics["speedup"] for run in runs) == [float(number) for number in range(12)]
    assert {run.info.status for run in runs} == {"FINISHED"}
    for run in runs:
        assert len(client.get_metric_history(run.info.run_id, "steps/plain/batch_1/step_seconds")) == 6


def _write_jobs(launch_dir: Path, parent: str, first: int) -> None:
    for number in range(first, first + 3):
        child(launch_dir, parent, number)
