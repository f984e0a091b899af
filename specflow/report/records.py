"""Finished runs read back from their folders: what sweeps, reports and comparisons are made from."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from specflow.errors import StorageError

__all__ = ["JOB_FILE", "RunRecord", "read_record", "run_folders"]

RUN_FILE, SUMMARY_FILE, CONFIG_FILE = "run.json", "summary.json", "config.yaml"
JOB_FILE = "job.json"  # of a job of a sweep, written last


@dataclass(frozen=True)
class RunRecord:
    """One run: what was asked for, what came out."""

    name: str  # e.g. "ngram on bundled", or the overrides of a job of a sweep
    status: str  # finished, failed, killed; running for a run that ended without a word
    reason: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)
    summary: Mapping[str, Any] | None = None  # summary.json; None when the run has none
    folder: str = ""  # as the reader of a report can find it
    run_id: str | None = None  # of the tracker
    job: Mapping[str, Any] = field(default_factory=dict)  # job.json of a sweep

    @property
    def really_ran(self) -> Mapping[str, Mapping[str, str]]:
        """The report's part of this name; empty without a summary."""
        return (self.summary or {}).get("really_ran", {})


def read_record(folder: Path, run_id: str | None = None) -> RunRecord:
    """The record of a run's folder. Raises `StorageError` when it holds no run or a file of it is damaged."""
    run = _json(folder / RUN_FILE)
    if run is None:
        raise StorageError(f"{folder} holds no run: there is no {RUN_FILE} in it.")
    job = _json(folder / JOB_FILE) or {}
    if job.get("status") == "failed":  # what failed may have come after the run's own end
        run |= {"status": "failed", "reason": job.get("reason")}
    return RunRecord(
        name=str(run.get("name", folder.name)),
        status=str(run.get("status", "running")),
        reason=run.get("reason"),
        config=_config(folder / CONFIG_FILE),
        facts=run.get("facts", {}),
        summary=_json(folder / SUMMARY_FILE),
        folder=str(folder),
        run_id=run_id,
        job=job,
    )


def run_folders(folder: Path) -> list[Path]:
    """The folder itself when it is a run's, else those of runs right inside it (a sweep), by number of job."""
    if (folder / RUN_FILE).is_file():
        return [folder]
    return sorted((file.parent for file in folder.glob(f"*/{RUN_FILE}")), key=_by_number)


def _by_number(folder: Path) -> tuple[int, str]:
    number = folder.name.partition("-")[0]
    return (int(number) if number.isdigit() else 2**31, folder.name)


def _json(file: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise StorageError(f"{file} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise StorageError(f"{file} cannot be read: it holds no object.")
    return found


def _config(file: Path) -> Mapping[str, Any]:
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, yaml.YAMLError) as error:
        raise StorageError(f"{file} cannot be read: {error}") from error
    return found if isinstance(found, dict) else {}
