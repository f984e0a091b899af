"""One table for many runs: a row per engine, method, draft length, batch size and conditions.

Rows are plain data with everything that tables, plots and pages show. Those of other engines stand beside ours when
they are given the same fields; nothing here asks where a row comes from.
"""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from specflow.metrics.summary import PLAIN
from specflow.report.records import RunRecord
from specflow.tracking.flatten import flatten

__all__ = ["ENGINE", "Condition", "ResultRow", "csv_text", "rows_of"]

ENGINE = "specflow"
_NAMED = ("name", "num_speculative_tokens")  # options of a proposer that a row shows by themselves
_IRRELEVANT = ("tracking.", "sweep.", "task.", "objective")  # no result depends on these


@dataclass(frozen=True, order=True)
class Condition:
    """What has to be equal for two rows to be compared with the same baseline, besides the batch size."""

    target: str
    workload: str
    backend: str
    options: str = ""  # of sampling, sampler, scheduler and the run itself that differ among the runs

    def words(self, among: Iterable["Condition"]) -> str:
        """The parts of it that differ among the conditions; the workload when none does."""
        every = list(among)
        differing = [
            getattr(self, one.name) for one in fields(self) if len({getattr(each, one.name) for each in every}) > 1
        ]
        return " · ".join(filter(None, differing)) or self.workload


@dataclass(frozen=True, kw_only=True)
class ResultRow:
    """One method at one draft length and batch size under one condition. Times in seconds, rates in 0 … 1."""

    run: str  # name of the run it is from
    method: str
    num_speculative_tokens: int | None  # K; 0 for plain decoding, None where the method has no such number
    batch_size: int
    condition: Condition
    engine: str = ENGINE
    settings: Mapping[str, str] = field(default_factory=dict)  # options of the method that differ among the runs
    tokens_per_second: float | None = None
    tokens_per_second_repeats: tuple[float, ...] = ()
    speedup: float | None = None  # over plain decoding
    speedup_range: tuple[float, float] | None = None  # slowest repeat over plain's fastest, and the reverse
    acceptance_rate: float | None = None
    mean_acceptance_length: float | None = None
    acceptance_unconditional: tuple[float, ...] = ()  # by draft position
    acceptance_conditional: tuple[float | None, ...] = ()
    ttft_p50: float | None = None
    itl_p50: float | None = None
    itl_p99: float | None = None
    tpot_p50: float | None = None
    peak_memory_bytes: int | None = None
    lossless: str = "not_applicable"  # status of the verdict
    lossy: bool = False

    @property
    def is_plain(self) -> bool:
        """True for decoding without drafts."""
        return self.method == PLAIN

    @property
    def variant(self) -> str:
        """The line of a plot that the row belongs to: everything but draft length, batch size and condition."""
        name = self.method if self.engine == ENGINE else f"{self.engine} {self.method}"
        return " ".join([name, *(f"{key}={value}" for key, value in self.settings.items())])

    @property
    def label(self) -> str:
        """E.g. "dflash K=5"."""
        length = self.num_speculative_tokens
        return self.variant if self.is_plain or length is None else f"{self.variant} K={length}"

    @property
    def range(self) -> tuple[float, float] | None:
        """Slowest and fastest repeat in tokens per second: the noise; None with fewer than two."""
        values = self.tokens_per_second_repeats
        return (min(values), max(values)) if len(values) > 1 else None


def rows_of(records: Sequence[RunRecord]) -> list[ResultRow]:
    """Rows of all runs that have results. Plain decoding that several runs share is one row."""
    rows: dict[Any, ResultRow] = {}
    for number, (record, place) in enumerate(zip(records, _places(records), strict=True)):
        for row in _rows(record, *place):
            shared = (
                (row.engine, row.condition, row.batch_size, row.tokens_per_second_repeats) if row.is_plain else None
            )
            rows.setdefault(shared or (number, row.method, row.batch_size), row)
    ordered = sorted(
        enumerate(rows.values()),
        key=lambda item: (item[1].condition, item[1].batch_size, not item[1].is_plain, item[0]),
    )
    return [row for _, row in ordered]


def _rows(record: RunRecord, condition: Condition, settings: Mapping[str, str]) -> list[ResultRow]:
    summary = record.summary or {}
    plain = {one["batch_size"]: _speeds(one) for one in summary.get("series", ()) if one["method"] == PLAIN}
    verdict = summary.get("lossless", {}).get("status", "not_applicable")
    return [
        _row(record, series, condition, {} if series["method"] == PLAIN else settings, plain, verdict)
        for series in summary.get("series", ())
    ]


