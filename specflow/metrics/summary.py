"""Results of a run as data: what tables, plots, pages and trackers are made from.

A benchmark task calls `summarise_repeat` for each repeat of a series, `summarise` over the repeats of one method at one
batch size, `with_speedups` over all of them, and puts the result into a `BenchSummary`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

from specflow.metrics.acceptance import AcceptanceCounts, macro_acceptance_rate, macro_mean_acceptance_length
from specflow.metrics.latency import (
    Percentiles,
    TimeShares,
    arrival_gaps,
    decode_throughput,
    throughput,
    tpot_seconds,
    ttft_seconds,
)
from specflow.metrics.verdict import LosslessVerdict
from specflow.tracking.events import RequestRow, Series, StepRecord

__all__ = [
    "PLAIN",
    "UNSTEADY",
    "BenchSummary",
    "CostPoint",
    "LosslessVerdict",
    "RepeatSummary",
    "SeriesSummary",
    "cost_points",
    "summarise",
    "summarise_repeat",
    "with_speedups",
]

PLAIN = "plain"  # method name of decoding without drafts
_SCHEMA = 1  # of summary.json
UNSTEADY = 1.3  # fastest over slowest repeat: more says that the machine was not steady
_SAME_LENGTH = 0.005  # a smaller difference of two acceptance lengths does not show


@dataclass(frozen=True)
class RepeatSummary:
    """One pass over the prompts."""

    method: str
    batch_size: int
    num_requests: int
    output_tokens: int
    wall_seconds: float
    tokens_per_second: float | None
    decode_tokens_per_second: float | None
    acceptance: AcceptanceCounts
    macro_acceptance_rate: float | None
    macro_mean_acceptance_length: float | None
    num_steps: int
    shares: TimeShares
    ttft: Percentiles
    itl: Percentiles
    tpot: Percentiles
    peak_memory_bytes: int | None


@dataclass(frozen=True)
class SeriesSummary:
    """One method at one batch size: medians over the repeats, acceptance pooled over them."""

    method: str
    batch_size: int
    num_requests: int
    output_tokens: int  # of one repeat (median)
    wall_seconds: float
    tokens_per_second: float | None
    decode_tokens_per_second: float | None  # steps without prompt tokens only
    acceptance: AcceptanceCounts
    macro_acceptance_rate: float | None
    macro_mean_acceptance_length: float | None
    shares: TimeShares
    ttft: Percentiles
    itl: Percentiles
    tpot: Percentiles
    peak_memory_bytes: int | None  # highest of the repeats
    repeats: tuple[RepeatSummary, ...]
    speedup: float | None = None  # tokens per second over plain decoding's at the same batch size
    lossy: bool = False  # the sampler may change the output

    @property
    def is_plain(self) -> bool:
        """True for decoding without drafts, the baseline."""
        return self.method == PLAIN

    @property
    def label(self) -> str:
        """E.g. "ngram, batch 8"."""
        return f"{self.method}, batch {self.batch_size}"

    @property
    def acceptance_lengths(self) -> list[float | None]:
        """Mean acceptance length of each repeat in turn."""
        return [repeat.acceptance.mean_acceptance_length for repeat in self.repeats]

    @property
    def tokens_per_second_range(self) -> tuple[float, float] | None:
        """Slowest and fastest repeat: the noise of the measurement; None without values."""
        values = [repeat.tokens_per_second for repeat in self.repeats if repeat.tokens_per_second is not None]
        return (min(values), max(values)) if values else None

    def to_metrics(self) -> dict[str, float]:
        """Flat metrics `METHOD/batch_N/NAME`; quantities that do not exist are left out, never NaN."""
        prefix = f"{self.method}/batch_{self.batch_size}/"
        named = {name: value for name, value in self._metrics() if value is not None and math.isfinite(value)}
        return {f"{prefix}{name}": float(value) for name, value in named.items()}

    def _metrics(self) -> Iterator[tuple[str, float | None]]:
        yield "tokens_per_second", self.tokens_per_second
        yield "decode_tokens_per_second", self.decode_tokens_per_second
        yield "wall_seconds", self.wall_seconds
        yield "output_tokens", self.output_tokens
        if not self.is_plain:
            yield "speedup", self.speedup
            yield from self._acceptance_metrics()
        for name in ("ttft", "itl", "tpot"):
            for level, seconds in asdict(getattr(self, name)).items():
                yield f"{name}_{level}_seconds", seconds
        for part, share in asdict(self.shares).items():
            yield f"{part}_time_share", share
        yield "peak_memory_bytes", self.peak_memory_bytes

    def _acceptance_metrics(self) -> Iterator[tuple[str, float | None]]:
        counts = self.acceptance
        yield "acceptance_rate", counts.acceptance_rate
        yield "mean_acceptance_length", counts.mean_acceptance_length
        yield "macro_acceptance_rate", self.macro_acceptance_rate
        yield "macro_mean_acceptance_length", self.macro_mean_acceptance_length
        yield "system_efficiency", counts.system_efficiency
        yield "num_rounds", counts.num_rounds
        yield "num_draft_tokens", counts.num_draft_tokens
        yield "num_accepted_tokens", counts.num_accepted_tokens
        for name in ("unconditional", "per_drafted", "conditional"):
            for position, rate in enumerate(getattr(counts, f"per_position_{name}")):
                yield f"acceptance_{name}/position_{position}", rate


@dataclass(frozen=True)
class CostPoint:
    """One target pass: tokens it checks, median seconds, and seconds relative to one token."""

    query_tokens: int
    seconds: float
    relative: float


@dataclass(frozen=True)
class BenchSummary:
    """Everything a run found out."""

    name: str  # of the run, e.g. "ngram on bundled"
    series: Sequence[SeriesSummary]
    lossless: LosslessVerdict
    really_ran: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # section -> fact -> value
    cost_curve: Sequence[CostPoint] | None = None
    workload: Mapping[str, str] = field(default_factory=dict)  # source, count, hash, …
    lossy: bool = False
    notes: Sequence[str] = ()  # warnings that belong beside the numbers

    def to_metrics(self) -> dict[str, float]:
        """Flat metrics for a tracker, `METHOD/batch_N/NAME`, and `lossless` as 1 or 0 when it was checked."""
        metrics = {name: value for series in self.series for name, value in series.to_metrics().items()}
        if self.lossless.status != "not_applicable":
            metrics["lossless"] = float(self.lossless.passed)
        return metrics

    def slower_than_plain(self) -> list[SeriesSummary]:
        """Series whose speed-up is below 1."""
        return [series for series in self.series if series.speedup is not None and series.speedup < 1]

    def unsteady(self) -> list[SeriesSummary]:
        """Series whose repeats differ so much in speed that the speed-up says little; learning explains it as well."""
        learning = self.learning()
        ranges = ((series, series.tokens_per_second_range) for series in self.series if series not in learning)
        return [series for series, found in ranges if found and found[1] > UNSTEADY * found[0]]

    def learning(self) -> list[SeriesSummary]:
        """Series whose acceptance length differs between repeats of the same prompts: the proposer kept something."""
        lengths = ((one, [found for found in one.acceptance_lengths if found is not None]) for one in self.series)
        return [one for one, found in lengths if found and max(found) - min(found) > _SAME_LENGTH]

    def acceptance_by_method(self) -> dict[str, AcceptanceCounts]:
        """Rounds of each method that drafted, pooled over batch sizes: acceptance hardly depends on them."""
        pooled: dict[str, AcceptanceCounts] = {}
        for series in self.series:
            if not series.is_plain:
                pooled.setdefault(series.method, AcceptanceCounts()).merge(series.acceptance)
        return pooled

    def to_dict(self) -> dict[str, Any]:
        """Plain containers for summary.json: the fields, the derived rates and the verdict's sentence."""
        data = asdict(self) | {"schema": _SCHEMA, "verdict": self.lossless.sentence(), "metrics": self.to_metrics()}
        for entry, series in zip(data["series"], self.series, strict=True):
            entry["acceptance"] |= _derived(series.acceptance)
            for one, repeat in zip(entry["repeats"], series.repeats, strict=True):
                one["acceptance"] |= _derived(repeat.acceptance)
        return data


