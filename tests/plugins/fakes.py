"""Throw-away plugins: distributions on disk for entry points, and a whole fake composition for runs of no time."""

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specflow.plugins import Component, Kind, hookimpl
from specflow.tasks.base import Task, TaskContext
from specflow.tracking.events import RequestRow, RunFinished, RunStarted


def write_distribution(
    folder: Path, name: str, module_text: str, entry_points: dict[str, str] | None = None, version: str = "1.5"
) -> Path:
    """An installed distribution `name` with one module of the same name; `folder` has to be on sys.path."""
    module = name.replace("-", "_")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{module}.py").write_text(textwrap.dedent(module_text))
    info = folder / f"{module}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    points = {name: module} if entry_points is None else entry_points
    lines = "".join(f"{point} = {value}\n" for point, value in points.items())
    (info / "entry_points.txt").write_text(f"[specflow]\n{lines}")
    return folder


@dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    """Options of every fake component."""

    limit: int | None = None
    level: int = 1


def make_row(text: str) -> RequestRow:
    """A finished request with this text."""
    return RequestRow("plain", "plain", 1, 0, text, 3, 2, "length", 0.1, 0.2, (0.1,), 0, 0, 0, (1, 2), text)


@dataclass(eq=False)
class Recorder:
    """A listener that remembers what it heard."""

    started: list[RunStarted] = field(default_factory=list)
    rows: list[RequestRow] = field(default_factory=list)
    finished: list[RunFinished] = field(default_factory=list)

    @hookimpl
    def specflow_run_started(self, event: RunStarted) -> None:
        self.started.append(event)

    @hookimpl
    def specflow_request_finished(self, row: RequestRow) -> None:
        self.rows.append(row)

    @hookimpl
    def specflow_run_finished(self, event: RunFinished) -> None:
        self.finished.append(event)


class ProbePlugin:
    """Provides target, workload, task and tracking called `probe`, and `+experiment=probe` that chooses all of them.

    behave: the body of the task. tracker: the listener of the run.
    """

    def __init__(
        self, folder: Path, behave: Callable[[TaskContext], RunFinished] | None = None, tracked: bool = True
    ) -> None:
        self.tracker = Recorder()
        self.contexts: list[TaskContext] = []
        self._folder = folder
        self._behave = behave or (lambda context: RunFinished("finished", metrics={"speedup": 2.0}))
        self._tracked = tracked
        _write_configs(folder)

    def _task(self) -> type[Task]:
        plugin = self

        class ProbeTask(Task):
            """Does what the test says."""

            name = "probe"
            needs = (Kind.TARGET,)
            tracked = plugin._tracked

            def __init__(self, options: ProbeOptions) -> None:
                self.options = options

            def run(self, context: TaskContext) -> RunFinished:
                plugin.contexts.append(context)
                return plugin._behave(context)

        return ProbeTask

    def _component(self, factory: Callable[..., Any]) -> Sequence[Component]:
        return [Component("probe", factory, ProbeOptions, "a fake for tests")]

    @hookimpl
    def specflow_tasks(self) -> Sequence[Component]:
        return self._component(self._task())

    @hookimpl
    def specflow_trackers(self) -> Sequence[Component]:
        return self._component(lambda options: self.tracker)

    @hookimpl
    def specflow_targets(self) -> Sequence[Component]:
        return self._component(lambda options: options)

    @hookimpl
    def specflow_workloads(self) -> Sequence[Component]:
        return self._component(lambda options: options)

    @hookimpl
    def specflow_config_dirs(self) -> Sequence[Path]:
        return [self._folder]


def _write_configs(folder: Path) -> None:
    for group in ("task", "tracking", "target", "workload"):
        file = folder / group / "probe.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("name: probe\nlimit: null\nlevel: 1\n")
    overrides = "".join(f"  - override /{group}: probe\n" for group in ("task", "tracking", "target", "workload"))
    file = folder / "experiment" / "probe.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"# @package _global_\n# Fakes only.\ndefaults:\n{overrides}")
