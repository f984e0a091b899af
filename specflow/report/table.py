"""The summary on the terminal, made to fit 100 columns."""

from collections.abc import Iterator, Mapping
from itertools import groupby

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from specflow.metrics.summary import BenchSummary, SeriesSummary
from specflow.report import wording

__all__ = ["WIDTH", "render_summary", "summary_table"]

WIDTH = 100
_COLUMNS = (  # heading, what stands below it, alignment
    ("method", "", "left"),
    ("batch", "", "right"),
    ("tokens", "per s", "right"),
    ("speed-", "up", "right"),
    ("accept.", "rate", "right"),
    ("accept.", "length", "right"),
    ("draft/", "verify/\nother %", "right"),
    ("TTFT ms", "p50", "right"),
    ("ITL ms", "p50 / p99", "right"),
    ("peak", "memory", "right"),
)
_WIDE_ONLY = ("TTFT ms", "peak")


def render_summary(summary: BenchSummary, console: Console) -> None:
    """Print everything: table, rates per position, warnings, verdict, what really ran, cost curve."""
    console.print(Group(*_parts(summary, console.width)), width=min(WIDTH, console.width))


def _parts(summary: BenchSummary, width: int) -> Iterator[RenderableType]:
    yield summary_table(summary, narrow=width < WIDTH)
    yield from _position_lines(summary)
    for warning in wording.warnings(summary):
        yield Text(warning, style="yellow")
    yield Text(summary.lossless.sentence(), style=f"bold {wording.VERDICT_COLOURS[summary.lossless.status]}")
    if summary.cost_curve:
        yield _cost_curve(summary)
    if summary.really_ran or summary.workload:
        yield _really_ran({**summary.really_ran, "workload": summary.workload})


def summary_table(summary: BenchSummary, narrow: bool = False) -> Table:
    """One row per method and batch size; a narrow table leaves out the columns in `_WIDE_ONLY`."""
    name = Text(summary.name, style="bold")
    if summary.lossy:
        name.append("  LOSSY", style="bold red")
    table = Table(title=name, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True)
    shown = [index for index, (heading, _, _) in enumerate(_COLUMNS) if not (narrow and heading in _WIDE_ONLY)]
    for heading, unit, side in (_COLUMNS[index] for index in shown):
        # Only the name may wrap: it gives way before a number is cut.
        title = f"{heading}\n{unit}" if unit else heading
        table.add_column(title, justify=side, no_wrap=heading != "method", overflow="fold")  # type: ignore[arg-type]
    for _, group in groupby(summary.series, key=lambda series: series.batch_size):
        rows = list(group)
        for series in rows:
            cells = _cells(series, summary.lossy)
            table.add_row(*(cells[index] for index in shown), end_section=series is rows[-1])
    return table


def _cells(series: SeriesSummary, lossy: bool) -> list[Text]:
    counts, is_plain = series.acceptance, series.is_plain
    name = Text(series.method)
    if not is_plain and (lossy or series.lossy):
        name.append(" LOSSY", style="bold red")
    itl = f"{wording.milliseconds(series.itl.p50)} / {wording.milliseconds(series.itl.p99)}"
    return [
        name,
        Text(str(series.batch_size)),
        Text(wording.count(series.tokens_per_second)),
        Text("1.00×", style="dim") if is_plain else _speedup(series.speedup),
        Text("–", style="dim") if is_plain else Text(wording.percent(counts.acceptance_rate)),
        Text("–", style="dim") if is_plain else Text(wording.count(counts.mean_acceptance_length, 2)),
        Text(wording.shares(series.shares)),
        Text(wording.milliseconds(series.ttft.p50)),
        Text(itl),
        Text(wording.memory(series.peak_memory_bytes)),
    ]


def _speedup(value: float | None) -> Text:
    style = "dim" if value is None else "bold green" if value >= 1 else "yellow"
    return Text(wording.times(value), style=style)


def _position_lines(summary: BenchSummary) -> Iterator[Text]:
    """Acceptance per draft position of each method, all batch sizes together; and per repeat where that differs."""
    for method, counts in summary.acceptance_by_method().items():
        yield Text(f"{method} per position: {wording.position_rates(counts)}")
    for series in summary.learning():
        yield Text(f"{series.label}: acceptance length by repeat {wording.lengths_by_repeat(series)}")


def _cost_curve(summary: BenchSummary) -> Text:
    points = [f"{point.query_tokens}: {point.relative:.2f}×" for point in summary.cost_curve or ()]
    return Text.assemble(("cost of verifying N tokens, against one: ", "dim"), " · ".join(points))


def _really_ran(sections: Mapping[str, Mapping[str, str]]) -> Table:
    table = Table(title="what really ran", title_justify="left", box=None, show_header=False, padding=(0, 1))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for section, facts in sections.items():
        if facts:
            table.add_row(section, ", ".join(f"{name} {_short(name, value)}" for name, value in facts.items()))
    return table


def _short(name: str, value: str) -> str:
    """Hashes are whole in the files; here their beginning tells them apart."""
    return value[:16] if name == "sha256" else value
