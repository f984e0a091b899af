"""The jobs of a sweep on disk: what identifies one, what is known of it, which need not be run again."""

import hashlib
import json
import platform
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specflow.errors import StorageError
from specflow.report.records import JOB_FILE, RunRecord, read_record, run_folders
from specflow.sweep.objective import objective

__all__ = ["Job", "finished_jobs", "job_key", "put_aside", "write_job"]

_OF_NO_RESULT = ("tracking", "sweep")  # groups that do not change what a job finds out


@dataclass(frozen=True)
class Job:
    """One job; the content of its job.json, which is written when everything else of it is."""

    key: str
    number: int
    overrides: tuple[str, ...]
    status: str  # finished, failed, killed
    reason: str | None
    objective: float | None
    started: float  # seconds since 1970
    finished: float
    host: str = platform.node()


def job_key(config: Mapping[str, Any]) -> str:
    """The same for two jobs that do the same: a hash of the composition."""
    kept = {name: value for name, value in config.items() if name not in _OF_NO_RESULT}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:16]


def write_job(job: Job, folder: Path) -> None:
    """Write job.json whole or not at all. Raises `StorageError`."""
    partial = folder / f".{JOB_FILE}.partial"
    try:
        partial.write_text(json.dumps(asdict(job), indent=1, ensure_ascii=False), encoding="utf-8")
        partial.replace(folder / JOB_FILE)
    except OSError as error:
        raise StorageError(f"cannot write {folder / JOB_FILE}: {error.strerror or error}") from error


def finished_jobs(folder: Path, tracked: Mapping[str, str] | None) -> dict[str, float | None]:
    """Objectives, by key, of the jobs in a sweep's folder that need not be run again.

    tracked: status of the tracker's runs by output folder; None without a tracker. A job counts when its job.json says
    so, or when its process died between the end of its run and job.json: then run.json and the tracker both say so.
    """
    found: dict[str, float | None] = {}
    for run in run_folders(folder):
        record = read_record(run)
        if record.job:
            if record.job.get("status") == "finished":
                found[str(record.job["key"])] = record.job.get("objective")
        elif record.status == "finished" and (tracked is None or tracked.get(str(run)) == "finished"):
            job = _completed(record)
            write_job(job, run)
            found[job.key] = job.objective
    return found


def _completed(record: RunRecord) -> Job:
    """The job.json that was not written any more."""
    now = time.time()
    number = Path(record.folder).name.partition("-")[0]
    value = objective((record.summary or {}).get("metrics", {}), record.config.get("objective"))
    return Job(
        key=job_key(record.config),
        number=int(number) if number.isdigit() else -1,
        overrides=tuple(str(record.facts.get("overrides", "")).split()),
        status="finished",
        reason=None,
        objective=value,
        started=now,
        finished=now,
    )


def put_aside(folder: Path) -> Path | None:
    """Move what an earlier attempt left in a job's folder to `attempts/` beside it; None when there is nothing.

    A killed run has half of its rows: they are kept, but not mixed with those of the next attempt. Hydra's own files
    are already those of the next one.
    """
    left = [file for file in folder.iterdir() if file.name != ".hydra"] if folder.is_dir() else []
    if not left:
        return None
    number = 1
    while (aside := folder.parent / "attempts" / f"{folder.name}-{number}").exists():
        number += 1
    try:
        aside.mkdir(parents=True)
        for file in left:
            shutil.move(file, aside / file.name)
    except OSError as error:
        raise StorageError(f"cannot move an earlier attempt to {aside}: {error.strerror or error}") from error
    return aside
