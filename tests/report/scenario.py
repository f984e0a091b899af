"""A made-up run that touches every part of a report: methods, batch sizes, repeats, alternating series."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specflow.metrics.summary import (
    BenchSummary,
    LosslessVerdict,
    SeriesSummary,
    cost_points,
    summarise,
    summarise_repeat,
    with_speedups,
)
from specflow.tracking.events import RequestRow, RunFinished, RunStarted, Series, StepRecord

FACTS = {
    "specflow": "0.1.0",
    "python": "3.11.7",
    "torch": "2.13.0",
    "transformers": "5.17.0",
    "commit": "0123456789abcdef",
    "commit dirty": "false",
    "cpus": "2",
}
REALLY_RAN = {
    "target": {
        "model": "bundled",
        "target": "bundled (Qwen3ForCausalLM)",
        "parameters": "7.3M",
        "dtype": "float32",
        "attention": "torch (paged)",
    },
    "proposer": {"method": "ngram", "drafts": "at most 4"},
    "sampler": {"method": "standard", "lossless": "yes"},
    "scheduler": {"method": "continuous", "KV blocks": "1024 of 16 tokens"},
    "backend": {"device": "cpu", "threads": "2"},
    "measurement": {"warm-up requests": "2", "repeats": "3", "seed": "0"},
}
WORKLOAD = {"source": "specflow/workloads/data/bundled.jsonl", "prompts": "4 of 16", "sha256": "5f0c" * 16}


def started(folder: Path, **config: Any) -> RunStarted:
    """The first event."""
    composition = {"proposer": {"name": "ngram", "num_speculative_tokens": 4}, "seed": 0, **config}
    return RunStarted("bench", "ngram on bundled", composition, folder, {**FACTS, "launch_dir": str(folder)})


def series(method: str, batch: int, repeat: int = 0, warmup: bool = False) -> Series:
    """One series of four requests of 16 tokens."""
    return Series(f"{method}, batch {batch}", method, batch, 4, warmup, repeat, 3, 16)


def step(
    index: int, drafted: tuple[int, ...], accepted: tuple[int, ...], seconds: float, prompt: int = 0
) -> StepRecord:
    """One step; requests without drafts emit one token."""
    emitted = sum(accepted) + max(1, len(drafted))
    return StepRecord(
        index, max(1, len(drafted)), emitted + prompt, prompt, emitted, drafted, accepted,
        seconds * 0.7, seconds * 0.05, seconds * (0.15 if drafted else 0), seconds,
    )  # fmt: skip


def steps(method: str, batch: int, count: int = 60) -> list[StepRecord]:
    """Steps with K=4 and acceptance of about 0.6 per position; plain ones without drafts."""
    draw = random.Random(f"{method}{batch}")
    records = []
    for index in range(count):
        drafted = () if method == "plain" else (4,) * batch
        accepted = tuple(next((i for i in range(4) if draw.random() > 0.6), 4) for _ in drafted)
        seconds = (0.004 if method == "plain" else 0.0065) * (1 + 0.1 * batch) * draw.uniform(0.9, 1.1)
        record = step(index, drafted, accepted, seconds, prompt=32 * (index == 0))
        records.append(record if drafted else StepRecord(**{**vars(record), "num_emitted": batch}))
    return records


def row(method: str, batch: int, number: int = 0, repeat: int = 0) -> RequestRow:
    """A finished request of 16 tokens."""
    plain = method == "plain"
    gaps = (0.004,) * 15 if plain else (0.007, 0.0, 0.0) * 5
    return RequestRow(
        f"{method}, batch {batch}", method, batch, repeat, f"heapq-{number}", 32, 16, "length", 0.012 + 0.003 * number,
        0.1, gaps, 0 if plain else 6, 0 if plain else 24, 0 if plain else 10, tuple(range(16)),
        "    def __init__(self, iterable=()):\n        self.heap = list(iterable)\n",
    )  # fmt: skip


def measured(method: str, batch: int, lossy: bool = False) -> SeriesSummary:
    """Three repeats of one method at one batch size."""
    repeats = []
    for repeat in range(3):
        records = steps(method, batch)
        seconds = sum(record.total_seconds for record in records) * (1 + 0.02 * repeat)
        rows = [row(method, batch, number, repeat) for number in range(4)]
        tokens = sum(record.num_emitted for record in records)
        rows[0] = RequestRow(**{**vars(rows[0]), "output_tokens": tokens - 48})
        repeats.append(summarise_repeat(series(method, batch, repeat), rows, records, seconds, 310 * 2**20))
    return summarise(repeats, lossy)


def summary(
    methods: tuple[str, ...] = ("ngram",), batches: tuple[int, ...] = (1, 8), lossy: bool = False
) -> BenchSummary:
    """The result of the whole run."""
    every = [
        measured(method, batch, lossy and method != "plain") for batch in batches for method in ("plain", *methods)
    ]
    status: Any = "not_applicable" if lossy else "verified"
    verdict = LosslessVerdict(status, 24, 3072, reason="the sampler is lossy" if lossy else "")
    curve = cost_points([(1, 0.0041), (2, 0.0045), (4, 0.0049), (8, 0.0066), (16, 0.0101)])
    return BenchSummary("ngram on bundled", with_speedups(every), verdict, REALLY_RAN, curve, WORKLOAD, lossy)


def play(listener: Any, folder: Path, result: BenchSummary | None = None) -> Iterator[str]:
    """Call a listener's hooks as a run would, yielding the name of each part just done."""
    result = result or summary()
    _call(listener, "run_started", event=started(folder))
    yield "run_started"
    for one in (series("plain", 1, warmup=True), *(series(m, 1, r) for r in range(3) for m in ("plain", "ngram"))):
        _call(listener, "series_started", series=one)
        for record in steps(one.method, 1, 30):
            _call(listener, "step_finished", record=record)
        for number in range(4):
            _call(listener, "request_finished", row=row(one.method, 1, number, one.repeat))
        yield one.name
    _call(listener, "run_finished", event=RunFinished("finished", metrics=result.to_metrics(), summary=result))
    yield "run_finished"


def _call(listener: Any, hook: str, **arguments: Any) -> None:
    function = getattr(listener, f"specflow_{hook}", None)
    if function is not None:
        function(**arguments)
