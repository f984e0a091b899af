"""`task=train`: train a drafting head for the target, stage by stage, and show how it goes."""

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from specflow.errors import ConfigError
from specflow.plugins.component import TRAINABLE_HEAD, Kind
from specflow.plugins.registry import Registry
from specflow.tasks.base import Task, TaskContext
from specflow.tracking.events import Point, RunFinished
from specflow.training.train_options import TrainOptions
from specflow.words import did_you_mean, valid_names
from specflow.workloads.rows import absolute

__all__ = ["TrainDisplay", "TrainTask"]

_LINE_SECONDS = 10.0  # between lines about progress where there is no terminal


class TrainTask(Task):
    """Responses of the target, its hidden states, a trained head and what the engine makes of it, in `task.output`."""

    name = "train"
    needs = (Kind.TARGET, Kind.PROPOSER, Kind.SAMPLER, Kind.SCHEDULER, Kind.BACKEND, Kind.WORKLOAD)
    checks_itself = (Kind.PROPOSER,)  # its path is the folder of the trained head

    def __init__(self, options: TrainOptions) -> None:
        self.options = options

    def check(self, config: Mapping[str, Any], registry: Registry) -> None:
        """See `Task.check`: a proposer that can be trained, and options that its head understands."""
        from specflow.training.closed_loop import proposer_node  # here: loads torch

        node = config.get(Kind.PROPOSER)
        heads = registry.components(TRAINABLE_HEAD)
        if node is None:
            raise ConfigError(
                f"task=train needs a head to train: add +proposer=NAME, one of: {valid_names('', heads)}."
            )
        name = str(node.get("name"))
        if name not in heads:
            hint = did_you_mean(name, heads)
            raise ConfigError(
                f"+proposer={name}: task=train cannot train it.{hint} It trains: {valid_names(name, heads)}."
            )
        registry.get(TRAINABLE_HEAD, name).check(self.options.head, "task.head")
        component = registry.get(Kind.PROPOSER, name)
        component.check(proposer_node(node, component.load_options(), absolute(self._output(name)), None))

    def _output(self, method: str) -> str:
        return self.options.output or f"runs/train/{method}"

    def run(self, context: TaskContext) -> RunFinished:
        """See `Task.run`. What is finished stays, however the run ends; the same command goes on from there."""
        from specflow.training.processes import Processes
        from specflow.training.training_parts import TrainingParts
        from specflow.training.training_run import TrainingRun

        assert context.registry is not None
        processes = Processes.from_environment()
        parts = TrainingParts(
            options=self.options,
            config=context.config,
            build=context.build,
            registry=context.registry,
            output=absolute(self._output(str(context.config[Kind.PROPOSER]["name"]))),
            processes=processes,
        )
        with TrainDisplay(context.hooks, quiet=not processes.first) as display:
            run = TrainingRun(parts, display)
            run.run()
        processes.leave()
        return RunFinished("finished", metrics=run.metrics)


class TrainDisplay:
    """One bar per stage on a terminal, a line now and then elsewhere; points of curves go to the listeners."""

    def __init__(self, hooks: Any, quiet: bool = False, console: Console | None = None) -> None:
        self._hooks, self._quiet = hooks, quiet
        self._console = console or Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[text]}"))
        # No thread of its own: it would draw in the middle of a step.
        self._bars = Progress(*columns, TimeRemainingColumn(compact=True), console=self._console, auto_refresh=False)
        self._tasks: dict[str, TaskID] = {}
        self._drawn = time.monotonic()

    def progress(self, stage: str, done: int, total: int, text: str = "") -> None:
        """See `Display.progress`; drawn a few times a second at most."""
        terminal, now = self._console.is_terminal, time.monotonic()
        if self._quiet or (now - self._drawn < (0.2 if terminal else _LINE_SECONDS) and done < total):
            return
        self._drawn = now
        if not terminal:
            self.say(f"{stage}: {done:,} of {total:,} {text}".rstrip())
            return
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, text="")
        self._bars.update(self._tasks[stage], completed=done, total=total, text=text, refresh=True)

    def say(self, line: str) -> None:
        """See `Display.say`."""
        if not self._quiet:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def points(self, step: int, values: Mapping[str, float]) -> None:
        """See `Display.points`."""
        self._hooks.specflow_points_measured(points=[Point(name, value, step) for name, value in values.items()])

    def __enter__(self) -> "TrainDisplay":
        if self._console.is_terminal and not self._quiet:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()
