"""Sweeps by the command line: parent and children in MLflow, failures, resuming after a kill, parallel jobs."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

import specflow
from specflow import cli
from specflow.plugins.registry import Registry, load_plugins
from specflow.runner import check, execute
from specflow.tasks.base import TaskContext
from specflow.tracking.events import RunFinished
from specflow.tracking.mlflow_run import connect, search_runs
from tests.plugins.fakes import ProbePlugin

SMALL = """# @package _global_
# Runs of a second: a tiny target, two prompts of twelve tokens.
defaults:
  - override /target: hf
  - override /workload: jsonl
target: {{path: {target}, prove: false}}
workload: {{path: {prompts}}}
scheduler: {{max_model_len: 256, max_num_seqs: 2}}
sampling: {{max_tokens: 12}}
task: {{batch_sizes: [1, 2], repeats: 2, cost_curve: false}}
"""


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow store whose tables have been made, which takes seconds."""
    file = tmp_path_factory.mktemp("store") / "mlflow.db"
    connect(f"sqlite:///{file}").search_experiments()
    return file


@pytest.fixture(autouse=True)
def _steady_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that run beside each other change the speed of the machine."""
    monkeypatch.setattr("specflow.tasks.bench.feel_pulse", lambda engine: 1.0)


@pytest.fixture
def launch(tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to start commands in, with nothing but an empty store."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "launch" / "runs").mkdir(parents=True)
    shutil.copy(empty_store, tmp_path / "launch" / "runs" / "mlflow.db")
    monkeypatch.chdir(tmp_path / "launch")
    return tmp_path / "launch"


@pytest.fixture
def registry() -> Registry:
    return load_plugins(only="")


def words(llama: Path, *more: str) -> list[str]:
    """A sweep of the experiment `small`."""
    folder = Path.cwd().parent / "conf" / "experiment"
    folder.mkdir(parents=True, exist_ok=True)
    prompts = folder / "prompts.jsonl"
    prompts.write_text('{"prompt": "the rain in spain the rain in"}\n{"prompt": "a rose is a rose is a"}\n')
    (folder / "small.yaml").write_text(SMALL.format(target=llama, prompts=prompts))
    return ["-m", "--config-dir", str(folder.parent), "+experiment=small", *more]


def stored(folder: Path) -> tuple[Any, list[Any]]:
    """The sweep's run in MLflow and the runs below it; every run of the store is one of them."""
    client = connect(f"sqlite:///{folder}/runs/mlflow.db")
    experiment = client.get_experiment_by_name("specflow").experiment_id
    every = search_runs(client, experiment, "")
    parents = [run for run in every if run.data.tags["task"] == "sweep"]
    assert len(parents) == 1
    children = [run for run in every if run.data.tags.get("mlflow.parentRunId") == parents[0].info.run_id]
    assert len(every) == 1 + len(children)
    return parents[0], children


def sweep_folder(folder: Path) -> Path:
    (found,) = folder.glob("runs/*/*-sweep")
    return found


# -- parent and children -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("chdir", [pytest.param(False, marks=pytest.mark.slow), True])
def test_one_parent_with_a_child_per_job(llama_folder: Path, launch: Path, registry: Registry, chdir: bool) -> None:
    """C62 and C63: one store in the launch folder, nested runs named by their overrides, the best one and a table."""
    line = words(
        llama_folder, "+proposer=ngram,suffix", "proposer.num_speculative_tokens=2,3", f"hydra.job.chdir={chdir}"
    )
    assert cli.main(line, registry) == 0
    assert list(launch.rglob("*.db")) == [launch / "runs" / "mlflow.db"]
    parent, children = stored(launch)
    assert parent.info.status == "FINISHED"
    assert [one.info.status for one in children] == ["FINISHED"] * 4
    names = [one.info.run_name for one in children]
    for name, method, length in zip(names, ["ngram", "ngram", "suffix", "suffix"], [2, 3, 2, 3], strict=True):
        assert f"+proposer={method} proposer.num_speculative_tokens={length}" in name
    assert parent.info.run_name == "sweep of proposer, proposer.num_speculative_tokens"
    assert parent.data.tags["best_run_id"] in [one.info.run_id for one in children]
    assert parent.data.metrics["jobs"] == parent.data.metrics["finished_jobs"] == 4
    files = {file.name for file in Path(parent.info.artifact_uri.removeprefix("file://")).iterdir()}
    assert {"results.html", "results.csv", "results.json", "throughput_by_length.png"} <= files


