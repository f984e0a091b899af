"""Numbers as text, the same in the table, the plots and the page. What does not exist reads "n/a", never NaN."""

from collections.abc import Sequence
from pathlib import Path

from specflow.metrics.acceptance import AcceptanceCounts
from specflow.metrics.latency import TimeShares
from specflow.metrics.summary import BenchSummary, SeriesSummary

__all__ = [
    "NOT_AVAILABLE",
    "VERDICT_COLOURS",
    "count",
    "in_a_line",
    "lengths_by_repeat",
    "memory",
    "milliseconds",
    "percent",
    "position_rates",
    "range_of",
    "rates",
    "shares",
    "short_path",
    "times",
    "warnings",
]

NOT_AVAILABLE = "n/a"
VERDICT_COLOURS = {"verified": "green", "verified_up_to_ties": "yellow", "failed": "red", "not_applicable": "yellow"}


def count(value: float | None, digits: int | None = None) -> str:
    """A number with about three significant digits, or with `digits` decimals."""
    if value is None:
        return NOT_AVAILABLE
    if digits is None:
        digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}".replace(",", " ") if abs(value) >= 10000 else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """A fraction in percent."""
    return NOT_AVAILABLE if value is None else f"{100 * value:.1f}%"


def times(value: float | None) -> str:
    """A factor."""
    return NOT_AVAILABLE if value is None else f"{value:.2f}×"


def milliseconds(seconds: float | None) -> str:
    """A time in milliseconds, without the unit."""
    return NOT_AVAILABLE if seconds is None else count(1000 * seconds)


def memory(size: int | None) -> str:
    """Bytes in MiB or GiB."""
    if size is None:
        return NOT_AVAILABLE
    mib = size / 2**20
    return f"{mib:.0f} MiB" if mib < 1000 else f"{mib / 1024:.1f} GiB"


def shares(value: TimeShares) -> str:
    """Percent of the step time spent on drafting, verifying and the rest, and steps not divided into those."""
    parts = (value.propose, value.verify, value.other)
    if not any(parts) and not value.undivided:
        return NOT_AVAILABLE
    whole = f" (+{100 * value.undivided:.0f})" if value.undivided else ""
    return "/".join(f"{100 * part:.0f}" for part in parts) + whole


def rates(values: Sequence[float | None]) -> str:
    """Rates in percent, without the sign, one after the other."""
    return " ".join(NOT_AVAILABLE if value is None else f"{100 * value:.0f}" for value in values) or NOT_AVAILABLE


def position_rates(counts: AcceptanceCounts) -> str:
    """Both kinds of per-position rates in one line."""
    conditional, unconditional = counts.per_position_conditional, counts.per_position_unconditional
    return f"conditional {rates(conditional)} · unconditional {rates(unconditional)} (%)"


def lengths_by_repeat(series: SeriesSummary) -> str:
    """Mean acceptance length of each repeat, the first one first."""
    return " · ".join(count(length, 2) for length in series.acceptance_lengths)


def range_of(series: SeriesSummary) -> str:
    """Slowest and fastest repeat in tokens per second; empty with a single repeat."""
    found = series.tokens_per_second_range
    return f"{count(found[0])}–{count(found[1])}" if found and len(series.repeats) > 1 else ""


def warnings(summary: BenchSummary) -> list[str]:
    """What has to stand beside the numbers: speed-ups below 1, unsteady repeats, and the run's own notes."""
    slower = [f"{one.label}: slower than plain ({times(one.speedup)})" for one in summary.slower_than_plain()]
    unsteady = [
        f"{one.label}: repeats between {range_of(one)} tokens/s; the machine was not steady enough for a comparison"
        for one in summary.unsteady()
    ]
    return [*slower, *unsteady, *(f"note: {text}" for text in summary.notes)]


def in_a_line(summary: BenchSummary) -> str:
    """A whole run in one line: speed of each method that drafted, or of plain decoding alone, and the verdict."""
    drafted = [one for one in summary.series if not one.is_plain] or list(summary.series)
    parts = [
        f"batch {one.batch_size}: {count(one.tokens_per_second)} tokens/s"
        + (f" ({times(one.speedup)})" if one.speedup is not None else "")
        for one in drafted
    ]
    verdict = {"verified": "lossless", "verified_up_to_ties": "lossless up to ties", "failed": "NOT LOSSLESS"}
    return " · ".join([*parts, verdict.get(summary.lossless.status, "lossless not checked")])


def short_path(path: Path, launch_dir: str | None = None) -> str:
    """As seen from the folder the command was started in, where the path lies below it."""
    base = Path(launch_dir or Path.cwd())
    return str(path.relative_to(base)) if path.is_relative_to(base) else str(path)
