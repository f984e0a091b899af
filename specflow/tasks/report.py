"""`task=report`: finished runs on one page, whatever made them and wherever they are."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from specflow.errors import ConfigError
from specflow.plugins.component import Kind
from specflow.report import wording
from specflow.report.overview import Overview, write_overview
from specflow.report.overview_table import render_overview
from specflow.report.stored import records_of
from specflow.tasks.base import Task, TaskContext
from specflow.tracking.events import RunFinished
from specflow.tracking.store_uri import refuse_file_store, resolve_uri

if TYPE_CHECKING:
    from specflow.plugins.registry import Registry

__all__ = ["ReportOptions", "ReportTask", "store_of"]


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Options of `task=report`."""

    runs: tuple[str, ...] = ()  # folders of runs or sweeps, or MLflow run ids; a sweep stands for its jobs
    experiment: str | None = None  # every run of this MLflow experiment
    title: str | None = None  # headline of the page; None = what it was made from
    output: Path = Path("report")  # folder for page, tables and plots, made if need be


class ReportTask(Task):
    """Reads runs and writes the page that a sweep writes about its jobs."""

    name = "report"
    needs = (Kind.TRACKING,)
    tracked = False

    def __init__(self, options: ReportOptions) -> None:
        self.options = options

    def check(self, config: Mapping[str, Any], registry: "Registry") -> None:
        """See `Task.check`."""
        if not self.options.runs and self.options.experiment is None:
            raise ConfigError(
                "task=report needs runs: task.runs=[FOLDER_OR_RUN_ID,…], or task.experiment=NAME of the tracker."
            )

    def run(self, context: TaskContext) -> RunFinished:
        """See `Task.run`. Raises `ConfigError` when there is nothing to show."""
        options = self.options
        records = records_of(options.runs, options.experiment, store_of(context))
        if not records:
            raise ConfigError(f"task.experiment={options.experiment} has no runs yet.")
        sources = [*options.runs, *([f"experiment {options.experiment}"] if options.experiment else [])]
        overview = Overview(options.title or f"{len(records)} runs", records, f"from {', '.join(sources)}")
        page = write_overview(overview, options.output)
        console = Console()
        render_overview(overview, console)
        console.print(f"report: {wording.short_path(page)}", soft_wrap=True, highlight=False)
        return RunFinished("finished", metrics={"runs": float(len(records))})


def store_of(context: TaskContext) -> str | None:
    """Address of the MLflow store that the composition's tracker writes to; None for another tracker."""
    tracking = context.config[Kind.TRACKING]
    if tracking.get("name") != "mlflow":
        return None
    refuse_file_store(tracking.get("uri"))
    return resolve_uri(tracking.get("uri"), Path.cwd())