def _derived(counts: AcceptanceCounts) -> dict[str, Any]:
    return {
        "acceptance_rate": counts.acceptance_rate,
        "mean_acceptance_length": counts.mean_acceptance_length,
        "per_position_unconditional": counts.per_position_unconditional,
        "per_position_per_drafted": counts.per_position_per_drafted,
        "per_position_conditional": counts.per_position_conditional,
        "accepted_length_histogram": counts.accepted_length_histogram,
        "system_efficiency": counts.system_efficiency,
    }


# -- builders ------------------------------------------------------------------------------------------------------
def summarise_repeat(
    series: Series,
    rows: Sequence[RequestRow],
    steps: Sequence[StepRecord],
    wall_seconds: float,
    peak_memory_bytes: int | None = None,
) -> RepeatSummary:
    """One pass over the prompts: its request rows, its step records, and seconds from first arrival to last token."""
    acceptance = AcceptanceCounts()
    for step in steps:
        acceptance.add_all(step.drafted, step.accepted)
    output_tokens = sum(row.output_tokens for row in rows)
    return RepeatSummary(
        method=series.method,
        batch_size=series.batch_size,
        num_requests=len(rows),
        output_tokens=output_tokens,
        wall_seconds=wall_seconds,
        tokens_per_second=throughput(output_tokens, wall_seconds),
        decode_tokens_per_second=decode_throughput(steps),
        acceptance=acceptance,
        macro_acceptance_rate=macro_acceptance_rate(rows),
        macro_mean_acceptance_length=macro_mean_acceptance_length(rows),
        num_steps=len(steps),
        shares=TimeShares.of(steps),
        ttft=Percentiles.of(ttft_seconds(rows)),
        itl=Percentiles.of(arrival_gaps(rows)),
        tpot=Percentiles.of(tpot_seconds(rows)),
        peak_memory_bytes=peak_memory_bytes,
    )


