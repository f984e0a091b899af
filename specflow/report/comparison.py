"""Two runs side by side: what was asked for, what ran, what came out, and whether a difference is more than noise.

The noise of a quantity is what the repeats of a run show. Two runs differ in it when all repeats of one lie above all
of the other; without any difference that happens with the chance that `chance_of_disjoint` gives.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import comb
from pathlib import Path
from statistics import median
from typing import Any, Literal

from specflow.metrics.summary import PLAIN
from specflow.report.records import RunRecord
from specflow.tracking.flatten import flatten
from specflow.tracking.rows import ROWS_FILE

__all__ = ["Comparison", "Difference", "Quantity", "chance_of_disjoint", "compare"]

Verdict = Literal["same", "within noise", "differs", "one repeat"]
_IRRELEVANT = ("tracking.", "sweep.")  # a result does not depend on them
_FACTS_OF_THE_START = ("overrides", "launch_dir")
_FACTS_OF_A_RUN = ("plain decoding", "drift")  # in what really ran: when and by whom, not what

_THROUGHPUT = "throughput"
# Name, unit, and how a repeat (or series) of summary.json has it.
_QUANTITIES: tuple[tuple[str, str, Callable[[Mapping[str, Any]], float | None]], ...] = (
    (_THROUGHPUT, "tokens/s", lambda one: one["tokens_per_second"]),
    ("decoding", "tokens/s", lambda one: one["decode_tokens_per_second"]),
    ("acceptance rate", "%", lambda one: _times(100, one["acceptance"]["acceptance_rate"])),
    ("acceptance length", "", lambda one: one["acceptance"]["mean_acceptance_length"]),
    ("TTFT p50", "ms", lambda one: _times(1000, one["ttft"]["p50"])),
    ("ITL p50", "ms", lambda one: _times(1000, one["itl"]["p50"])),
    ("TPOT p50", "ms", lambda one: _times(1000, one["tpot"]["p50"])),
    ("peak memory", "MiB", lambda one: _times(2**-20, one["peak_memory_bytes"])),
)


@dataclass(frozen=True)
class Difference:
    """A setting or fact that is not the same; None where a run does not have it."""

    name: str
    first: str | None
    second: str | None


@dataclass(frozen=True)
class Quantity:
    """One measured number of both runs: the values of the repeats."""

    series: str  # e.g. "plain, batch 1"
    name: str
    unit: str
    first: tuple[float, ...]
    second: tuple[float, ...]

    @property
    def ratio(self) -> float | None:
        """Second over first, medians."""
        return median(self.second) / median(self.first) if median(self.first) else None

    @property
    def ratio_range(self) -> tuple[float, float] | None:
        """Lowest and highest ratio that two repeats make; None where a value is 0."""
        if min(self.first) <= 0:
            return None
        return min(self.second) / max(self.first), max(self.second) / min(self.first)

    @property
    def verdict(self) -> Verdict:
        """Whether the difference is more than the repeats' noise."""
        if len({*self.first, *self.second}) == 1 or self.first == self.second:
            return "same"
        if len(self.first) < 2 or len(self.second) < 2:
            return "one repeat"
        disjoint = max(self.first) < min(self.second) or max(self.second) < min(self.first)
        return "differs" if disjoint else "within noise"


@dataclass(frozen=True)
class Comparison:
    """Everything that two runs do not share, and the numbers of both."""

    first: RunRecord
    second: RunRecord
    settings: Sequence[Difference]
    ran: Sequence[Difference]  # what really ran, versions, machine
    quantities: Sequence[Quantity]
    notes: Sequence[str]

    def to_dict(self) -> dict[str, Any]:
        """Plain containers for compare.json."""
        return {
            "first": {"name": self.first.name, "folder": self.first.folder, "run_id": self.first.run_id},
            "second": {"name": self.second.name, "folder": self.second.folder, "run_id": self.second.run_id},
            "settings": [asdict(one) for one in self.settings],
            "ran": [asdict(one) for one in self.ran],
            "quantities": [
                asdict(one) | {"ratio": one.ratio, "ratio_range": one.ratio_range, "verdict": one.verdict}
                for one in self.quantities
            ],
            "notes": list(self.notes),
        }


def compare(first: RunRecord, second: RunRecord) -> Comparison:
    """Compare two runs. Series are paired by batch size: plain with plain, the drafting method with the other one."""
    quantities = list(_quantities(first, second))
    return Comparison(
        first,
        second,
        _differences(_settings(first), _settings(second)),
        _differences(_ran(first), _ran(second)),
        quantities,
        list(_notes(first, second, quantities)),
    )


def chance_of_disjoint(first: int, second: int) -> float:
    """Chance that the repeats of two equal runs do not overlap: of all orders of the values, two are like that."""
    return 2 / comb(first + second, first)


