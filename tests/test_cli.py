"""The command line: help, listings, what every mistake is answered with, sweeps, exit codes."""

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

import specflow
from specflow import cli
from specflow.composition import composer
from specflow.errors import ConfigError
from specflow.plugins.component import Kind
from specflow.plugins.registry import Registry, load_plugins
from specflow.tasks.base import TaskContext
from specflow.tracking.events import RunFinished
from specflow.workloads.rows import absolute
from tests.plugins.fakes import ProbePlugin

PROBE = "+experiment=probe"


@pytest.fixture(autouse=True)
def _same_logging() -> Iterator[None]:
    """Hydra's `--info` adds a handler for the standard output of its moment."""
    before = logging.root.handlers[:]
    yield
    logging.root.handlers[:] = before


@pytest.fixture
def plugin(tmp_path: Path) -> ProbePlugin:
    """A composition of fakes; a test may change what its task does."""
    return ProbePlugin(tmp_path / "probe_conf")


@pytest.fixture
def registry(plugin: ProbePlugin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Built-in components and the fakes, in an empty launch folder."""
    (tmp_path / "launch").mkdir()
    monkeypatch.chdir(tmp_path / "launch")
    found = load_plugins(only="")
    with found.temporary(plugin):
        yield found


@pytest.fixture
def run(registry: Registry, capsys: Any) -> Any:
    """Runs a command line; gives exit code, standard output and error output."""

    def call(*words: str) -> tuple[int, str, str]:
        code = cli.main(list(words), registry)
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return call


# -- help and listings ---------------------------------------------------------------------------------------------
def test_help_names_every_group_and_component(run: Any) -> None:
    code, out, err = run("--help")
    assert code == 0
    assert err == ""
    for kind in Kind:
        assert f"{kind}:" in out
    for word in ("draft_model", "humaneval", "debug", "--cfg job", "+proposer=NAME"):
        assert word in out


def test_version(run: Any) -> None:
    assert run("--version")[1] == f"specflow {specflow.__version__}\n"


def test_cfg_job_prints_the_composition_and_runs_nothing(run: Any, tmp_path: Path) -> None:
    code, out, _ = run("--cfg", "job", "+proposer=ngram", "proposer.num_speculative_tokens=7")
    assert code == 0
    assert "num_speculative_tokens: 7" in out
    assert "hydra:" not in out
    assert list((tmp_path / "launch").iterdir()) == []


def test_hydras_own_questions_still_work(run: Any) -> None:
    assert run("--info", "defaults")[0] == 0
    assert run("--info", "searchpath")[0] == 0
    code, out, _ = run("--cfg", "hydra", "-p", "hydra.run")
    assert code == 0
    assert "dir: runs/" in out
    assert "Hydra" in run("--hydra-help")[1]


def test_an_unknown_flag(registry: Registry, capsys: Any) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--nonsense"], registry)
    assert caught.value.code == 2
    assert "--nonsense" in capsys.readouterr().err


# -- mistakes ------------------------------------------------------------------------------------------------------
MISTAKES = {
    "+proposer=ngram proposer.kk=4": ["proposer.kk=4", "num_speculative_tokens", "match_policy"],
    "proposr=ngram": ["'proposr'", "Did you mean proposer"],
    "proposer=ngrm": ["ngrm", "Did you mean ngram", "draft_model", "+proposer"],
    "proposer=ngram": ["write +proposer=ngram", "draft_model"],
    "+proposer=ngrm": ["ngrm", "Did you mean ngram", "draft_model"],
    "+proposer=ngram proposer.num_speculative_tokens=four": ["num_speculative_tokens=four", "must be int"],
    "+proposer=ngram +proposer.kk=4": ["proposer.kk=4", "num_speculative_tokens (int)"],
    "+proposer=ngram proposer.num_speculative_tokens=0": ["num_speculative_tokens", "0"],
    "proposer.num_speculative_tokens=3": ["no proposer is chosen", "+proposer=NAME", "ngram"],
    "workload=nope": ["workload=nope", "bundled", "humaneval"],
    "sampling.temprature=1": ["'temprature'", "Did you mean temperature"],
    "sampling.temperature=hot": ["sampling.temperature=hot", "must be float"],
    "sampling.top_p=2": ["top_p=2", "(0, 1]"],
    "+target.foo=1": ["target.foo=1", "level (int)"],
    "sampling.stop=[1,2": ["cannot read 'sampling.stop=[1,2'", "quote"],
    "++x.y=1": ["'x'", "top level", "proposer"],
    "++x.y=…": ["x.y=…"],
    "+proposr=ngram": ["'proposr'", "Did you mean proposer"],
    "sampling.temperature=0,1": ["sampling.temperature=0,1: several values. Add -m"],
    "+target=hf": ["target=hf without the plus"],
    "target=null": ["target=null", "by name"],
    "~target": ["no target is chosen", "hf"],
    "sampling=5": ["sampling=5", "group"],
    "seed.x=5": ["seed is a single value"],
    "seed=x": ["seed=x", "int"],
    "objective=5": ["objective=5", "name of a metric"],
    "+experiment=debgu": ["+experiment=debgu", "Did you mean debug"],
    "sweep.resume=maybe": ["sweep.resume=maybe", "must be bool"],
    "sweep.resume=true": ["single run", "add -m"],
    "-m sweep.resum=true task.level=1,2": ["sweep.resum", "resume"],
    "-m sweep.reuse_baseline=5 task.level=1,2": ["sweep.reuse_baseline=5", "must be bool"],
    "-m +proposer=ngram,ngrm": ["ngrm", "Did you mean ngram"],
    "-m sampling.temprature=0,1": ["'temprature'", "Did you mean temperature"],
    "hydra/launcher=nope": ["nope", "basic"],
    "--config-path nowhere": ["--config-dir"],
    "--config-dir nowhere": ["nowhere", "no such folder"],
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_answered_in_a_few_lines(line: str, run: Any, tmp_path: Path) -> None:
    words = line.split(" ")
    extra = [] if line.startswith("+experiment") else [PROBE]
    code, _, err = run(*words, *extra)
    assert code == 2
    for part in MISTAKES[line]:
        assert part in err
    assert len(err.splitlines()) <= 15
    assert "Traceback" not in err
    assert not (tmp_path / "launch" / "runs").exists(), "a refused command leaves no folder behind"


def test_several_mistakes_are_all_named(run: Any) -> None:
    err = run(PROBE, "sampling.temperature=hot", "+target.foo=1", "+workload.bar=2")[2]
    for part in ("sampling.temperature=hot", "target.foo=1", "workload.bar=2"):
        assert part in err


def test_a_traceback_is_shown_on_request(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECFLOW_TRACEBACK", "1")
    assert "Traceback" in run("workload=nope")[2]


# -- runs ----------------------------------------------------------------------------------------------------------
@pytest.fixture
def no_displays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without progress display and report, which need a real task's events."""
    monkeypatch.setattr("specflow.runner._displays", list)


@pytest.mark.usefixtures("no_displays")
def test_a_run_has_a_folder_of_its_own_under_runs(run: Any, plugin: ProbePlugin, tmp_path: Path) -> None:
    assert run(PROBE)[0] == 0
    assert run(PROBE)[0] == 0
    first, second = (context.output_dir for context in plugin.contexts)
    assert first != second
    assert first.is_relative_to(tmp_path / "launch" / "runs")
    assert first.name.endswith("-plain")
    assert "name: probe" in (first / "config.yaml").read_text()


@pytest.mark.usefixtures("no_displays")
def test_a_sweep_runs_every_combination(run: Any, plugin: ProbePlugin) -> None:
    line = "-m +proposer=ngram,draft_model proposer.num_speculative_tokens=3,5"
    code, _, err = run(*line.split(), PROBE)
    assert code == 0, err
    seen = [
        (context.config["proposer"]["name"], context.config["proposer"]["num_speculative_tokens"])
        for context in plugin.contexts
    ]
    assert seen == [("ngram", 3), ("ngram", 5), ("draft_model", 3), ("draft_model", 5)]
    folders = [context.output_dir for context in plugin.contexts]
    assert len({folder.parent for folder in folders}) == 1
    assert [folder.name for folder in folders] == ["0-ngram", "1-ngram", "2-draft_model", "3-draft_model"]


@pytest.mark.usefixtures("no_displays")
def test_ranges_and_globs_are_swept_too(run: Any, plugin: ProbePlugin) -> None:
    code, _, err = run("-m", "task.level=range(1,3)", "workload=glob(prob*)", PROBE)
    assert code == 0, err
    assert [context.config["task"]["level"] for context in plugin.contexts] == [1, 2]


@pytest.mark.usefixtures("no_displays")
def test_a_sweep_of_an_experiment_needs_no_flag(run: Any, plugin: ProbePlugin, tmp_path: Path) -> None:
    text = (tmp_path / "probe_conf" / "experiment" / "probe.yaml").read_text()
    sweep = "hydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n      task.level: 1,2\n"
    (tmp_path / "probe_conf" / "experiment" / "grid.yaml").write_text(text + sweep)
    assert run("+experiment=grid")[0] == 0
    assert [context.config["task"]["level"] for context in plugin.contexts] == [1, 2]


@pytest.mark.usefixtures("no_displays")
def test_a_failed_job_of_a_sweep_does_not_stop_the_others(run: Any, plugin: ProbePlugin) -> None:
    def behave(context: TaskContext) -> RunFinished:
        if context.config["task"]["level"] == 2:
            raise ConfigError("level 2 is impossible.")
        return RunFinished("finished")

    plugin._behave = behave
    code, _, err = run("-m", "task.level=1,2,oops,3", PROBE)
    assert code == 1
    assert [context.config["task"]["level"] for context in plugin.contexts] == [1, 2, 3]
    summary = err[err.index("2 job(s) of the sweep failed") :]
    assert "task.level=2" in summary
    assert "level 2 is impossible" in summary
    assert "task.level=oops is not valid" in summary
    assert "Traceback" not in err


@pytest.mark.usefixtures("no_displays")
def test_config_dir_comes_first(run: Any, plugin: ProbePlugin, tmp_path: Path) -> None:
    (tmp_path / "mine" / "task").mkdir(parents=True)
    (tmp_path / "mine" / "task" / "probe.yaml").write_text("name: probe\nlevel: 42\n")
    assert run("--config-dir", str(tmp_path / "mine"), PROBE)[0] == 0
    assert plugin.contexts[0].config["task"] == {"name": "probe", "level": 42}


@pytest.mark.usefixtures("no_displays")
def test_the_last_run_can_be_an_unwritable_place(run: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    code, _, err = run(PROBE, f"hydra.run.dir={tmp_path}/file/run")
    assert code == 1
    assert "cannot write results" in err
    assert f"{tmp_path}/file" in err
    assert "hydra.run.dir" in err
    code, _, err = run("-m", "task.level=1,2", PROBE, f"hydra.sweep.dir={tmp_path}/file/sweep")
    assert code == 1
    assert "cannot write results" in err


def test_relative_paths_are_those_of_this_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of a run before in the same process that was started in another folder and did not end well."""
    left = OmegaConf.create({"hydra": {"runtime": {"cwd": "/elsewhere"}}})
    monkeypatch.setattr(HydraConfig.instance(), "cfg", left)
    monkeypatch.chdir(tmp_path)
    with composer(load_plugins()):
        assert absolute("prompts.jsonl") == tmp_path / "prompts.jsonl"
    assert HydraConfig.instance().cfg is left


def test_a_task_without_tracking_leaves_nothing_behind(run: Any, plugin: ProbePlugin, tmp_path: Path) -> None:
    plugin._tracked = False
    with load_plugins(only="").temporary(plugin) as registry:
        assert cli.main([PROBE], registry) == 0
    assert len(plugin.contexts) == 1
    assert plugin.tracker.started == []
    assert list((tmp_path / "launch").iterdir()) == []


# -- the real command ----------------------------------------------------------------------------------------------
def command(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """`python -m specflow` in a process of its own."""
    line = [sys.executable, "-m", "specflow", *words]
    root = str(Path(specflow.__file__).parents[1])
    return subprocess.run(
        line, cwd=folder, capture_output=True, text=True, check=False, env={"PYTHONPATH": root, "PATH": "/usr/bin:/bin"}
    )


def test_the_command_from_any_folder(tmp_path: Path) -> None:
    done = command("task=plugins", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "draft_model" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_commands_exit_code_for_a_mistake(tmp_path: Path) -> None:
    done = command("proposer=ngram", folder=tmp_path)
    assert done.returncode == 2
    assert "+proposer=ngram" in done.stderr
    assert done.stdout == ""


def test_the_reader_may_leave_early(tmp_path: Path) -> None:
    root = str(Path(specflow.__file__).parents[1])
    line = f"PYTHONPATH={root} {sys.executable} -m specflow --help | head -1"
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("specflow composes")
    assert "Traceback" not in done.stderr
