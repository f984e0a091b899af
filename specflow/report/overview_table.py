"""The table of many runs on the terminal, made to fit 100 columns."""

from collections.abc import Iterator
from itertools import groupby

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from specflow.report import wording
from specflow.report.overview import Overview
from specflow.report.rows import Condition, ResultRow
from specflow.report.table import WIDTH

__all__ = ["render_overview"]

_COLUMNS = (
    ("method", "left"), ("K", "right"), ("batch", "right"), ("tokens\nper s", "right"), ("repeats", "right"),
    ("speed-\nup", "right"), ("accept.\nrate", "right"), ("accept.\nlength", "right"), ("TTFT ms\np50", "right"),
    ("TPOT ms\np50", "right"),
)  # fmt: skip


def render_overview(overview: Overview, console: Console) -> None:
    """Print table, warnings, what failed, and the answer last, where it is seen first."""
    console.print(Group(*_parts(overview)), width=min(WIDTH, console.width))


def _parts(overview: Overview) -> Iterator[RenderableType]:
    best = {id(answer.best) for answer in overview.answers}
    conditions = [row.condition for row in overview.rows]
    for condition, group in groupby(overview.rows, key=lambda row: row.condition):
        yield _table(condition.words(conditions), list(group), best)
    for warning in overview.warnings():
        yield Text(warning, style="yellow")
    for reason, names in overview.failures().items():
        yield Text(f"{len(names)} without a result: {_first_line(reason)}", style="red")
        yield from (Text(f"  {name}", style="red") for name in names)
    for answer in overview.answers:
        many = len({each.condition for each in overview.answers}) > 1
        yield Text.assemble(
            (f"{_place(answer.condition, conditions, many)}batch {answer.batch_size}: ", "bold"), answer.sentence()
        )


def _place(condition: Condition, among: list[Condition], many: bool) -> str:
    return f"{condition.words(among)}, " if many else ""


def _table(title: str, rows: list[ResultRow], best: set[int]) -> Table:
    table = Table(title=Text(title, style="bold"), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    for heading, side in _COLUMNS:
        table.add_column(heading, justify=side, no_wrap=heading != "method", overflow="fold")  # type: ignore[arg-type]
    for _, group in groupby(rows, key=lambda row: row.batch_size):
        lines = list(group)
        for row in lines:
            style = "bold" if id(row) in best else None
            table.add_row(*_cells(row), style=style, end_section=row is lines[-1])
    return table


def _cells(row: ResultRow) -> list[Text]:
    name = Text(row.variant)
    if row.lossy or row.lossless == "failed":
        name.append(" LOSSY" if row.lossy else " DIFFERS", style="bold red")
    spread = f"{wording.count(row.range[0])}–{wording.count(row.range[1])}" if row.range else "–"
    slow = row.speedup is not None and row.speedup < 1
    return [
        name,
        Text("–" if row.num_speculative_tokens is None else str(row.num_speculative_tokens)),
        Text(str(row.batch_size)),
        Text(wording.count(row.tokens_per_second)),
        Text(spread, style="dim"),
        Text(wording.times(row.speedup), style="dim" if row.is_plain else "yellow" if slow else "green"),
        Text("–" if row.is_plain else wording.percent(row.acceptance_rate)),
        Text("–" if row.is_plain else wording.count(row.mean_acceptance_length, 2)),
        Text(wording.milliseconds(row.ttft_p50)),
        Text(wording.milliseconds(row.tpot_p50)),
    ]


def _first_line(text: str) -> str:
    return (text.splitlines() or [""])[0]