def test_plain_decoding_is_measured_by_the_first_job_only(llama_folder: Path, launch: Path, registry: Registry) -> None:
    line = words(llama_folder, "+proposer=ngram,suffix", "tracking=none")
    assert cli.main(line, registry) == 0
    served = [_methods(folder) for folder in sorted(sweep_folder(launch).glob("[01]-*"))]
    assert served == [{"plain", "ngram"}, {"suffix"}]
    rows = json.loads((sweep_folder(launch) / "results.json").read_text())["rows"]
    assert [(row["method"], row["batch_size"]) for row in rows] == [
        (method, batch) for batch in (1, 2) for method in ("plain", "ngram", "suffix")
    ]


@pytest.mark.slow
def test_every_job_measures_plain_decoding_when_asked(llama_folder: Path, launch: Path, registry: Registry) -> None:
    line = words(llama_folder, "+proposer=ngram,suffix", "tracking=none", "sweep.reuse_baseline=false")
    assert cli.main(line, registry) == 0
    assert [_methods(folder) for folder in sorted(sweep_folder(launch).glob("[01]-*"))] == [
        {"plain", "ngram"}, {"plain", "suffix"}
    ]  # fmt: skip


def _methods(folder: Path) -> set[str]:
    return {json.loads(line)["method"] for line in (folder / "requests.jsonl").read_text().splitlines()}


# -- failures ------------------------------------------------------------------------------------------------------
def test_a_failed_job(llama_folder: Path, launch: Path, registry: Registry, capsys: Any) -> None:
    """C64: job 2 has an impossible option; the others finish, it stands in the store with its reason, exit code 1."""
    line = words(llama_folder, "+proposer=ngram", "proposer.num_speculative_tokens=2,0,3,4")
    assert cli.main(line, registry) == 1
    parent, children = stored(launch)
    assert [one.info.status for one in children] == ["FINISHED", "FAILED", "FINISHED", "FINISHED"]
    assert "num_speculative_tokens" in children[1].data.tags["reason"]
    assert parent.info.status == "FAILED"
    assert parent.data.tags["reason"] == "1 of 4 jobs did not finish"
    assert "proposer.num_speculative_tokens=0" in parent.data.tags["failed.0"]
    page = (sweep_folder(launch) / "results.html").read_text()
    assert "1 without a result" in page
    assert children[1].data.tags["reason"] in page
    err = capsys.readouterr().err
    summary = err[err.index("1 job(s) of the sweep failed") :]
    assert "proposer.num_speculative_tokens=0" in summary
    assert "Traceback" not in err


@pytest.fixture
def probe(tmp_path: Path) -> ProbePlugin:
    return ProbePlugin(tmp_path / "probe_conf")


def fail_at(level: int, error: BaseException) -> Any:
    def behave(context: TaskContext) -> RunFinished:
        if context.config["task"]["level"] == level:
            raise error
        return RunFinished("finished", metrics={"speedup": float(context.config["task"]["level"])})

    return behave


def levels(probe: ProbePlugin) -> list[int]:
    return [context.config["task"]["level"] for context in probe.contexts]


def test_an_interrupted_sweep_is_summarised_and_goes_on(
    launch: Path, registry: Registry, probe: ProbePlugin, capsys: Any
) -> None:
    line = ["-m", "task.level=1,2,3", "+experiment=probe"]
    with registry.temporary(probe):
        probe._behave = fail_at(2, KeyboardInterrupt("stopped by SIGINT"))
        assert cli.main(line, registry) == 130
        assert "sweep.resume=true" in capsys.readouterr().err
        record = json.loads((sweep_folder(launch) / "sweep.json").read_text())
        assert record["status"] == "killed"
        probe._behave = fail_at(0, RuntimeError())
        assert cli.main([*line, "sweep.resume=true"], registry) == 0
        assert levels(probe) == [1, 2, 2, 3]
        assert "1 job(s) have finished before" in capsys.readouterr().err
        assert cli.main([*line, "sweep.resume=true"], registry) == 0
        assert levels(probe) == [1, 2, 2, 3], "all had finished"
    assert json.loads((sweep_folder(launch) / "sweep.json").read_text())["status"] == "finished"
    assert [folder.name for folder in (sweep_folder(launch) / "attempts").iterdir()] == ["1-plain-1"]


def test_a_failed_job_is_run_again_when_resumed(launch: Path, registry: Registry, probe: ProbePlugin) -> None:
    line = ["-m", "task.level=1,2", "+experiment=probe"]
    with registry.temporary(probe):
        probe._behave = fail_at(1, RuntimeError("once"))
        assert cli.main(line, registry) == 1
        probe._behave = fail_at(0, RuntimeError())
        assert cli.main(["sweep.resume=true", *line], registry) == 0
    assert levels(probe) == [1, 2, 1]


def test_a_single_run_cannot_be_resumed(launch: Path, registry: Registry, capsys: Any) -> None:
    assert cli.main(["sweep.resume=true"], registry) == 2
    assert "add -m" in capsys.readouterr().err
    assert list(launch.rglob("*-plain")) == []


