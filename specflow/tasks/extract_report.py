"""What `task=extract` shows: a bar while it runs, a table at the end."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from specflow.capture.writer import AsyncWriter
from specflow.core.layer_numbers import CONVENTION

__all__ = ["ExtractProgress", "ExtractSummary"]

_QUIET_SECONDS = 2.0  # a shorter run shows nothing
_REFRESH_SECONDS = 0.5


class ExtractProgress:
    """Requests done and tokens per second, drawn in the terminal once the run is two seconds old."""

    def __init__(self, total: int, console: Console | None = None) -> None:
        self._console = console or Console()
        self._total, self._done, self._tokens = total, 0, 0
        self._begun = self._drawn = time.monotonic()
        self._display: Progress | None = None

    def step(self, num_tokens: int) -> None:
        """The target has processed tokens."""
        self._tokens += num_tokens
        now = time.monotonic()
        if now - self._begun >= _QUIET_SECONDS and now - self._drawn >= _REFRESH_SECONDS and self._console.is_terminal:
            self._drawn = now
            self._draw(now)

    def finish(self) -> None:
        """A request has ended."""
        self._done += 1

    def _draw(self, now: float) -> None:
        if self._display is None:
            columns = (
                TextColumn("hidden states"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.description}", style="dim"),
                TimeRemainingColumn(compact=True),
            )
            # No thread of its own: it would draw in the middle of a step.
            self._display = Progress(*columns, console=self._console, auto_refresh=False)
            self._display.add_task("", total=self._total)
            self._display.start()
        speed = f"{self._tokens / (now - self._begun):.0f} tok/s"
        self._display.update(self._display.task_ids[0], completed=self._done, description=speed, refresh=True)

    def __enter__(self) -> "ExtractProgress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._display is not None:
            self._draw(time.monotonic())
            self._display.stop()


@dataclass(frozen=True)
class ExtractSummary:
    """The result of one extraction."""

    saved: int
    already_there: int
    aborted: int
    tokens: int
    bytes: int
    seconds: float
    waited_seconds: float
    folder: Path
    notes: Sequence[str]

    @classmethod
    def of(
        cls, writer: AsyncWriter, already_there: int, aborted: int, seconds: float, folder: Path, notes: Sequence[str]
    ) -> "ExtractSummary":
        """From a writer that is done."""
        counts = (writer.num_tokens, writer.num_bytes, seconds, writer.waited_seconds)
        return cls(writer.num_files, already_there, aborted, *counts, folder, notes)

    @property
    def tokens_per_second(self) -> float:
        """Saved tokens by wall time, writing included."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def metrics(self) -> dict[str, float]:
        """Numbers for the tracker."""
        return {
            "extract.requests": float(self.saved),
            "extract.requests_already_there": float(self.already_there),
            "extract.requests_aborted": float(self.aborted),
            "extract.tokens": float(self.tokens),
            "extract.bytes": float(self.bytes),
            "extract.tokens_per_second": self.tokens_per_second,
            "extract.waited_for_disk_seconds": self.waited_seconds,
        }

    def print(self, layers: Sequence[int], console: Console | None = None) -> None:
        """The table."""
        console = console or Console()
        table = Table(title="hidden states", title_justify="left", box=None, show_header=False, padding=(0, 1))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in self._lines(layers):
            table.add_row(name, value)
        console.print(table, highlight=False)

    def _lines(self, layers: Sequence[int]) -> list[tuple[str, str]]:
        requests = f"{self.saved} saved"
        if self.already_there:
            requests += f", {self.already_there} were there already"
        if self.aborted:
            requests += f", {self.aborted} aborted and not saved"
        lines = [
            ("requests", requests),
            ("tokens", f"{self.tokens:,}"),
            ("bytes", f"{self.bytes:,} ({self.bytes / 2**20:.1f} MiB)"),
            ("tokens/s", f"{self.tokens_per_second:,.0f} ({self.waited_seconds:.1f} s waiting for the disk)"),
            ("layers", f"{', '.join(map(str, layers))} ({CONVENTION})"),
            ("folder", str(self.folder)),
        ]
        return lines + [("note", note) for note in self.notes]
