"""Progress while a run lasts."""

import time
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from specflow.metrics.acceptance import AcceptanceCounts
from specflow.plugins.hookspecs import hookimpl
from specflow.report import wording
from specflow.tracking.events import RequestRow, RunFinished, RunStarted, Series, StepRecord

__all__ = ["ProgressDisplay"]

_QUIET_SECONDS = 2.0  # a shorter run shows nothing
_REFRESH_SECONDS = 0.5  # a refresh takes milliseconds; more of them would show in the measurement


@dataclass
class _Bar:
    """One method at one batch size, through all its repeats, which may alternate with those of other bars."""

    series: Series
    tokens: int = 0
    unused: int = 0  # tokens that requests which ended early did not need
    seconds: float = 0.0
    acceptance: AcceptanceCounts = field(default_factory=AcceptanceCounts)
    task: TaskID | None = None

    @property
    def is_last_repeat(self) -> bool:
        return self.series.repeat + 1 >= self.series.num_repeats

    def title(self) -> str:
        series = self.series
        if series.warmup:
            return f"warm-up {series.method}"
        return f"{series.method}, batch {series.batch_size}"

    def numbers(self) -> str:
        """Throughput and acceptance so far."""
        speed = f"{wording.count(self.tokens / self.seconds)} tok/s" if self.seconds else "…"
        rate = self.acceptance.acceptance_rate
        return speed if rate is None else f"{speed} · {wording.percent(rate)} accepted"


class ProgressDisplay:
    """One bar per series with tokens per second and acceptance so far; on anything but a terminal one line per series.

    A series is one method at one batch size with all its repeats.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._begun = time.monotonic()
        self._drawn = 0.0
        self._display: Progress | None = None
        self._bars: dict[tuple[str, int, bool], _Bar] = {}
        self._bar: _Bar | None = None
        self._held: list[str] = []  # lines of a run that is still too short to show anything

    # -- hooks -----------------------------------------------------------------------------------------------------
    @hookimpl
    def specflow_run_started(self, event: RunStarted) -> None:
        """Start the clock."""
        self._begun = time.monotonic()

    @hookimpl
    def specflow_series_started(self, series: Series) -> None:
        """Begin a bar, or go on with the one of the same method and batch size."""
        self._leave_bar()
        key = (series.method, series.batch_size, series.warmup)
        self._bar = self._bars.setdefault(key, _Bar(series))
        self._bar.series = series

    @hookimpl
    def specflow_step_finished(self, record: StepRecord) -> None:
        """Count a step; now and then draw."""
        if self._bar is None:
            return
        self._bar.tokens += record.num_emitted
        self._bar.seconds += record.total_seconds
        self._bar.acceptance.add_all(record.drafted, record.accepted)
        if time.monotonic() - self._drawn >= _REFRESH_SECONDS:
            self._draw(self._bar)

    @hookimpl
    def specflow_request_finished(self, row: RequestRow) -> None:
        """A request that ended early will not use the rest of its tokens."""
        if self._bar is not None:
            self._bar.unused += max(0, self._bar.series.max_tokens - row.output_tokens)

    @hookimpl(tryfirst=True)
    def specflow_run_finished(self, event: RunFinished) -> None:
        """End the last bar and leave the terminal to the report."""
        self._leave_bar()
        self._bar = None
        if self._display is not None:
            self._display.stop()
            self._display = None

    # -- drawing ---------------------------------------------------------------------------------------------------
    @property
    def _is_long(self) -> bool:
        return time.monotonic() - self._begun >= _QUIET_SECONDS

    def _leave_bar(self) -> None:
        """Another series begins, or none."""
        bar = self._bar
        if bar is None:
            return
        if bar.series.warmup:
            if self._display is not None and bar.task is not None:
                self._display.remove_task(bar.task)
                bar.task = None
        elif self._console.is_terminal:
            self._draw(bar)
        elif bar.is_last_repeat:
            self._say(f"{bar.title()}: {bar.numbers()}")

    def _say(self, line: str) -> None:
        self._held.append(line)
        if self._is_long:
            for held in self._held:
                self._console.print(held, highlight=False)
            self._held.clear()

    def _draw(self, bar: _Bar) -> None:
        """Draw a bar; nothing without a terminal or before the run is long enough."""
        self._drawn = time.monotonic()
        if not (self._console.is_terminal and self._is_long):
            return
        if self._display is None:
            self._display = _new_display(self._console)
            self._display.start()
        if bar.task is None:
            bar.task = self._display.add_task("", numbers="")
        series = bar.series
        self._display.update(
            bar.task,
            description=bar.title(),
            total=series.num_requests * series.max_tokens * series.num_repeats or None,
            completed=bar.tokens + bar.unused,
            numbers=bar.numbers(),
        )
        self._display.refresh()


def _new_display(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[numbers]}", style="dim"),
        TimeRemainingColumn(compact=True),
    )
    # No thread of its own: it would draw in the middle of a step.
    return Progress(*columns, console=console, auto_refresh=False)
