"""The MLflow tracker against a real SQLite store, made once for all tests."""

import io
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from specflow.errors import ConfigError, StorageError
from specflow.plugins.registry import Registry
from specflow.report.listener import ReportWriter
from specflow.report.progress import ProgressDisplay
from specflow.tracking import mlflow as tracker_module
from specflow.tracking.events import RunFinished
from specflow.tracking.mlflow import MlflowOptions, MlflowTracker
from specflow.tracking.mlflow_run import MlflowRun
from tests.report import scenario


@pytest.fixture(scope="module")
def launch_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A launch folder whose store has its tables."""
    folder = tmp_path_factory.mktemp("launch")
    MlflowRun(f"sqlite:///{folder}/runs/mlflow.db", folder, "warm", "warm", {}).end("FINISHED")
    return folder


@pytest.fixture
def output_dir(launch_dir: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "job"
    folder.mkdir()
    return folder


def start(launch_dir: Path, output_dir: Path, config: dict[str, Any] | None = None, **options: Any) -> MlflowTracker:
    tracker = MlflowTracker(MlflowOptions(**options))
    event = scenario.started(output_dir, **(config or {}))
    tracker.specflow_run_started(
        type(event)(**{**vars(event), "facts": {**event.facts, "launch_dir": str(launch_dir)}})
    )
    return tracker


def stored(launch_dir: Path, tracker: MlflowTracker) -> Any:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{launch_dir}/runs/mlflow.db")
    return client, client.get_run(tracker.run_id)


def test_whole_run(launch_dir: Path, output_dir: Path) -> None:
    tracker = start(launch_dir, output_dir)
    result = scenario.summary()
    for repeat in range(2):
        tracker.specflow_series_started(scenario.series("ngram", 1, repeat))
        for record in scenario.steps("ngram", 1, 25):
            tracker.specflow_step_finished(record)
    (output_dir / ".hydra").mkdir()
    (output_dir / ".hydra" / "overrides.yaml").write_text("- x")
    (output_dir / "report.html").write_text("<p>")
    tracker.specflow_run_finished(RunFinished("finished", metrics={"extra": 1.0}, summary=result))
    client, run = stored(launch_dir, tracker)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "ngram on bundled"
    assert run.data.params["proposer.num_speculative_tokens"] == "4"
    assert run.data.metrics["ngram/batch_8/speedup"] == pytest.approx(result.to_metrics()["ngram/batch_8/speedup"])
    assert run.data.metrics["extra"] == 1.0
    assert run.data.tags["commit"] == run.data.tags["mlflow.source.git.commit"] == "0123456789abcdef"
    assert run.data.tags["mlflow.note.content"].startswith("lossless: verified")
    assert run.data.tags["device"] == run.data.tags["backend.device"] == "cpu"
    assert run.data.tags["target.dtype"] == "float32"
    curve = client.get_metric_history(run.info.run_id, "steps/ngram/batch_1/tokens_per_second")
    assert [point.step for point in curve] == [9, 19, 24, 34, 44, 49]
    assert {item.path for item in client.list_artifacts(run.info.run_id)} == {".hydra", "report.html"}
    assert Path(run.info.artifact_uri.removeprefix("file://")).is_relative_to(launch_dir / "runs" / "artifacts")
    assert tracker.describe()["run"] == run.info.run_id


def test_long_and_many_parameters(launch_dir: Path, output_dir: Path) -> None:
    """C59: 10,000 characters, 300 parameters, more than 1000 metrics."""
    config = {"prompts": ["x" * 10_000], "many": {f"p{number}": number for number in range(300)}}
    tracker = start(launch_dir, output_dir, config)
    metrics = {f"m{number}": float(number) for number in range(1100)} | {"nan": float("nan")}
    tracker.specflow_run_finished(RunFinished("finished", metrics=metrics))
    _, run = stored(launch_dir, tracker)
    assert run.info.status == "FINISHED"
    assert len(run.data.params) >= 303
    assert len(run.data.params["prompts"]) == 500
    assert run.data.params["prompts"].endswith("…[cut]")
    assert len(run.data.metrics) == 1100


@pytest.mark.parametrize(("status", "expected"), [("failed", "FAILED"), ("killed", "KILLED")])
def test_ends_with_its_reason(launch_dir: Path, output_dir: Path, status: str, expected: str) -> None:
    tracker = start(launch_dir, output_dir, run_name="mine", parent_run_id="abc")
    tracker.specflow_run_finished(RunFinished(status, "no checkpoint there"))
    _, run = stored(launch_dir, tracker)
    assert run.info.status == expected
    assert run.data.tags["reason"] == "no checkpoint there"
    assert run.data.tags["mlflow.parentRunId"] == "abc"
    assert run.info.run_name == "mine"


def test_same_store_from_another_folder(launch_dir: Path, output_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C62: a job that changes into its own folder makes no store there."""
    monkeypatch.chdir(output_dir)
    tracker = start(launch_dir, output_dir)
    tracker.specflow_run_finished(RunFinished("finished"))
    _, run = stored(launch_dir, tracker)
    assert run.info.status == "FINISHED"
    assert os.listdir(output_dir) == []


