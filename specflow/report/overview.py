"""Many runs on one page: the answer, the table, the plots, what failed, what really ran.

Sweeps, `task=report` and whatever else has records of runs are shown by this one page.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from specflow.errors import StorageError
from specflow.metrics.summary import UNSTEADY
from specflow.report import wording
from specflow.report.answers import Answer, answers_of, slower_than_plain
from specflow.report.figure import png_width
from specflow.report.html import inline, render
from specflow.report.records import RunRecord
from specflow.report.rows import ResultRow, csv_text, rows_of
from specflow.report.sweep_plots import PLOTS

__all__ = ["HTML_FILE", "Overview", "write_overview"]

HTML_FILE, CSV_FILE, JSON_FILE = "results.html", "results.csv", "results.json"
_SCHEMA = 1  # of results.json
_WIDE = 1400  # pixels: a picture of more than one panel gets a row of the page for itself


@dataclass(frozen=True)
class Overview:
    """Runs with what they have in common."""

    title: str
    records: Sequence[RunRecord]
    command: str = ""
    notes: Sequence[str] = ()  # sentences that belong beside the numbers
    more_rows: Sequence[ResultRow] = ()  # of other engines, which have no record here
    rows: Sequence[ResultRow] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", [*rows_of(self.records), *self.more_rows])

    @property
    def failed(self) -> list[RunRecord]:
        """Runs that did not finish."""
        return [record for record in self.records if record.status != "finished"]

    def failures(self) -> dict[str, list[str]]:
        """Names of the runs that did not finish, by the reason."""
        found: dict[str, list[str]] = {}
        for record in self.failed:
            reason = record.reason or f"the run ended as {record.status!r} without a reason"
            found.setdefault(reason, []).append(record.name)
        return found

    @property
    def answers(self) -> list[Answer]:
        """The fastest row of every condition and batch size."""
        return answers_of(self.rows)

    def warnings(self) -> list[str]:
        """What has to stand beside the numbers."""
        return [*self._lossless(), *self._slower(), *self._unsteady(), *_at_the_same_time(self.records), *self.notes]

    def _lossless(self) -> list[str]:
        changed = [f"{row.label}, batch {row.batch_size}" for row in self.rows if row.lossless == "failed"]
        lossy = sorted({row.label for row in self.rows if row.lossy})
        found = [f"output differs from plain decoding: {_some(changed)}"] if changed else []
        return found + ([f"lossy by design, so never the answer: {_some(lossy)}"] if lossy else [])

    def _slower(self) -> list[str]:
        slower = slower_than_plain(self.rows)
        named = [f"{row.label}, batch {row.batch_size} ({wording.times(row.speedup)})" for row in slower]
        return [f"slower than plain: {_some(named)}"] if slower else []

    def _unsteady(self) -> list[str]:
        unsteady = [row for row in self.rows if row.range and row.range[1] > UNSTEADY * row.range[0]]
        named = [f"{row.label}, batch {row.batch_size}" for row in unsteady]
        return [f"repeats too different for a comparison (more than {UNSTEADY}×): {_some(named)}"] if named else []

    def common_facts(self) -> dict[str, dict[str, str]]:
        """What really ran, as far as it is the same in every run that says it."""
        sections: dict[str, dict[str, set[str]]] = {}
        for record in self.records:
            for section, facts in record.really_ran.items():
                for name, value in facts.items():
                    sections.setdefault(section, {}).setdefault(name, set()).add(str(value))
        common = {
            section: {name: next(iter(values)) for name, values in facts.items() if len(values) == 1}
            for section, facts in sections.items()
            if section != "proposer"
        }
        return {section: facts for section, facts in common.items() if facts}

    def machine(self) -> dict[str, str]:
        """Versions and machine, as far as they are the same in every run."""
        every = [record.facts for record in self.records if record.facts]
        names = every[0] if every else {}
        return {
            name: value
            for name, value in names.items()
            if name != "overrides" and all(facts.get(name) == value for facts in every)
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain containers for results.json."""
        return {
            "schema": _SCHEMA,
            "title": self.title,
            "command": self.command,
            "answers": [_answer(one) for one in self.answers],
            "warnings": self.warnings(),
            "rows": [asdict(row) for row in self.rows],
            "runs": [_run(record) for record in self.records],
        }


def write_overview(overview: Overview, folder: Path) -> Path:
    """Write page, tables and plots into the folder, made if need be; returns the page. Raises `StorageError`."""
    pictures = {
        name: (title, plot(overview.rows, False), plot(overview.rows, True)) for name, (title, plot) in PLOTS.items()
    }
    files: dict[str, bytes] = {name: light for name, (_, light, _) in pictures.items() if light is not None}
    files[CSV_FILE] = csv_text(overview.rows).encode()
    files[JSON_FILE] = json.dumps(overview.to_dict(), indent=1, ensure_ascii=False, default=str).encode()
    files[HTML_FILE] = _page(overview, pictures).encode()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in set(PLOTS) - set(files):
            (folder / name).unlink(missing_ok=True)  # of an earlier, larger report
        for name, content in files.items():
            partial = folder / f".{name}.partial"
            partial.write_bytes(content)
            partial.replace(folder / name)
    except OSError as error:
        raise StorageError(f"cannot write the report: {error.filename or folder}: {error.strerror or error}") from error
    return folder / HTML_FILE


def _page(overview: Overview, pictures: Mapping[str, tuple[str, bytes | None, bytes | None]]) -> str:
    answers = overview.answers
    conditions = [answer.condition for answer in answers]
    best = {id(answer.best) for answer in answers}
    drawn = [
        {"title": title, "light": inline(light), "dark": inline(dark), "wide": png_width(light) > _WIDE}
        for title, light, dark in pictures.values()
        if light and dark
    ]
    return render(
        "overview.html.j2",
        overview=overview,
        answers=[(answer, answer.condition.words(conditions)) for answer in answers],
        several=len(set(conditions)) > 1,
        rows=[(row, row.condition.words(conditions), id(row) in best) for row in overview.rows],
        plots=drawn,
        most_speedup=max((row.speedup or 0.0 for row in overview.rows), default=1.0) or 1.0,
        facts=overview.common_facts(),
        machine=overview.machine(),
    )


def _answer(answer: Answer) -> dict[str, Any]:
    return {
        **asdict(answer.condition),
        "batch_size": answer.batch_size,
        "speculate": answer.speculate,
        "best": answer.best.label,
        "tokens_per_second": answer.best.tokens_per_second,
        "speedup": answer.best.speedup,
        "within_noise": [row.label for row in answer.close],
        "sentence": answer.sentence(),
    }


def _run(record: RunRecord) -> dict[str, Any]:
    return {
        "name": record.name,
        "status": record.status,
        "reason": record.reason,
        "folder": record.folder,
        "run_id": record.run_id,
    }


def _at_the_same_time(records: Sequence[RunRecord]) -> list[str]:
    """A warning when jobs shared a machine: their speeds are not those of a job alone."""
    spans = sorted(
        (str(job["host"]), float(job["started"]), float(job["finished"]))
        for job in (record.job for record in records)
        if {"host", "started", "finished"} <= set(job)
    )
    shared = sorted({first[0] for first, second in pairwise(spans) if first[0] == second[0] and second[1] < first[2]})
    return [f"jobs ran at the same time on {host}: they slowed each other down" for host in shared]


def _some(words: Sequence[str], most: int = 6) -> str:
    shown = "; ".join(words[:most])
    return shown if len(words) <= most else f"{shown}; and {len(words) - most} more"
