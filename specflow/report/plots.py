"""Plots as PNG bytes, in a light and a dark version, 1600 pixels wide for a display width of 800."""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from specflow.metrics.summary import PLAIN, BenchSummary, SeriesSummary
from specflow.report import wording
from specflow.report.figure import colours_of, drawing, style_axes, theme_of

__all__ = ["acceptance_plot", "throughput_plot"]


def acceptance_plot(summary: BenchSummary, dark: bool = False) -> bytes | None:
    """Acceptance per draft position: bars are unconditional, marks conditional rates. None when nothing was drafted."""
    drafted = {method: counts for method, counts in summary.acceptance_by_method().items() if counts.num_rounds}
    if not drafted:
        return None
    colours = _colours(summary, dark)
    with _figure(dark) as (axes, result):
        width = 0.8 / len(drafted)
        most = max(counts.num_positions for counts in drafted.values())
        for index, (method, counts) in enumerate(drafted.items()):
            offset = (index - (len(drafted) - 1) / 2) * width
            places = [position + 1 + offset for position in range(counts.num_positions)]
            bars = [100 * rate for rate in counts.per_position_unconditional]
            axes.bar(places, bars, width * 0.92, color=colours[method], label=method)
            _conditional_marks(axes, places, counts.per_position_conditional, colours[method], dark)
            if len(drafted) == 1 and most <= 10:
                # At the foot of the bars, where no mark can lie on them.
                _bar_labels(
                    axes,
                    places,
                    [0.0] * len(bars),
                    [f"{value:.0f}%" if value >= 6 else "" for value in bars],
                    "#ffffff",
                )
        axes.set_xticks(range(1, most + 1))
        axes.set_xlim(0.4, most + 0.6)
        axes.set_ylim(0, 105)
        axes.set_yticks(range(0, 101, 20))
        explained = "bars: of all rounds · dots: of the rounds that reached the position"
        _labels(axes, "Acceptance by draft position", "draft position", "accepted drafts (%)", dark, explained)
    return result.getvalue()


def throughput_plot(summary: BenchSummary, dark: bool = False) -> bytes | None:
    """Throughput by batch size, plain decoding beside each method; whiskers are the slowest and fastest repeat."""
    measured = [series for series in summary.series if series.tokens_per_second is not None]
    if not measured:
        return None
    colours = _colours(summary, dark)
    batches = sorted({series.batch_size for series in measured})
    methods = [method for method in colours if any(series.method == method for series in measured)]
    with _figure(dark) as (axes, result):
        width = 0.8 / len(methods)
        for index, method in enumerate(methods):
            rows = [series for series in measured if series.method == method]
            offset = (index - (len(methods) - 1) / 2) * width
            places = [batches.index(series.batch_size) + offset for series in rows]
            heights = [series.tokens_per_second or 0.0 for series in rows]
            axes.bar(places, heights, width * 0.92, color=colours[method], label=method)
            _whiskers(axes, places, rows, dark)
            if len(methods) * len(batches) <= 12:
                tops = [_top(series) for series in rows]
                _bar_labels(axes, places, tops, [_bar_text(series) for series in rows], theme_of(dark).ink)
        axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
        axes.set_xlim(-0.6, len(batches) - 0.4)
        axes.set_ylim(0, 1.2 * max(map(_top, measured)))
        explained = "whiskers: slowest and fastest repeat · ×: against plain decoding"
        below, beside = "batch size (requests at a time)", "output tokens per second"
        _labels(axes, "Throughput by batch size", below, beside, dark, explained)
    return result.getvalue()


def _top(series: SeriesSummary) -> float:
    found = series.tokens_per_second_range
    return max(series.tokens_per_second or 0.0, found[1] if found else 0.0)


def _bar_text(series: SeriesSummary) -> str:
    text = wording.count(series.tokens_per_second)
    return text if series.speedup is None else f"{text}\n{wording.times(series.speedup)}"


def _whiskers(axes: Any, places: Sequence[float], rows: Sequence[SeriesSummary], dark: bool) -> None:
    for place, series in zip(places, rows, strict=True):
        found = series.tokens_per_second_range
        if found and len(series.repeats) > 1:
            axes.plot([place, place], found, color=theme_of(dark).ink, linewidth=1.2)


def _conditional_marks(
    axes: Any, places: Sequence[float], values: Sequence[float | None], colour: str, dark: bool
) -> None:
    points = [(place, 100 * value) for place, value in zip(places, values, strict=True) if value is not None]
    axes.plot(
        [place for place, _ in points],
        [value for _, value in points],
        marker="o",
        markersize=6,
        linewidth=1.4,
        linestyle=":",
        color=theme_of(dark).ink,
        markerfacecolor=colour,
        markeredgecolor=theme_of(dark).ink,
    )


def _bar_labels(axes: Any, places: Sequence[float], tops: Sequence[float], texts: Sequence[str], ink: str) -> None:
    for place, top, text in zip(places, tops, texts, strict=True):
        offset = {"xytext": (0, 3), "textcoords": "offset points", "ha": "center", "va": "bottom"}
        axes.annotate(text, (place, top), fontsize=9, color=ink, **offset)


def _labels(axes: Any, title: str, below: str, beside: str, dark: bool, explained: str) -> None:
    theme = theme_of(dark)
    axes.set_title(title, loc="left", fontsize=13, fontweight="bold", color=theme.ink, pad=44)
    note = {"xycoords": "axes fraction", "textcoords": "offset points", "va": "bottom"}
    axes.annotate(explained, (0, 1), (0, 28), fontsize=9.5, color=theme.plain, **note)
    axes.set_xlabel(below, color=theme.ink, fontsize=11)
    axes.set_ylabel(beside, color=theme.ink, fontsize=11)
    axes.legend(
        frameon=False,
        fontsize=10,
        labelcolor=theme.ink,
        ncols=6,
        loc="lower left",
        bbox_to_anchor=(-0.008, 1.0),
        borderpad=0.2,
        columnspacing=1.6,
    )


def _colours(summary: BenchSummary, dark: bool) -> dict[str, str]:
    """Colour of each method, plain first; the same in every plot of the run."""
    return colours_of(list(dict.fromkeys(series.method for series in summary.series)), PLAIN, dark)


@contextmanager
def _figure(dark: bool) -> Iterator[tuple[Any, io.BytesIO]]:
    """Axes of a picture 1600 pixels wide, for a display width of 800, and the buffer that holds it after the block."""
    with drawing(dark) as (figure, buffer):
        axes = figure.add_subplot()
        style_axes(axes, dark)
        yield axes, buffer
