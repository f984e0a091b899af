"""One run's life: checked first, started, and always ended with the right status for every listener."""

import errno
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specflow import cli
from specflow.errors import ConfigError, ProposerError, SpecflowError
from specflow.interrupts import interruptible
from specflow.plugins import hookimpl
from specflow.plugins.registry import Registry, load_plugins
from specflow.runner import ERROR_LOG, objective
from specflow.tasks.base import TaskContext
from specflow.tracking.events import RunFinished, RunStarted
from tests.plugins.fakes import ProbePlugin, Recorder, make_row


@pytest.fixture
def plugin(tmp_path: Path) -> ProbePlugin:
    """A composition of fakes; a test may change what its task does."""
    return ProbePlugin(tmp_path / "probe_conf")


@pytest.fixture
def registry(plugin: ProbePlugin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Built-in components and the fakes, in an empty launch folder, without displays."""
    (tmp_path / "launch").mkdir()
    monkeypatch.chdir(tmp_path / "launch")
    monkeypatch.setattr("specflow.runner._displays", list)
    found = load_plugins(only="")
    with found.temporary(plugin):
        yield found


@pytest.fixture
def run(registry: Registry, plugin: ProbePlugin, capsys: Any) -> Any:
    """Runs the fake composition with this task body; gives exit code and error output."""

    def call(behave: Callable[[TaskContext], RunFinished] | None = None, *words: str) -> tuple[int, str]:
        if behave is not None:
            plugin._behave = behave
        code = cli.main(["+experiment=probe", *words], registry)
        return code, capsys.readouterr().err

    return call


def raising(error: BaseException) -> Callable[[TaskContext], RunFinished]:
    """A task body that finishes one request and then fails."""

    def behave(context: TaskContext) -> RunFinished:
        context.hooks.specflow_request_finished(row=make_row("first"))
        raise error

    return behave


def heard(plugin: ProbePlugin) -> tuple[list[str], str, str | None]:
    """Rows, final status and reason as the tracker heard them."""
    (finished,) = plugin.tracker.finished
    return [row.text for row in plugin.tracker.rows], finished.status, finished.reason


# -- success -------------------------------------------------------------------------------------------------------
def test_start_and_end_reach_the_tracker(run: Any, plugin: ProbePlugin) -> None:
    assert run(None, "+proposer=ngram") == (0, "")
    (started,) = plugin.tracker.started
    assert started.task == "probe"
    assert started.name == "probe: ngram on probe"
    assert started.config["proposer"]["name"] == "ngram"
    assert started.output_dir == plugin.contexts[0].output_dir
    assert "+proposer=ngram" in started.facts["overrides"]
    for name in ("specflow", "torch", "transformers", "python", "platform", "launch_dir", "plugin throw-away"):
        assert started.facts[name]
    assert plugin.tracker.finished == [RunFinished("finished", metrics={"speedup": 2.0})]


def test_components_are_built_on_request_from_checked_options(run: Any, plugin: ProbePlugin) -> None:
    built: list[Any] = []

    def behave(context: TaskContext) -> RunFinished:
        built.extend([context.build("target"), context.build("sampler"), context.build("proposer")])
        return RunFinished("finished")

    assert run(behave, "target.level=7")[0] == 0
    assert built[0].level == 7
    assert type(built[1]).__name__ == "StandardSampler"
    assert built[2] is None


def test_listeners_are_gone_after_the_run(run: Any, registry: Registry, plugin: ProbePlugin) -> None:
    run()
    run(raising(ValueError("x")))
    registry.hooks.specflow_run_finished(event=RunFinished("stray"))
    assert [event.status for event in plugin.tracker.finished] == ["finished", "failed"]


def test_display_and_report_take_part(plugin: ProbePlugin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with load_plugins(only="").temporary(plugin) as registry:
        assert cli.main(["+experiment=probe"], registry) == 0
    record = json.loads((plugin.contexts[0].output_dir / "run.json").read_text())
    assert record["status"] == "finished"


# -- failures ------------------------------------------------------------------------------------------------------
def test_an_error_for_the_user(run: Any, plugin: ProbePlugin) -> None:
    code, err = run(raising(ConfigError("K is beyond the context.")))
    assert (code, err) == (2, "error: K is beyond the context.\n")
    assert heard(plugin) == (["first"], "failed", "K is beyond the context.")


def test_a_fault_is_saved_with_its_traceback(run: Any, plugin: ProbePlugin) -> None:
    code, err = run(raising(RuntimeError("wrong shape")))
    log = plugin.contexts[0].output_dir / ERROR_LOG
    assert code == 1
    assert "unexpected RuntimeError: wrong shape" in err
    assert str(log) in err
    assert "Traceback" not in err
    assert "Traceback" in log.read_text()
    assert "raise error" in log.read_text()
    assert heard(plugin)[1] == "failed"


def test_a_task_may_fail_together_with_its_results(run: Any, plugin: ProbePlugin) -> None:
    code, err = run(lambda context: RunFinished("failed", "acceptance length 1.2 is not above 1.5.", {"length": 1.2}))
    assert (code, err) == (1, "error: acceptance length 1.2 is not above 1.5.\n")
    assert plugin.tracker.finished[0].metrics == {"length": 1.2}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_while_saving(run: Any, plugin: ProbePlugin, number: int) -> None:
    code, err = run(raising(OSError(number, "No space left on device", "/results/rows.jsonl")))
    assert code == 1
    assert "the disk is full: /results/rows.jsonl" in err
    assert "hydra.run.dir" in err
    rows, status, reason = heard(plugin)
    assert (rows, status) == (["first"], "failed")
    assert "disk is full" in str(reason)


def test_a_full_disk_wrapped_in_another_error(run: Any) -> None:
    def behave(context: TaskContext) -> RunFinished:
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError as error:
            raise OSError("could not write plot") from error

    assert "the disk is full" in run(behave)[1]


def test_an_unwritable_folder_is_refused_before_the_task(run: Any, plugin: ProbePlugin, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    code, err = run(None, f"hydra.run.dir={tmp_path}/file")
    assert code == 1
    assert "cannot write results" in err
    assert plugin.contexts == []
    assert plugin.tracker.started == []


def test_a_folder_that_becomes_unwritable(run: Any, plugin: ProbePlugin) -> None:
    def behave(context: TaskContext) -> RunFinished:
        raise PermissionError(errno.EACCES, "Permission denied", str(context.output_dir / "rows.jsonl"))

    assert "cannot write results (Permission denied)" in run(behave)[1]


def test_a_tracker_that_cannot_start_fails_the_run(run: Any, plugin: ProbePlugin) -> None:
    class Unreachable(Recorder):
        @hookimpl
        def specflow_run_started(self, event: RunStarted) -> None:
            raise ConnectionError("no server")

    plugin.tracker = Unreachable()
    code, err = run()
    assert code == 1
    assert "no server" in err
    assert plugin.contexts == []
    assert plugin.tracker.finished[0].status == "failed"


def test_trouble_while_closing_is_told_but_does_not_hide_the_error(run: Any, plugin: ProbePlugin) -> None:
    class Clumsy(Recorder):
        @hookimpl
        def specflow_run_finished(self, event: RunFinished) -> None:
            raise ValueError("cannot close")

    plugin.tracker = Clumsy()
    code, err = run(raising(ProposerError("token 3 differs.")))
    assert code == 1
    assert err.splitlines()[0] == "error: token 3 differs."
    assert "cannot close" in err
    code, err = run(lambda context: RunFinished("finished"))
    assert code == 1
    assert "cannot close" in err


# -- interruption --------------------------------------------------------------------------------------------------
def test_a_keyboard_interrupt_keeps_rows_and_marks_the_run_killed(run: Any, plugin: ProbePlugin) -> None:
    code, err = run(raising(KeyboardInterrupt()))
    assert code == 130
    assert err.splitlines()[0] == "interrupted"
    assert f"kept in {plugin.contexts[0].output_dir}" in err
    assert heard(plugin) == (["first"], "killed", "interrupted")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_kills_the_run_in_order(run: Any, plugin: ProbePlugin, number: signal.Signals) -> None:
    def behave(context: TaskContext) -> RunFinished:
        context.hooks.specflow_request_finished(row=make_row("first"))
        os.kill(os.getpid(), number)
        time.sleep(10)
        return RunFinished("finished")

    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    code, _ = run(behave)
    assert code == 130
    assert heard(plugin) == (["first"], "killed", f"stopped by {number.name}")
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_a_task_that_returns_killed_ends_as_interrupted(run: Any, plugin: ProbePlugin) -> None:
    assert run(lambda context: RunFinished("killed", "stopped", {"done": 1.0}))[0] == 130
    assert plugin.tracker.finished[0].metrics == {"done": 1.0}


def test_an_interrupt_ends_a_sweep(run: Any, plugin: ProbePlugin) -> None:
    assert run(raising(KeyboardInterrupt()), "-m", "task.level=1,2,3")[0] == 130
    assert len(plugin.contexts) == 1


def test_the_second_signal_ends_a_process_that_hangs_while_closing() -> None:
    child = os.fork()
    if child == 0:
        try:
            with interruptible():
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(10)
        except KeyboardInterrupt:
            pass
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    child = os.fork()
    if child == 0:
        with interruptible():
            try:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(10)
            except KeyboardInterrupt:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(10)
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGINT


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen: list[Any] = []

    def work() -> None:
        with interruptible():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]


# -- the objective -------------------------------------------------------------------------------------------------
def test_the_objective_is_the_metric_named() -> None:
    metrics = {"acceptance_rate": 0.5, "speedup": 1.7}
    assert objective(metrics, "acceptance_rate") == 0.5
    assert objective(metrics, None) == 1.7
    assert objective({"tokens_per_second": 3.0}, None) == 3.0
    assert objective({}, None) is None
    with pytest.raises(ConfigError, match=r"acceptance_rat.*Did you mean acceptance_rate"):
        objective(metrics, "acceptance_rat")


def test_an_unknown_objective_fails_the_command(run: Any) -> None:
    code, err = run(None, "objective=spedup")
    assert code == 2
    assert "Did you mean speedup" in err


def test_every_error_class_has_its_exit_code() -> None:
    assert SpecflowError.exit_code == 1
    assert ConfigError.exit_code == 2
