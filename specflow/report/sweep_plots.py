"""Plots of many runs: throughput against K, acceptance by position, speed-up against batch size, latency and speed.

Every picture is a grid of panels that share colours. Lines carry their names where they end; a colour means the same
method everywhere. Only the fastest few methods get a colour, the others stay light grey and unnamed in the picture:
they are in the table.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from specflow.metrics.summary import PLAIN
from specflow.report.figure import METHOD_COLOURS, colours_of, drawing, spread, style_axes, theme_of
from specflow.report.rows import Condition, ResultRow

__all__ = ["PLOTS", "acceptance_by_position", "latency_and_throughput", "speedup_by_batch", "throughput_by_length"]

_MOST_COLUMNS = 3
_PANEL = (5.2, 3.5)  # inches
_ALONE = 5.6  # width of a picture of one panel
_LABEL_GAP = 0.062  # between two labels, as a part of the panel's height
Line = tuple[str, list[tuple[float, float]]]  # variant, points


# -- the pictures --------------------------------------------------------------------------------------------------
def throughput_by_length(rows: Sequence[ResultRow], dark: bool = False) -> bytes | None:
    """Output tokens per second against K, a panel per condition and batch size; plain decoding as a level line.

    None when nothing was drafted.
    """
    drafted = [row for row in rows if not row.is_plain and row.num_speculative_tokens and row.tokens_per_second]
    if not drafted:
        return None
    cells = sorted({(row.condition, row.batch_size) for row in drafted})
    lengths = sorted({row.num_speculative_tokens or 0 for row in drafted})

    def draw(axes: Any, cell: tuple[Condition, int]) -> None:
        here = [row for row in drafted if (row.condition, row.batch_size) == cell]
        plain = [row for row in rows if row.is_plain and (row.condition, row.batch_size) == cell]
        colours = _colours(rows, dark)
        for row in here:
            if row.range:
                colour = colours.get(row.variant, theme_of(dark).faint)
                axes.plot(
                    [lengths.index(row.num_speculative_tokens or 0)] * 2,
                    row.range,
                    color=colour,
                    linewidth=4,
                    alpha=0.35,
                )
        lines = [
            (variant, [(float(lengths.index(row.num_speculative_tokens or 0)), row.tokens_per_second or 0.0)
                       for row in sorted(group, key=lambda row: row.num_speculative_tokens or 0)])
            for variant, group in _by_variant(here)
        ]  # fmt: skip
        top = max([value for _, points in lines for _, value in points] + [row.tokens_per_second or 0 for row in plain])
        axes.set_ylim(0, 1.12 * top)
        speed = max((row.tokens_per_second or 0.0 for row in plain), default=None)
        _draw_lines(axes, lines, colours, len(lengths) - 1, dark, level=speed)
        axes.set_xticks(range(len(lengths)), [str(length) for length in lengths])
        _axes_text(
            axes, _panel_title(cell[0], cell[1], [each for each, _ in cells]), "K, drafted tokens per round", dark
        )

    return _panels(cells, draw, "Throughput by draft length", "output tokens per second", dark)


def acceptance_by_position(rows: Sequence[ResultRow], dark: bool = False) -> bytes | None:
    """Rounds that accepted each draft position, each method at its longest K; None when nothing was drafted."""
    drafted = [row for row in rows if row.acceptance_unconditional]
    if not drafted:
        return None
    conditions = sorted({row.condition for row in drafted})
    most = max(len(row.acceptance_unconditional) for row in drafted)

    def draw(axes: Any, condition: Condition) -> None:
        lines = []
        for variant, group in _by_variant([row for row in drafted if row.condition == condition]):
            longest = max(group, key=lambda row: (len(row.acceptance_unconditional), -row.batch_size))
            rates = longest.acceptance_unconditional
            lines.append((variant, [(float(place), 100 * rate) for place, rate in enumerate(rates)]))
        axes.set_ylim(0, 104)
        axes.set_yticks(range(0, 101, 25), [f"{value}%" for value in range(0, 101, 25)])
        _draw_lines(axes, lines, _colours(rows, dark), most - 1, dark)
        axes.set_xticks(range(most), [str(place + 1) for place in range(most)])
        _axes_text(axes, condition.words(conditions), "draft position", dark)

    return _panels(conditions, draw, "Acceptance by draft position", "rounds that accepted it", dark)


def speedup_by_batch(rows: Sequence[ResultRow], dark: bool = False) -> bytes | None:
    """Speed-up over plain decoding against the batch size, each method at its best K there; None for one batch size."""
    drafted = [row for row in rows if not row.is_plain and row.speedup is not None]
    batches = sorted({row.batch_size for row in drafted})
    if len(batches) < 2:
        return None
    conditions = sorted({row.condition for row in drafted})
    top = max(1.0, *(row.speedup or 0.0 for row in drafted))

    def draw(axes: Any, condition: Condition) -> None:
        lines = []
        for variant, group in _by_variant([row for row in drafted if row.condition == condition]):
            best: dict[int, float] = {}
            for row in group:
                best[row.batch_size] = max(best.get(row.batch_size, 0.0), row.speedup or 0.0)
            lines.append((variant, [(float(batches.index(batch)), best[batch]) for batch in sorted(best)]))
        axes.set_ylim(0, 1.12 * top)
        _draw_lines(axes, lines, _colours(rows, dark), len(batches) - 1, dark, level=1.0)
        axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}×")
        _axes_text(axes, condition.words(conditions), "batch size (requests at a time)", dark)

    return _panels(conditions, draw, "Speed-up by batch size, best K of each method", "over plain decoding", dark)


def latency_and_throughput(rows: Sequence[ResultRow], dark: bool = False) -> bytes | None:
    """Time per output token against throughput, a point per row; the line joins what nothing else beats in both.

    None without points.
    """
    timed = [row for row in rows if row.tpot_p50 and row.tokens_per_second]
    if not timed:
        return None
    conditions = sorted({row.condition for row in timed})

    def draw(axes: Any, condition: Condition) -> None:
        here = [row for row in timed if row.condition == condition]
        colours, theme = _colours(rows, dark), theme_of(dark)
        front = _front(here)
        axes.plot(
            *zip(*map(_place, front), strict=True), color=theme.plain, linewidth=1, linestyle=(0, (4, 3)), zorder=1
        )
        for row in here:
            axes.plot(
                *_place(row), marker="o", markersize=7 if row in front else 4.5, linestyle="none", zorder=2,
                color=colours.get(row.variant, theme.faint), markeredgecolor=theme.paper, markeredgewidth=0.8,
            )  # fmt: skip
        axes.set_xlim(0, 1.14 * max(_place(row)[0] for row in here))
        axes.set_ylim(0, 1.18 * max(_place(row)[1] for row in here))
        _name_points(axes, front, dark)
        _axes_text(axes, condition.words(conditions), "time per output token of a request (ms, median)", dark)

    return _panels(conditions, draw, "Latency and throughput", "output tokens per second", dark, legend=rows)


PLOTS: dict[str, tuple[str, Callable[[Sequence[ResultRow], bool], bytes | None]]] = {
    "throughput_by_length.png": ("Throughput by draft length", throughput_by_length),
    "acceptance_by_position.png": ("Acceptance by draft position", acceptance_by_position),
    "speedup_by_batch.png": ("Speed-up by batch size", speedup_by_batch),
    "latency_and_throughput.png": ("Latency and throughput", latency_and_throughput),
}


# -- parts of them -------------------------------------------------------------------------------------------------
def _panels(
    cells: Sequence[Any],
    draw: Callable[[Any, Any], None],
    title: str,
    beside: str,
    dark: bool,
    legend: Sequence[ResultRow] = (),
) -> bytes:
    """One panel per cell, at most `_MOST_COLUMNS` beside each other."""
    columns = min(_MOST_COLUMNS, len(cells))
    lines = -(-len(cells) // columns)
    # Scattered points need the room, and the page has it.
    width = max(2 * _PANEL[0] if legend else _ALONE, _PANEL[0] * columns)
    with drawing(dark, (width, _PANEL[1] * lines + 0.7 + (0.4 if legend else 0))) as (figure, result):
        ink = theme_of(dark).ink
        figure.suptitle(title, x=0.012, ha="left", fontsize=14, fontweight="bold", color=ink)
        if legend:
            _legend(figure, legend, dark)
        grid = figure.subplots(lines, columns, squeeze=False)
        for index, axes in enumerate(grid.flat):
            if index >= len(cells):
                axes.set_visible(False)
                continue
            style_axes(axes, dark)
            draw(axes, cells[index])
            if index % columns == 0:
                axes.set_ylabel(beside, color=ink, fontsize=10.5)
    return result.getvalue()


def _draw_lines(
    axes: Any, lines: Sequence[Line], colours: dict[str, str], last: int, dark: bool, level: float | None = None
) -> None:
    """Lines with their names at the right end, and a level for plain decoding."""
    theme, (low, high) = theme_of(dark), axes.get_ylim()
    names: list[tuple[float, str, str]] = []
    if level is not None:
        axes.axhline(level, color=theme.plain, linewidth=1.2, linestyle=(0, (4, 3)), zorder=1)
        names.append((level, PLAIN, theme.plain))
    for variant, points in lines:
        colour = colours.get(variant)
        axes.plot(
            *zip(*points, strict=True), color=colour or theme.faint, linewidth=2 if colour else 1.2, marker="o",
            markersize=5.5, markeredgecolor=theme.paper, markeredgewidth=0.8, zorder=3 if colour else 2,
        )  # fmt: skip
        if colour:
            names.append((points[-1][1], variant, colour))
    axes.set_xlim(-0.25, last + 0.25 if last else 0.5)
    places = spread([value for value, _, _ in names], _LABEL_GAP * (high - low), low, high)
    ends = {variant: points[-1][0] for variant, points in lines}
    for place, (value, name, colour) in zip(places, names, strict=True):
        end = ends.get(name, last + 0.25 if last else 0.5)
        # From the end of a line that stops early, or was moved, a thin thread leads to its name.
        axes.annotate(
            _shortened(name), (end, value), (1.02, (place - low) / (high - low)), textcoords=("axes fraction"),
            fontsize=9.5, color=colour, va="center", annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6, "alpha": 0.7, "shrinkA": 1, "shrinkB": 4},
        )  # fmt: skip


def _shortened(name: str, most: int = 30) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _name_points(axes: Any, front: Sequence[ResultRow], dark: bool) -> None:
    """Names of the rows on the front; of two that are close together the slower one stays without."""
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    taken: list[tuple[float, float]] = []
    for row in sorted(front, key=lambda row: -(row.tokens_per_second or 0.0)):
        x, y = _place(row)
        place = ((x - left) / (right - left), (y - low) / (high - low))
        if any(abs(place[0] - a) < 0.34 and abs(place[1] - b) < 0.075 for a, b in taken):
            continue
        taken.append(place)
        side = -1 if place[0] > 0.62 else 1
        axes.annotate(
            f"{_shortened(row.label, 24)}, batch {row.batch_size}", (x, y), (6 * side, 7),
            textcoords="offset points", fontsize=9, color=theme_of(dark).ink, ha="right" if side < 0 else "left",
        )  # fmt: skip


def _legend(figure: Any, rows: Sequence[ResultRow], dark: bool) -> None:
    from matplotlib.lines import Line2D  # here: only reports need it

    handles = [
        Line2D([], [], marker="o", linestyle="none", color=colour, label=_shortened(name))
        for name, colour in _colours(rows, dark).items()
    ]
    figure.legend(
        handles=handles, frameon=False, fontsize=9.5, labelcolor=theme_of(dark).ink, ncols=7, loc="outside lower left",
        handletextpad=0.2, columnspacing=1.4, borderaxespad=0.1,
    )  # fmt: skip


def _axes_text(axes: Any, title: str, below: str, dark: bool) -> None:
    ink = theme_of(dark).ink
    axes.set_title(title, loc="left", fontsize=11, color=ink, pad=8)
    axes.set_xlabel(below, color=ink, fontsize=10.5)


def _panel_title(condition: Condition, batch_size: int, among: Sequence[Condition]) -> str:
    words = f"batch {batch_size}"
    return words if len(set(among)) == 1 else f"{condition.words(among)}, {words}"


def _place(row: ResultRow) -> tuple[float, float]:
    """Milliseconds per output token, tokens per second."""
    return 1000 * (row.tpot_p50 or math.nan), row.tokens_per_second or math.nan


def _front(rows: Sequence[ResultRow]) -> list[ResultRow]:
    """Rows that no other row beats in both latency and throughput, by latency."""
    found: list[ResultRow] = []
    for row in sorted(rows, key=lambda row: (_place(row)[0], -_place(row)[1])):
        if not found or _place(row)[1] > _place(found[-1])[1]:
            found.append(row)
    return found


def _by_variant(rows: Sequence[ResultRow]) -> Iterator[tuple[str, list[ResultRow]]]:
    groups: dict[str, list[ResultRow]] = {}
    for row in rows:
        groups.setdefault(row.variant, []).append(row)
    yield from groups.items()


def _colours(rows: Sequence[ResultRow], dark: bool) -> dict[str, str]:
    """Plain decoding in grey and the variants that are fastest somewhere in the palette's colours."""
    best: dict[str, float] = {}
    for row in rows:
        if not row.is_plain:
            best[row.variant] = max(best.get(row.variant, 0.0), row.speedup or 0.0)
    shown = sorted(best, key=lambda variant: -best[variant])[: len(METHOD_COLOURS)]
    names = [variant for variant in best if variant in shown]  # in the order of the table
    return colours_of([PLAIN, *names], PLAIN, dark)
