"""`task=report` and `task=compare` by the command line, on folders and on MLflow runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from specflow import cli
from specflow.plugins.registry import Registry, load_plugins
from specflow.tracking.events import RunFinished, RunStarted, SweepFinished, SweepStarted
from specflow.tracking.mlflow import MlflowOptions, MlflowTracker
from tests.report import runs, scenario


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A launch folder with an MLflow store: a sweep of two jobs, one of them run twice, and a run beside it."""
    launch = tmp_path_factory.mktemp("launch")
    facts = {**scenario.FACTS, "launch_dir": str(launch)}
    sweep = MlflowTracker().open_sweep(SweepStarted("sweep", ["a=1,2"], {}, launch / "sweep", facts))
    ids: dict[str, Any] = {"launch": launch, "sweep": sweep.run_id}
    summary = scenario.summary(("ngram",))
    for name, parent, status in (
        ("0-ngram", sweep.run_id, "killed"), ("0-ngram", sweep.run_id, "finished"),
        ("1-ngram", sweep.run_id, "finished"), ("alone", None, "finished"),
    ):  # fmt: skip
        folder = launch / "runs" / f"{len(ids)}-{name}"
        length = 3 if name == "0-ngram" else 5
        runs.write_run(folder, runs.config("ngram", length), summary if status == "finished" else None, status)
        tracker = MlflowTracker(MlflowOptions(parent_run_id=parent))
        tracker.specflow_run_started(RunStarted("bench", name, {}, launch / name, facts))
        tracker._output_dir = folder
        tracker.specflow_run_finished(RunFinished(status))
        ids[f"{name} {status}"] = tracker.run_id
    sweep.finish(SweepFinished("finished"))
    return ids


@pytest.fixture
def run(store: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Any:
    """A command line in the launch folder of the store; gives exit code and everything printed."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    registry: Registry = load_plugins(only="")
    uri = f"tracking.uri=sqlite:///{store['launch']}/runs/mlflow.db"

    def call(*words: str, stored: bool = True) -> tuple[int, str]:
        code = cli.main([*words, *([uri] if stored else [])], registry)
        shown = capsys.readouterr()
        return code, shown.out + shown.err

    return call


def shown_runs(folder: Path) -> list[tuple[str, str]]:
    data = json.loads((folder / "results.json").read_text())
    return [(one["status"], one["run_id"]) for one in data["runs"]]


def test_a_sweep_of_the_store_stands_for_its_jobs(run: Any, store: dict[str, Any], tmp_path: Path) -> None:
    code, text = run("task=report", f"task.runs=[{store['sweep']}]")
    assert code == 0, text
    assert shown_runs(tmp_path / "report") == [
        ("finished", store["0-ngram finished"]), ("finished", store["1-ngram finished"])
    ]  # fmt: skip
    assert "report: report/results.html" in text
    assert "batch 1: ngram K=" in text
    assert "<h1>2 runs</h1>" in (tmp_path / "report" / "results.html").read_text()


def test_an_experiment_gives_every_run_once(run: Any, store: dict[str, Any], tmp_path: Path) -> None:
    alone = store["alone finished"]
    code, text = run("task=report", "task.experiment=specflow", f"task.runs=[{alone}]", "task.title='My page'")
    assert code == 0, text
    assert [one for _, one in shown_runs(tmp_path / "report")] == [
        alone, store["0-ngram finished"], store["1-ngram finished"]
    ]  # fmt: skip
    assert "<h1>My page</h1>" in (tmp_path / "report" / "results.html").read_text()


def test_folders_need_no_store(run: Any, tmp_path: Path) -> None:
    runs.write_sweep(tmp_path / "sweep")
    runs.write_run(tmp_path / "alone", runs.config("dflash"), scenario.summary(("dflash",)))
    words = (f"task.runs=[{tmp_path}/sweep,{tmp_path}/alone]", "task.output=out/page", "tracking=none")
    code, text = run("task=report", *words, stored=False)
    assert code == 0, text
    assert [status for status, _ in shown_runs(tmp_path / "out" / "page")] == ["finished"] * 4 + ["failed", "finished"]


def test_a_run_that_left_no_files_is_shown_by_its_tags(run: Any, store: dict[str, Any], tmp_path: Path) -> None:
    """Such as one whose process was killed."""
    from specflow.tracking.mlflow_run import connect

    client = connect(f"sqlite:///{store['launch']}/runs/mlflow.db")
    lost = client.create_run("1", run_name="lost", tags={"reason": "killed"}).info.run_id
    client.set_terminated(lost, "KILLED")
    assert run("task=report", f"task.runs=[{lost}]")[0] == 0
    assert shown_runs(tmp_path / "report") == [("killed", lost)]
    assert "1 without a result:</b> killed" in (tmp_path / "report" / "results.html").read_text()
    client.delete_run(lost)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["task=report"], "task=report needs runs"),
        (["task=report", "task.runs=[nonsense]"], "nonsense is neither a folder nor a run of the MLflow store"),
        (["task=report", "task.experiment=nonsense"], "It has: specflow"),
        (["task=report", "task.experiment=specflow", "tracking=none", "~tracking.uri"], "tracking=mlflow"),
        (["task=report", "task.runs=[.]"], "holds neither a run nor a sweep"),
        (["task=compare", "task.runs=[a]"], "must be two runs"),
    ],
)
def test_mistakes(run: Any, words: list[str], said: str) -> None:
    stored = "tracking=none" not in words
    code, text = run(*[word for word in words if not word.startswith("~")], stored=stored)
    assert code == 2, text
    assert said in text
    assert "Traceback" not in text


def test_compare_two_runs_of_the_store(run: Any, store: dict[str, Any], tmp_path: Path) -> None:
    pair = f"{store['0-ngram finished']},{store['1-ngram finished']}"
    code, text = run("task=compare", f"task.runs=[{pair}]", "task.output=out/compare.json")
    assert code == 0, text
    assert "proposer.num_speculative_tokens" in text
    data = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert [one["name"] for one in data["settings"]] == ["proposer.num_speculative_tokens"]
    assert {one["verdict"] for one in data["quantities"]} == {"same"}


def test_a_sweep_is_not_one_run(run: Any, store: dict[str, Any]) -> None:
    code, text = run("task=compare", f"task.runs=[{store['sweep']},{store['alone finished']}]")
    assert code == 2
    assert "is a sweep of 2 runs" in text
