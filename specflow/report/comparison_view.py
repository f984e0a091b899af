"""A comparison of two runs on the terminal."""

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from specflow.report import wording
from specflow.report.comparison import Comparison, Difference, Quantity
from specflow.report.table import WIDTH

__all__ = ["render_comparison"]

_STYLES = {"same": "dim", "within noise": "dim", "differs": "bold", "one repeat": "yellow"}


def render_comparison(comparison: Comparison, console: Console) -> None:
    """Print what differs, the numbers and the notes."""
    console.print(Group(*_parts(comparison)), width=min(WIDTH, console.width))


def _parts(comparison: Comparison) -> Iterator[RenderableType]:
    for letter, record in (("a", comparison.first), ("b", comparison.second)):
        yield Text.assemble((f"{letter}: ", "bold"), record.name, (f"  {record.folder}", "dim"))
    yield _differing("asked for differently", comparison.settings)
    yield _differing("ran differently", comparison.ran)
    if comparison.quantities:
        yield _numbers(comparison.quantities)
    yield from (Text(note, style="yellow") for note in comparison.notes)


def _differing(title: str, differences: Sequence[Difference]) -> RenderableType:
    if not differences:
        return Text(f"{title}: nothing", style="dim")
    table = Table(title=Text(title, style="bold"), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    for heading in ("", "a", "b"):
        table.add_column(heading, overflow="fold")
    for one in differences:
        table.add_row(one.name, *("–" if value is None else value for value in (one.first, one.second)))
    return table


def _numbers(quantities: Sequence[Quantity]) -> Table:
    table = Table(title=Text("results", style="bold"), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    for heading in ("", "a", "b", "b / a", "between repeats", ""):
        table.add_column(heading, justify="left" if not heading else "right", no_wrap=True, overflow="fold")
    for index, one in enumerate(quantities):
        if not index or quantities[index - 1].series != one.series:
            table.add_row(Text(one.series, style="bold"))
        last = index + 1 == len(quantities) or quantities[index + 1].series != one.series
        table.add_row(*_cells(one), end_section=last)
    return table


def _cells(one: Quantity) -> list[Text]:
    found = one.ratio_range
    style = _STYLES[one.verdict]
    return [
        Text(f"  {one.name} ({one.unit})" if one.unit else f"  {one.name}"),
        Text(_value(one.first)),
        Text(_value(one.second)),
        Text(wording.times(one.ratio), style=style),
        Text("" if found is None or one.verdict == "same" else f"{found[0]:.2f}–{found[1]:.2f}", style="dim"),
        Text(one.verdict, style=style),
    ]


def _value(values: Sequence[float]) -> str:
    """The median, with its range when the repeats differ."""
    middle = wording.count(sorted(values)[len(values) // 2])
    low, high = wording.count(min(values)), wording.count(max(values))
    return middle if low == high else f"{middle} [{low}–{high}]"
