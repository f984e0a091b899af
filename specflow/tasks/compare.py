"""`task=compare`: what two runs asked for differently, what came out differently, and what of it is noise."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from specflow.errors import ConfigError, StorageError
from specflow.plugins.component import Kind
from specflow.report.comparison import compare
from specflow.report.comparison_view import render_comparison
from specflow.report.stored import records_of
from specflow.report.table import WIDTH
from specflow.tasks.base import Task, TaskContext
from specflow.tasks.report import store_of
from specflow.tracking.events import RunFinished

if TYPE_CHECKING:
    from specflow.plugins.registry import Registry

__all__ = ["CompareOptions", "CompareTask"]


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Options of `task=compare`."""

    runs: tuple[str, ...] = ()  # two runs: folders or MLflow run ids
    output: Path | None = None  # JSON file with the comparison; None = print it only


class CompareTask(Task):
    """Prints how the second run differs from the first."""

    name = "compare"
    needs = (Kind.TRACKING,)
    tracked = False

    def __init__(self, options: CompareOptions) -> None:
        self.options = options

    def check(self, config: Mapping[str, Any], registry: "Registry") -> None:
        """See `Task.check`."""
        if len(self.options.runs) != 2:
            raise ConfigError(
                f"task.runs={list(self.options.runs)} must be two runs: task.runs=[FOLDER_OR_RUN_ID,FOLDER_OR_RUN_ID]."
            )

    def run(self, context: TaskContext) -> RunFinished:
        """See `Task.run`. Raises `ConfigError` when a name stands for another number of runs than one."""
        store = store_of(context)
        found = []
        for name in self.options.runs:
            records = records_of([name], None, store)
            if len(records) != 1:
                raise ConfigError(
                    f"{name} is a sweep of {len(records)} runs: name two of them (task=report shows all)."
                )
            found += records
        comparison = compare(*found)
        console = Console()
        render_comparison(comparison, console if console.is_terminal else Console(width=WIDTH))
        if self.options.output is not None:
            _save(comparison.to_dict(), self.options.output)
        return RunFinished("finished")


def _save(data: Mapping[str, Any], file: Path) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(data, indent=1, ensure_ascii=False), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write the comparison: {file}: {error.strerror or error}") from error