def test_opening_does_not_hold_up_the_run(output_dir: Path, launch_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*arguments: Any) -> None:
        time.sleep(0.5)
        raise OSError("locked")

    monkeypatch.setattr(tracker_module, "MlflowRun", slow)
    begun = time.monotonic()
    tracker = start(launch_dir, output_dir)
    assert time.monotonic() - begun < 0.3
    with pytest.raises(StorageError, match=r"cannot be opened: locked\n.*tracking=none"):
        tracker.specflow_series_started(scenario.series("plain", 1))
    tracker.specflow_run_finished(RunFinished("failed", "said already"))  # not a second error


def test_store_that_fails_on_the_way(launch_dir: Path, output_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring goes on, rows stay on disk, and the end says that the store lacks the results."""
    tracker, report = start(launch_dir, output_dir), ReportWriter()
    report.specflow_run_started(scenario.started(output_dir))

    def fail(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    for number in range(2):
        tracker.specflow_series_started(scenario.series("ngram", 1, number))
        if number == 0:
            monkeypatch.setattr(MlflowRun, "log_points", fail)
        tracker.specflow_step_finished(scenario.steps("ngram", 1, 1)[0])
        report.specflow_request_finished(scenario.row("ngram", 1, number))
    with pytest.raises(StorageError, match=r"could not be saved .*No space left") as caught:
        tracker.specflow_run_finished(RunFinished("finished"))
    assert str(output_dir) in str(caught.value)
    assert len((output_dir / "requests.jsonl").read_text().splitlines()) == 2
    monkeypatch.undo()
    assert stored(launch_dir, tracker)[1].info.status == "FAILED"


def test_points_are_kept_when_the_store_was_locked_for_a_while(
    launch_dir: Path, output_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = start(launch_dir, output_dir, log_steps=1)
    tracker.specflow_series_started(scenario.series("plain", 1))
    tracker.specflow_step_finished(scenario.steps("plain", 1, 1)[0])
    with monkeypatch.context() as patch:
        patch.setattr(MlflowRun, "log_points", lambda *arguments: (_ for _ in ()).throw(OSError("locked")))
        tracker.specflow_series_started(scenario.series("plain", 1, 1))
    tracker.specflow_step_finished(scenario.steps("plain", 1, 1)[0])
    tracker.specflow_run_finished(RunFinished("finished"))
    client, run = stored(launch_dir, tracker)
    assert len(client.get_metric_history(run.info.run_id, "steps/plain/batch_1/step_seconds")) == 2


@pytest.mark.parametrize("tracker_first", [True, False])
def test_report_is_written_before_it_is_uploaded(launch_dir: Path, output_dir: Path, tracker_first: bool) -> None:
    """Whatever the order of registration."""
    tracker, registry = MlflowTracker(MlflowOptions()), Registry()
    console = Console(width=100, file=io.StringIO())
    listeners = [tracker, ProgressDisplay(console), ReportWriter(console)]
    for listener in listeners if tracker_first else reversed(listeners):
        registry.register_listener(listener)
    event = scenario.started(output_dir)
    event.facts["launch_dir"] = str(launch_dir)  # type: ignore[index]
    registry.hooks.specflow_run_started(event=event)
    registry.hooks.specflow_run_finished(event=RunFinished("finished", summary=scenario.summary()))
    client, run = stored(launch_dir, tracker)
    names = {item.path for item in client.list_artifacts(run.info.run_id)}
    pictures = {"acceptance.png", "throughput.png"}
    assert {"report.html", "summary.json", "metrics.prom", "config.yaml", "run.json"} | pictures == names


@pytest.mark.parametrize("values", [{"log_steps": -1}, {"experiment": " "}])
def test_wrong_options(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"tracking.{next(iter(values))}"):
        MlflowOptions(**values)


def test_no_tracker_imports_no_mlflow(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from specflow.tracking.none import NoOptions, NoTracker; from specflow.report.listener import ReportWriter\n"
        "from tests.report import scenario\n"
        "NoTracker(NoOptions()); list(scenario.play(ReportWriter(), Path(sys.argv[1])))\n"
        "assert Path(sys.argv[1], 'report.html').exists()\n"
        "assert not [name for name in sys.modules if name.partition('.')[0] in ('mlflow', 'sqlalchemy', 'torch')]\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2], stdout=subprocess.DEVNULL)
