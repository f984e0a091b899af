"""Folders of made-up runs: what a sweep leaves, without decoding anything."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from specflow.metrics.summary import BenchSummary
from tests.report import scenario

CONFIG: dict[str, Any] = {
    "target": {"name": "bundled", "dtype": "float32"},
    "sampler": {"name": "standard"},
    "scheduler": {"name": "continuous", "max_num_seqs": 16},
    "backend": {"name": "auto"},
    "workload": {"name": "bundled", "limit": 8},
    "task": {"name": "bench", "repeats": 3},
    "tracking": {"name": "mlflow", "parent_run_id": None},
    "sampling": {"temperature": 0.0, "max_tokens": 16},
    "seed": 0,
}


def config(method: str | None, length: int = 3, **groups: Any) -> dict[str, Any]:
    """A composition; groups replace those of `CONFIG`, options of the proposer go under `proposer`."""
    options = groups.pop("proposer", {})
    proposer = None if method is None else {"name": method, "num_speculative_tokens": length, **options}
    return {**CONFIG, "proposer": proposer, **groups}


def faster(summary: BenchSummary, factor: float) -> BenchSummary:
    """The same run with everything that is not plain decoding so much faster."""
    series = [one if one.is_plain else _faster(one, factor) for one in summary.series]
    return replace(summary, series=series)


def _faster(one: Any, factor: float) -> Any:
    repeats = tuple(replace(each, tokens_per_second=each.tokens_per_second * factor) for each in one.repeats)
    speed = one.tokens_per_second * factor
    return replace(one, repeats=repeats, tokens_per_second=speed, speedup=one.speedup * factor)


def write_run(
    folder: Path,
    composition: dict[str, Any],
    summary: BenchSummary | None = None,
    status: str = "finished",
    reason: str | None = None,
    job: dict[str, Any] | None = None,
) -> Path:
    """A run's folder; returns it."""
    folder.mkdir(parents=True)
    proposer = composition["proposer"] or {}
    name = " ".join(f"{key}={value}" for key, value in proposer.items()) or "plain"
    facts = {**scenario.FACTS, "overrides": name}
    (folder / "run.json").write_text(json.dumps({"name": name, "status": status, "reason": reason, "facts": facts}))
    (folder / "config.yaml").write_text(yaml.safe_dump(composition))
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary.to_dict()))
    if job is not None:
        (folder / "job.json").write_text(json.dumps(job))
    return folder


def write_sweep(folder: Path, methods: Sequence[str] = ("ngram", "suffix"), lengths: Sequence[int] = (3, 5)) -> Path:
    """A sweep whose later methods and longer drafts are faster; its last job has failed."""
    number = 0
    for place, method in enumerate(methods):
        for length in lengths:
            summary = faster(scenario.summary((method,)), 1 + 0.5 * place + 0.05 * length)
            write_run(folder / f"{number}-{method}", config(method, length), summary)
            number += 1
    write_run(folder / f"{number}-eagle3", config("eagle3"), status="failed", reason="no head is bundled.\nTrain one.")
    return folder