def _row(
    record: RunRecord,
    series: Mapping[str, Any],
    condition: Condition,
    settings: Mapping[str, str],
    plain: Mapping[int, tuple[float, ...]],
    verdict: str,
) -> ResultRow:
    is_plain, speeds = series["method"] == PLAIN, _speeds(series)
    counts = {} if is_plain else series["acceptance"]
    return ResultRow(
        run=record.name,
        method=series["method"],
        engine=str((record.config.get("engine") or {}).get("name", ENGINE)),
        num_speculative_tokens=0 if is_plain else _draft_length(record.config),
        batch_size=series["batch_size"],
        condition=condition,
        settings=settings,
        tokens_per_second=series["tokens_per_second"],
        tokens_per_second_repeats=speeds,
        speedup=1.0 if is_plain else series["speedup"],
        speedup_range=None if is_plain else _ratio_range(speeds, plain.get(series["batch_size"], ())),
        acceptance_rate=counts.get("acceptance_rate"),
        mean_acceptance_length=counts.get("mean_acceptance_length"),
        acceptance_unconditional=tuple(counts.get("per_position_unconditional", ())),
        acceptance_conditional=tuple(counts.get("per_position_conditional", ())),
        ttft_p50=series["ttft"]["p50"],
        itl_p50=series["itl"]["p50"],
        itl_p99=series["itl"]["p99"],
        tpot_p50=series["tpot"]["p50"],
        peak_memory_bytes=series["peak_memory_bytes"],
        lossless="not_applicable" if is_plain else verdict,
        lossy=bool(series.get("lossy")),
    )


def _speeds(series: Mapping[str, Any]) -> tuple[float, ...]:
    found = (repeat["tokens_per_second"] for repeat in series["repeats"])
    return tuple(value for value in found if value is not None)


def _ratio_range(ours: Sequence[float], plain: Sequence[float]) -> tuple[float, float] | None:
    if len(ours) < 2 or len(plain) < 2:
        return None
    return min(ours) / max(plain), max(ours) / min(plain)


def _draft_length(config: Mapping[str, Any]) -> int | None:
    found = (config.get("proposer") or {}).get("num_speculative_tokens")
    return found if isinstance(found, int) else None


def _places(records: Sequence[RunRecord]) -> list[tuple[Condition, dict[str, str]]]:
    """For each run its condition, and the options of its method that differ among runs of the method."""
    methods = [str((record.config.get("proposer") or {}).get("name")) for record in records]
    settings = _differing(records, "proposer", methods)
    targets = _differing(records, "target", [_name(record, "target") for record in records])
    workloads = _differing(records, "workload", [_name(record, "workload") for record in records])
    others = _differing(records, None, ["" for _ in records])
    return [
        (
            Condition(
                target=_title(record, "target", target),
                workload=_title(record, "workload", workload),
                backend=_backend(record),
                options=" ".join(f"{key}={value}" for key, value in other.items()),
            ),
            {key: value for key, value in own.items() if key not in _NAMED},
        )
        for record, own, target, workload, other in zip(records, settings, targets, workloads, others, strict=True)
    ]


def _name(record: RunRecord, group: str) -> str:
    return str((record.config.get(group) or {}).get("name", "?"))


def _backend(record: RunRecord) -> str:
    """What really ran where the report says it: `auto` chose a device."""
    return str(record.really_ran.get("backend", {}).get("backend") or _name(record, "backend"))


def _title(record: RunRecord, group: str, differing: Mapping[str, str]) -> str:
    """The last part of a path, else the name, with the options that tell it from others of the name."""
    path = str((record.config.get(group) or {}).get("path") or "").rstrip("/")
    first = path.rpartition("/")[2] or _name(record, group)
    return " ".join([first, *(f"{key}={value}" for key, value in differing.items() if key != "path")])


def _differing(records: Sequence[RunRecord], group: str | None, kinds: Sequence[str]) -> list[dict[str, str]]:
    """For each run the options that differ among runs of the same kind: of one group, or (None) of no group that has
    a place of its own in a row."""
    flat = [_options(record.config, group) for record in records]
    found = []
    for own, kind in zip(flat, kinds, strict=True):
        alike = [other for other, its in zip(flat, kinds, strict=True) if its == kind]
        keys = (key for key in own if len({other.get(key) for other in alike}) > 1)
        found.append({key: own[key] for key in keys})
    return found


def _options(config: Mapping[str, Any], group: str | None) -> dict[str, str]:
    if group is not None:
        return flatten(config.get(group) or {})
    placed = ("proposer", "target.", "workload.", "backend.", "engine", *_IRRELEVANT)
    return {key: value for key, value in flatten(config).items() if not key.startswith(placed)}


def csv_text(rows: Iterable[ResultRow]) -> str:
    """One line per row; acceptance by position in as many columns as the longest drafts need."""
    every = list(rows)
    positions = max((len(row.acceptance_unconditional) for row in every), default=0)
    buffer = io.StringIO()
    lines = [_flat(row, positions) for row in every]
    writer = csv.DictWriter(buffer, list(lines[0]) if lines else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return buffer.getvalue()


def _flat(row: ResultRow, positions: int) -> dict[str, Any]:
    data = asdict(row)
    condition, speeds = data.pop("condition"), row.range or (None, None)
    low, high = row.speedup_range or (None, None)
    unconditional, conditional = data.pop("acceptance_unconditional"), data.pop("acceptance_conditional")
    del data["tokens_per_second_repeats"], data["speedup_range"]
    flat = condition | data | {"settings": " ".join(f"{key}={value}" for key, value in row.settings.items())}
    flat |= {"tokens_per_second_slowest": speeds[0], "tokens_per_second_fastest": speeds[1]}
    flat |= {"repeats": len(row.tokens_per_second_repeats), "speedup_low": low, "speedup_high": high}
    for name, values in (("unconditional", unconditional), ("conditional", conditional)):
        padded = [*values, *[None] * (positions - len(values))]
        flat |= {f"acceptance_{name}_{index}": value for index, value in enumerate(padded)}
    return flat