def summarise(repeats: Sequence[RepeatSummary], lossy: bool = False) -> SeriesSummary:
    """The repeats of one method at one batch size; at least one."""
    acceptance = AcceptanceCounts()
    for repeat in repeats:
        acceptance.merge(repeat.acceptance)
    memory = [repeat.peak_memory_bytes for repeat in repeats if repeat.peak_memory_bytes is not None]
    # The repeat of median speed stands for the shares: fractions of one pass add up to 1, medians of each need not.
    typical = sorted(repeats, key=lambda repeat: repeat.wall_seconds)[len(repeats) // 2]
    return SeriesSummary(
        method=typical.method,
        batch_size=typical.batch_size,
        num_requests=typical.num_requests,
        output_tokens=round(median(repeat.output_tokens for repeat in repeats)),
        wall_seconds=median(repeat.wall_seconds for repeat in repeats),
        tokens_per_second=_median([repeat.tokens_per_second for repeat in repeats]),
        decode_tokens_per_second=_median([repeat.decode_tokens_per_second for repeat in repeats]),
        acceptance=acceptance,
        macro_acceptance_rate=_median([repeat.macro_acceptance_rate for repeat in repeats]),
        macro_mean_acceptance_length=_median([repeat.macro_mean_acceptance_length for repeat in repeats]),
        shares=typical.shares,
        ttft=_median_percentiles([repeat.ttft for repeat in repeats]),
        itl=_median_percentiles([repeat.itl for repeat in repeats]),
        tpot=_median_percentiles([repeat.tpot for repeat in repeats]),
        peak_memory_bytes=max(memory, default=None),
        repeats=tuple(repeats),
        lossy=lossy,
    )


def with_speedups(series: Sequence[SeriesSummary]) -> list[SeriesSummary]:
    """The same series, each with its speed-up over plain decoding at the same batch size where that was measured."""
    plain = {one.batch_size: one.tokens_per_second for one in series if one.is_plain}
    return [one if one.is_plain else replace(one, speedup=_over(one, plain.get(one.batch_size))) for one in series]


def cost_points(curve: Sequence[tuple[int, float]]) -> list[CostPoint] | None:
    """Points of a curve of (query tokens, seconds); relative to its first point, which should be one token."""
    return [CostPoint(tokens, seconds, seconds / curve[0][1]) for tokens, seconds in curve] or None


def _over(series: SeriesSummary, plain: float | None) -> float | None:
    return series.tokens_per_second / plain if plain and series.tokens_per_second is not None else None


def _median(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return median(present) if present else None


def _median_percentiles(values: Sequence[Percentiles]) -> Percentiles:
    return Percentiles(
        _median([value.p50 for value in values]),
        _median([value.p90 for value in values]),
        _median([value.p99 for value in values]),
    )