def _settings(record: RunRecord) -> dict[str, str]:
    flat = flatten(record.config)
    return {key: value for key, value in flat.items() if not key.startswith(_IRRELEVANT)}


def _ran(record: RunRecord) -> dict[str, str]:
    facts = {name: value for name, value in record.facts.items() if name not in _FACTS_OF_THE_START}
    really = {
        f"{section}: {name}": str(value)
        for section, values in record.really_ran.items()
        for name, value in values.items()
        if name not in _FACTS_OF_A_RUN
    }
    workload = {
        f"workload: {name}": str(value) for name, value in ((record.summary or {}).get("workload") or {}).items()
    }
    return {**facts, **really, **workload}


def _differences(first: Mapping[str, str], second: Mapping[str, str]) -> list[Difference]:
    names = dict.fromkeys([*first, *second])
    return [
        Difference(name, first.get(name), second.get(name)) for name in names if first.get(name) != second.get(name)
    ]


def _quantities(first: RunRecord, second: RunRecord) -> Iterator[Quantity]:
    others = {_role(series): series for series in (second.summary or {}).get("series", ())}
    for series in (first.summary or {}).get("series", ()):
        other = others.get(_role(series))
        if other is None:
            continue
        same = series["method"] == other["method"]
        method = series["method"] if same else f"{series['method']} / {other['method']}"
        title = f"{method}, batch {series['batch_size']}"
        gains = _gains(first, series), _gains(second, other)
        if all(gains):
            yield Quantity(title, "speed-up", "×", *gains)
        for name, unit, read in _QUANTITIES:
            ours, theirs = _values(series, read), _values(other, read)
            if ours and theirs:
                yield Quantity(title, name, unit, ours, theirs)


def _gains(record: RunRecord, series: Mapping[str, Any]) -> tuple[float, ...]:
    """Speed-up of each repeat over the median of plain decoding in the same run; none for plain decoding itself."""
    every = (record.summary or {}).get("series", ())
    plain = [one for one in every if one["method"] == PLAIN and one["batch_size"] == series["batch_size"]]
    if series["method"] == PLAIN or not plain or not plain[0]["tokens_per_second"]:
        return ()
    return tuple(value / plain[0]["tokens_per_second"] for value in _values(series, _QUANTITIES[0][2]))


def _role(series: Mapping[str, Any]) -> tuple[bool, int]:
    return series["method"] == PLAIN, series["batch_size"]


def _values(series: Mapping[str, Any], read: Callable[[Mapping[str, Any]], float | None]) -> tuple[float, ...]:
    found = (read(repeat) for repeat in series["repeats"])
    return tuple(value for value in found if value is not None)


def _times(factor: float, value: float | None) -> float | None:
    return None if value is None else factor * value


def _notes(first: RunRecord, second: RunRecord, quantities: Sequence[Quantity]) -> Iterator[str]:
    for record in (first, second):
        if record.status != "finished":
            yield f"{record.name}: {record.status}{f': {record.reason}' if record.reason else ''}"
        if record.summary is None:
            yield f"{record.name} has no summary.json: there are no results to compare"
    for one in quantities:
        if one.series.startswith(PLAIN) and one.name == _THROUGHPUT and one.verdict == "differs":
            yield (
                f"{one.series}: plain decoding itself differs ({one.ratio:.2f}×): the machine or the target's part is "
                "not the same, so compare speed-ups, not throughputs"
            )
    yield from _outputs(first, second)
    repeats = {(len(one.first), len(one.second)) for one in quantities if one.verdict in ("differs", "within noise")}
    for ours, theirs in sorted(repeats):
        yield (
            f"noise: with {ours} and {theirs} repeats, two equal runs have repeats that do not overlap in "
            f"{100 * chance_of_disjoint(ours, theirs):.2g} % of all comparisons"
        )


def _outputs(first: RunRecord, second: RunRecord) -> Iterator[str]:
    """Whether both gave the same tokens to requests of the same name at the same batch size."""
    ours, theirs = _tokens(Path(first.folder)), _tokens(Path(second.folder))
    shared = ours.keys() & theirs.keys()
    if shared:
        equal = sum(ours[key] == theirs[key] for key in shared)
        yield f"output tokens: equal in {equal} of {len(shared)} requests that both runs have"


def _tokens(folder: Path) -> dict[tuple[bool, int, str], Any]:
    """Output tokens of the first repeat by role, batch size and request; empty when the rows are not there."""
    file = folder / ROWS_FILE
    if not file.is_file():
        return {}
    with file.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    return {
        (row["method"] == PLAIN, row["batch_size"], row["request_id"]): row["token_ids"]
        for row in rows
        if row["repeat"] == 0
    }