def test_a_metric_that_is_not_there_fails_the_job(launch: Path, registry: Registry, probe: ProbePlugin) -> None:
    """The run itself has finished; the sweep has no number of it all the same."""
    with registry.temporary(probe):
        assert cli.main(["-m", "task.level=1", "+experiment=probe", "objective=nonsense"], registry) == 1
    job = json.loads((sweep_folder(launch) / "0-plain" / "job.json").read_text())
    assert job["status"] == "failed"
    assert "objective=nonsense" in job["reason"]


# -- a real kill ---------------------------------------------------------------------------------------------------
def start(folder: Path, line: Sequence[str]) -> "subprocess.Popen[str]":
    root = str(Path(specflow.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "specflow", *line]
    return subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def wait_for(process: "subprocess.Popen[str]", pattern: str, folder: Path, seconds: float = 120) -> None:
    """Until a file that fits the pattern is there."""
    end = time.monotonic() + seconds
    while not list(folder.glob(pattern)):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end, f"no {pattern}"
        time.sleep(0.005)


@pytest.mark.slow
def test_kill_minus_nine_in_the_middle_of_a_sweep(llama_folder: Path, launch: Path, registry: Registry) -> None:
    """Nothing is lost, nothing is done twice."""
    line = words(llama_folder, "+proposer=ngram,suffix", "proposer.num_speculative_tokens=2,3")
    process = start(launch, line)
    wait_for(process, "runs/*/*-sweep/2-suffix/requests.jsonl", launch)  # the third job is being measured
    process.send_signal(signal.SIGKILL)
    process.communicate()
    folder = sweep_folder(launch)
    assert not (folder / "results.html").exists()
    before = {place.name: (place / "job.json").read_bytes() for place in folder.glob("[01]-*")}
    assert len(before) == 2
    assert json.loads((folder / "2-suffix" / "run.json").read_text())["status"] == "running"

    assert cli.main([*line, "sweep.resume=true"], registry) == 0
    assert sweep_folder(launch) == folder, "no second folder"
    assert {name: (folder / name / "job.json").read_bytes() for name in before} == before
    parent, children = stored(launch)
    assert parent.info.status == "FINISHED"
    finished = [one.data.tags["output_dir"] for one in children if one.info.status == "FINISHED"]
    assert sorted(finished) == [
        str(folder / f"{number}-{name}") for number, name in enumerate(["ngram"] * 2 + ["suffix"] * 2)
    ]
    killed = [one for one in children if one.info.status != "FINISHED"]
    assert [(one.info.status, one.data.tags["status"]) for one in killed] == [("KILLED", "killed")]
    rows = [json.loads(text) for text in (folder / "2-suffix" / "requests.jsonl").read_text().splitlines()]
    own = [row for row in rows if row["method"] == "suffix"]
    assert len(own) == 2 * 2 * 2, "two prompts, two repeats, two batch sizes: none of the killed attempt"
    assert (folder / "attempts" / "2-suffix-1" / "requests.jsonl").exists()
    results = json.loads((folder / "results.json").read_text())
    assert [run["status"] for run in results["runs"]] == ["finished"] * 4
    assert len([row for row in results["rows"] if row["method"] != "plain"]) == 2 * 4
    assert not any("sweep.resume" in run["name"] for run in results["runs"])
    assert cli.main([*line, "sweep.resume=true"], registry) == 0
    assert sweep_folder(launch) == folder
    assert len(stored(launch)[1]) == len(children), "everything had finished"


# -- other launchers and sweepers ----------------------------------------------------------------------------------
def needs(package: str) -> Any:
    found = importlib.util.find_spec("hydra_plugins") and importlib.util.find_spec(f"hydra_plugins.{package}")
    return pytest.mark.skipif(not found, reason=f"hydra_plugins.{package} is not installed")


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of a pool find the checkout and do not crowd the cores."""
    monkeypatch.setenv("PYTHONPATH", str(Path(specflow.__file__).parents[1]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.slow
@needs("hydra_joblib_launcher")
@pytest.mark.usefixtures("no_threads")
def test_jobs_side_by_side_lose_nothing(llama_folder: Path, launch: Path, registry: Registry) -> None:
    """C63 under joblib: the same result in one SQLite store, written by several processes at the same time."""
    line = words(llama_folder, "+proposer=ngram,suffix", "proposer.num_speculative_tokens=2,0,3")
    assert cli.main([*line, "hydra/launcher=joblib", "hydra.launcher.n_jobs=3"], registry) == 1
    parent, children = stored(launch)
    by_name = {one.data.tags["output_dir"].rpartition("/")[2]: one for one in children}
    statuses = {name: one.info.status for name, one in by_name.items()}
    assert statuses == {
        "0-ngram": "FINISHED", "1-ngram": "FAILED", "2-ngram": "FINISHED",
        "3-suffix": "FINISHED", "4-suffix": "FAILED", "5-suffix": "FINISHED",
    }  # fmt: skip
    assert parent.data.tags["reason"] == "2 of 6 jobs did not finish"
    folder = sweep_folder(launch)
    for name, one in by_name.items():
        if one.info.status == "FINISHED":
            metrics = json.loads((folder / name / "summary.json").read_text())["metrics"]
            assert one.data.metrics.items() >= metrics.items()
    measured = [name for name in by_name if "plain" in _methods_or_none(folder / name)]
    assert 1 <= len(measured) < 4, "plain decoding is measured once, or again where the machine changed its speed"
    assert "at the same time" in (folder / "results.html").read_text()


def _methods_or_none(folder: Path) -> set[str]:
    return _methods(folder) if (folder / "requests.jsonl").exists() else set()


@needs("hydra_optuna_sweeper")
def test_optuna_gets_the_objective(launch: Path, registry: Registry, probe: ProbePlugin) -> None:
    """It finds the best level; a level that fails is a failed trial and ends nothing."""
    line = ["-m", "+experiment=probe", "hydra/sweeper=optuna", "hydra.sweeper.direction=maximize"]
    line += ["hydra.sweeper.n_trials=12", "hydra.sweeper.sampler.seed=1", "task.level=range(1,6)"]
    with registry.temporary(probe):
        probe._behave = fail_at(3, RuntimeError("level 3 is broken"))
        assert cli.main(line, registry) == 1
    assert len(levels(probe)) == 12
    assert 3 in levels(probe)
    folder = sweep_folder(launch)
    found = (folder / "optimization_results.yaml").read_text()
    best = max(level for level in levels(probe) if level != 3)
    assert f"best_value: {float(best)}" in found
    assert len(list(folder.glob("*/job.json"))) == 12


@pytest.mark.parametrize(
    ("package", "word", "name"),
    [
        pytest.param("hydra_joblib_launcher", "hydra/launcher=joblib", "Joblib", marks=needs("hydra_joblib_launcher")),
        pytest.param("hydra_optuna_sweeper", "hydra/sweeper=optuna", "Optuna", marks=needs("hydra_optuna_sweeper")),
        pytest.param("hydra_ray_launcher", "hydra/launcher=ray", "Ray", marks=needs("hydra_ray_launcher")),
        pytest.param(
            "hydra_submitit_launcher", "hydra/launcher=submitit_slurm", "Slurm", marks=needs("hydra_submitit_launcher")
        ),
    ],
)
def test_a_launcher_or_sweeper_composes(
    launch: Path, registry: Registry, capsys: Any, package: str, word: str, name: str
) -> None:
    assert cli.main(["--cfg", "hydra", "-p", word.partition("=")[0].replace("/", "."), word], registry) == 0
    assert name.lower() in capsys.readouterr().out.lower()


@pytest.mark.slow
@needs("hydra_submitit_launcher")
@pytest.mark.usefixtures("no_threads")
def test_submitit_runs_jobs_in_processes_of_their_own(llama_folder: Path, launch: Path, registry: Registry) -> None:
    """The launcher for SLURM with its executor for one machine."""
    line = words(llama_folder, "+proposer=ngram,suffix", "hydra/launcher=submitit_local")
    assert cli.main([*line, "hydra.launcher.timeout_min=5"], registry) == 0
    parent, children = stored(launch)
    assert [one.info.status for one in (parent, *children)] == ["FINISHED"] * 3


# -- the record of a run -------------------------------------------------------------------------------------------
def test_a_run_can_be_repeated_from_its_record(llama_folder: Path, launch: Path, registry: Registry) -> None:
    """C66: the same texts and accepted counts from the config.yaml that the run left."""
    line = [word for word in words(llama_folder, "+proposer=suffix", "tracking=none", "seed=5") if word != "-m"]
    assert cli.main([*line, "sampling.temperature=0.9"], registry) == 0
    (first,) = launch.glob("runs/*/*-suffix")
    config = yaml.safe_load((first / "config.yaml").read_text())
    execute(check(config, registry), launch / "again", {"launch_dir": str(launch)})
    kept = ("method", "batch_size", "repeat", "request_id", "token_ids", "text", "rounds", "drafted", "accepted")
    both = [
        [{key: json.loads(text)[key] for key in kept} for text in (folder / "requests.jsonl").read_text().splitlines()]
        for folder in (first, launch / "again")
    ]
    assert len(both[0]) == 2 * 2 * 2 * 2
    assert both[0] == both[1]
