"""The end of a sweep: its jobs' folders read, the page written, the tracker told."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specflow.report.overview import Overview, write_overview
from specflow.report.records import RunRecord, read_record, run_folders
from specflow.sweep.folder import SWEEP_FILE, SweepFolder
from specflow.sweep.objective import lower_is_better
from specflow.tracking.base import SweepTracker
from specflow.tracking.events import SweepFinished

__all__ = ["SweepResult", "summarise_sweep"]


@dataclass(frozen=True)
class SweepResult:
    """What a sweep came to."""

    overview: Overview
    page: Path | None  # None when no run has results to show
    failed: Sequence[RunRecord]


def summarise_sweep(
    folder: SweepFolder,
    tracker: SweepTracker | None,
    command: str,
    wanted: str | None,
    ended_by: BaseException | None = None,
) -> SweepResult:
    """Write results.html, .csv and .json with the plots, and end the tracker's run above the jobs.

    wanted: the objective's name, if one was named. ended_by: what ended the sweep before its last job, if anything did.
    Raises `StorageError`.
    """
    records = _records(folder.path, tracker)
    overview = Overview(f"Sweep of {len(records)} runs", records, command, _notes(records))
    page = write_overview(overview, folder.path) if records else None
    failed = overview.failed
    status = "finished" if records and not failed else "failed"
    if ended_by is not None:
        status = "failed" if isinstance(ended_by, Exception) else "killed"
    folder.save(status)
    if tracker is not None:
        reason = f"{len(failed)} of {len(records)} jobs did not finish" if failed else None
        if ended_by is not None:
            reason = str(ended_by) or type(ended_by).__name__
        files = [] if page is None else [file for file in sorted(folder.path.iterdir()) if file.is_file()]
        tracker.finish(
            SweepFinished(
                status=status,
                reason=reason,
                metrics=_metrics(records, wanted),
                tags=_tags(overview, records, wanted),
                files=[file for file in files if not file.name.startswith(".") and file.name != SWEEP_FILE],
            )
        )
    return SweepResult(overview, page, failed)


def _records(folder: Path, tracker: SweepTracker | None) -> list[RunRecord]:
    """The jobs, each with the tracker's id of its last attempt. Their names are their overrides."""
    ids = {run.output_dir: run.run_id for run in tracker.runs()} if tracker is not None else {}
    return [
        replace(record, run_id=ids.get(record.folder), folder=Path(record.folder).name)
        for record in map(read_record, run_folders(folder))
    ]


def _notes(records: Sequence[RunRecord]) -> list[str]:
    """How plain decoding was measured, and where the machine changed its speed since."""
    ran = [(one.name, one.really_ran.get("run", {})) for one in records]
    reused = sum("plain decoding" in facts for _, facts in ran)
    notes = [
        f"{reused} of {len(records)} runs compare with plain decoding as another run of the sweep measured it, on a "
        "machine as fast as then within 10 % (sweep.reuse_baseline=false: every run measures it)"
    ]
    return [*(notes if reused else []), *(f"{name}: {facts['drift']}" for name, facts in ran if "drift" in facts)]


def _best(records: Sequence[RunRecord], wanted: str | None) -> RunRecord | None:
    scored = [record for record in records if record.status == "finished" and _score(record) is not None]
    choose = min if lower_is_better(wanted) else max
    return choose(scored, key=lambda record: _score(record) or 0.0) if scored else None


def _score(record: RunRecord) -> float | None:
    found = record.job.get("objective")
    return float(found) if isinstance(found, int | float) else None


def _metrics(records: Sequence[RunRecord], wanted: str | None) -> dict[str, float]:
    best = _best(records, wanted)
    finished = sum(record.status == "finished" for record in records)
    metrics = {"jobs": float(len(records)), "finished_jobs": float(finished)}
    return metrics | ({} if best is None else {"best_objective": _score(best) or 0.0})


def _tags(overview: Overview, records: Sequence[RunRecord], wanted: str | None) -> Mapping[str, str]:
    """The best job, every failed one, and the answer as the run's description."""
    tags = {f"failed.{number}": f"{one.name}: {one.reason}" for number, one in enumerate(overview.failed)}
    best = _best(records, wanted)
    if best is not None:
        tags |= {"best_run": best.name} | ({"best_run_id": best.run_id} if best.run_id else {})
    lines = [f"batch {answer.batch_size}: {answer.sentence()}" for answer in overview.answers]
    return tags | ({"mlflow.note.content": "  \n".join(lines)} if lines else {})
