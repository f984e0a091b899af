"""Contract of a task: what one run does with its composition."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specflow.plugins.component import Kind
from specflow.tracking.events import RunFinished

if TYPE_CHECKING:
    from specflow.plugins.registry import Registry
    from specflow.tasks.baselines import Baselines


@dataclass(frozen=True)
class TaskContext:
    """What a task may use. Components are built on request, all options having been checked before."""

    config: Mapping[str, Any]  # resolved composition, plain containers
    output_dir: Path
    build: Callable[[Kind], Any]  # builds the composition's component of that kind; None for an absent proposer
    hooks: Any  # relay of the life cycle: hooks.specflow_step_finished(record=…) and so on
    facts: Mapping[str, str]
    registry: "Registry | None" = None  # for tasks that are about the plugins themselves
    baselines: "Baselines | None" = None  # of the sweep that the run is a part of; None: measure everything here


class Task(ABC):
    """One thing specflow can do. Returns how the run ended; raises `SpecflowError` for what the user can mend."""

    name: str = "task"
    needs: tuple[Kind, ...] = ()  # kinds whose options are checked before the task starts
    checks_itself: tuple[Kind, ...] = ()  # kinds whose options `check` looks at, because the task fills some of them in
    tracked: bool = True  # False: no output folder, no tracker (listing commands)
    keeps_target: bool = False  # True: it leaves the target as it was, so the next job of a sweep may use it again

    def check(self, config: Mapping[str, Any], registry: "Registry") -> None:
        """Whether the composition fits the task, before anything is loaded. Raises `ConfigError`."""

    @abstractmethod
    def run(self, context: TaskContext) -> RunFinished:
        """Do it."""
