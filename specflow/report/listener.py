"""The report as a listener: rows while the run lasts, everything else at its end."""

import json
from typing import Any

import yaml
from rich.console import Console
from rich.text import Text

from specflow.errors import StorageError
from specflow.metrics.exposition import ServedRequests, exposition
from specflow.metrics.summary import BenchSummary
from specflow.plugins.hookspecs import hookimpl
from specflow.report import wording
from specflow.report.html import Page, draw_pictures, render_page
from specflow.report.table import WIDTH, render_summary
from specflow.tracking.events import RequestRow, RunFinished, RunStarted, Series
from specflow.tracking.rows import RowWriter

__all__ = ["ReportWriter"]


class ReportWriter:
    """Writes run.json, config.yaml and requests.jsonl for every run, and for one that has a `BenchSummary` also
    summary.json, metrics.prom, acceptance.png, throughput.png and report.html; then prints the table.

    Trackers come after it: they take the files along.
    """

    def __init__(self, console: Console | None = None, brief: bool = False) -> None:
        """brief: print a line instead of the table, for runs of a sweep."""
        self._console = console or _default_console()
        self._brief = brief
        self._event: RunStarted | None = None
        self._rows: RowWriter | None = None
        self._series: list[Series] = []
        self._served = ServedRequests()

    # -- hooks -----------------------------------------------------------------------------------------------------
    @hookimpl
    def specflow_run_started(self, event: RunStarted) -> None:
        """Record what runs."""
        self._event, self._series, self._served = event, [], ServedRequests()
        self._rows = RowWriter(event.output_dir)
        if not (event.output_dir / "config.yaml").exists():
            self._save("config.yaml", yaml.safe_dump(dict(event.config), sort_keys=False, allow_unicode=True))
        self._save_record("running", None)

    @hookimpl
    def specflow_series_started(self, series: Series) -> None:
        """Remember what was run, warm-ups included."""
        self._series.append(series)

    @hookimpl
    def specflow_request_finished(self, row: RequestRow) -> None:
        """Keep a row; those of warm-ups are no results."""
        if self._rows is not None and not (self._series and self._series[-1].warmup):
            self._rows.write(row)
            self._served.add(row)

    @hookimpl
    def specflow_run_finished(self, event: RunFinished) -> None:
        """Write and print the report."""
        if self._event is None or self._rows is None:
            return
        self._rows.close()
        self._save_record(event.status, event.reason)
        if isinstance(event.summary, BenchSummary):
            self._save_report(event.summary, event.status)
            self._print(event.summary)

    # -- files -----------------------------------------------------------------------------------------------------
    def _save_record(self, status: str, reason: str | None) -> None:
        """run.json: how the run ended, in which surroundings, and what was warmed up before the measurement."""
        assert self._event is not None
        warmups = [series for series in self._series if series.warmup]
        record = {
            "name": self._event.name,
            "task": self._event.task,
            "status": status,
            "reason": reason,
            "warmup_series": len(warmups),
            "warmup_requests": sum(series.num_requests for series in warmups),
            "facts": dict(self._event.facts),
        }
        self._save("run.json", _json(record))

    def _save_report(self, summary: BenchSummary, status: str) -> None:
        assert self._event is not None
        assert self._rows is not None
        self._save("summary.json", _json(summary.to_dict()))
        self._save("metrics.prom", exposition(summary, self._served, _model_name(summary)))
        pictures = draw_pictures(summary)
        for picture in pictures:
            self._save(picture.file, picture.light)
        page = Page(summary, self._event.config, self._event.facts, self._rows.path, status, pictures)
        self._save("report.html", render_page(page))

    def _save(self, name: str, content: str | bytes) -> None:
        """Write a file of the run's folder whole or not at all. Raises `StorageError`."""
        assert self._event is not None
        path = self._event.output_dir / name
        partial = path.with_name(f".{name}.partial")
        try:
            partial.write_bytes(content.encode() if isinstance(content, str) else content)
            partial.replace(path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise StorageError(
                f"cannot write the report: {path}: {error.strerror or error}\n"
                "Free space or rights there, or choose another folder: hydra.run.dir=FOLDER"
            ) from error

    def _print(self, summary: BenchSummary) -> None:
        assert self._event is not None
        if self._brief:
            self._console.print(Text(wording.in_a_line(summary)), soft_wrap=True)
            return
        render_summary(summary, self._console)
        page = wording.short_path(self._event.output_dir / "report.html", self._event.facts.get("launch_dir"))
        line = Text.assemble(("report: ", "dim"), page)
        self._console.print(line, soft_wrap=True)


def _model_name(summary: BenchSummary) -> str:
    """The target as the run itself names it, for the label `model_name`."""
    return summary.really_ran.get("target", {}).get("target", "unknown").partition(" ")[0]


def _default_console() -> Console:
    """Standard output; a file or pipe has no width of its own and gets the table's."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


def _json(data: Any) -> str:
    return json.dumps(data, indent=1, ensure_ascii=False, default=str, allow_nan=False)
