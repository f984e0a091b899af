"""What a tuning looks like: the table on the terminal and the plot."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specflow.metrics.summary import PLAIN
from specflow.report import wording
from specflow.report.figure import colours_of, drawing, style_axes, theme_of
from specflow.report.table import WIDTH
from specflow.tuning.prediction import Cell
from specflow.tuning.summary import TuneSummary

__all__ = ["draw_tuning", "render_tuning"]

_COLUMNS = ("method", "K", "batch", "predicted\ntokens/s", "measured\ntokens/s", "repeats", "error", "speed-\nup",
            "accept.\nlength")  # fmt: skip


def render_tuning(summary: TuneSummary, console: Console) -> None:
    """Print what was measured beside what was predicted, what was left out, and the answer last."""
    table = Table(title=Text(summary.name, style="bold"), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    for index, heading in enumerate(_COLUMNS):
        table.add_column(heading, justify="right" if index else "left", no_wrap=True)
    best = {id(one.best) for one in summary.recommendations}
    batch_sizes = sorted({cell.batch_size for cell in summary.cells})
    for batch_size in batch_sizes:
        here = _shown(summary, batch_size)
        for cell in here:
            style = "bold" if id(cell) in best else None if cell.measured is not None else "dim"
            table.add_row(*_cells(cell), style=style, end_section=cell is here[-1])
    width = min(WIDTH, console.width)
    console.print(table, width=width)
    for method, reason in summary.unusable.items():
        console.print(Text(f"not tried: {method}: {reason}", style="dim"), width=width)
    passes = f"{summary.used:.1f} passes over the workload; measuring all cells would take {summary.exhaustive}"
    console.print(Text(f"{passes} ({100 * summary.used / summary.exhaustive:.0f} %)"), width=width)
    for one in summary.recommendations:
        console.print(Text(one.sentence(), style="bold"), width=width)
        if command := summary.commands.get(one.best.batch_size):
            console.print(Text(f"  {command}"), soft_wrap=True)


def _shown(summary: TuneSummary, batch_size: int) -> list[Cell]:
    """Measured cells, and of every method without one the length that promises most."""
    measured = [cell for cell in summary.measured if cell.batch_size == batch_size]
    best: dict[str, Cell] = {}
    for cell in summary.cells:
        if cell.batch_size == batch_size and cell.predicted is not None:
            other = best.get(cell.method)
            if other is None or (other.predicted or 0.0) < cell.predicted:
                best[cell.method] = cell
    seen = {cell.method for cell in measured}
    rest = [cell for method, cell in best.items() if method not in seen]
    return [*measured, *sorted(rest, key=lambda cell: -(cell.predicted or 0.0))]


def _cells(cell: Cell) -> list[str]:
    spread = cell.measured_range
    return [
        cell.method,
        str(cell.num_speculative_tokens),
        str(cell.batch_size),
        wording.count(cell.predicted),
        wording.count(cell.measured) if cell.measured is not None else "failed" if cell.reason else "–",
        f"{wording.count(spread[0])}–{wording.count(spread[1])}" if spread else "",
        "" if cell.error is None else f"{100 * cell.error:+.0f}%",
        "" if cell.speedup is None else wording.times(cell.speedup),
        wording.count(cell.acceptance_length, 2),
    ]


def draw_tuning(cells: Sequence[Cell], dark: bool = False) -> bytes | None:
    """Predicted tokens per second against K as lines, measured ones as dots with the range of their repeats, a panel
    per batch size; None when no method was tried."""
    drafted = [cell for cell in cells if cell.num_speculative_tokens]
    if not drafted:
        return None
    theme = theme_of(dark)
    batch_sizes = sorted({cell.batch_size for cell in cells})
    methods = list(dict.fromkeys(cell.method for cell in drafted))
    colours = colours_of([PLAIN, *methods], PLAIN, dark)
    with drawing(dark, (0.6 + 5.2 * len(batch_sizes), 4.2)) as (figure, buffer):
        for index, batch_size in enumerate(batch_sizes):
            axes = figure.add_subplot(1, len(batch_sizes), index + 1)
            style_axes(axes, dark)
            here = [cell for cell in cells if cell.batch_size == batch_size]
            for method in methods:
                own = [cell for cell in here if cell.method == method]
                own.sort(key=lambda cell: cell.num_speculative_tokens)
                line = [(cell.num_speculative_tokens, cell.predicted) for cell in own if cell.predicted]
                if line:
                    axes.plot(*zip(*line, strict=True), color=colours[method], linewidth=1.6, label=method)
                for cell in own:
                    if cell.measured is not None:
                        _draw_measured(axes, cell, colours[method], theme.paper)
            plain = next((cell for cell in here if not cell.num_speculative_tokens), None)
            if plain is not None:
                level = plain.measured or plain.predicted
                axes.axhline(level, color=theme.plain, linewidth=1.2, linestyle=(0, (4, 3)), label=PLAIN)
            axes.set_ylim(bottom=0)
            axes.set_title(f"batch {batch_size}", color=theme.ink, fontsize=11, loc="left")
            axes.set_xlabel("K, drafted tokens per round", color=theme.ink)
            if not index:
                axes.set_ylabel("output tokens per second", color=theme.ink)
        axes.legend(frameon=False, fontsize=9, labelcolor=theme.ink, title="lines predicted, dots measured",
                    title_fontproperties={"size": 9}, loc="upper left", bbox_to_anchor=(1.0, 1.0))  # fmt: skip
        axes.get_legend().get_title().set_color(theme.ink)
    return buffer.getvalue()


def _draw_measured(axes: object, cell: Cell, colour: str, paper: str) -> None:
    length = cell.num_speculative_tokens
    if cell.measured_range:
        axes.plot([length] * 2, cell.measured_range, color=colour, linewidth=4, alpha=0.35)  # type: ignore[attr-defined]
    axes.plot(  # type: ignore[attr-defined]
        [length], [cell.measured], "o", color=colour, markersize=6.5, markeredgecolor=paper, markeredgewidth=0.8
    )
