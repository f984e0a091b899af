"""What the life-cycle hooks carry. Plain data: a listener needs nothing else of specflow."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RunStarted:
    """A run begins."""

    task: str
    name: str  # short human name, e.g. "ngram on bundled"
    config: Mapping[str, Any]  # resolved composition, plain containers
    output_dir: Path  # this run's folder; every file in it at the end is an artifact
    facts: Mapping[str, str]  # commit, versions, device, …


@dataclass(frozen=True)
class SweepStarted:
    """Many runs begin that belong together."""

    name: str
    words: Sequence[str]  # the command, which holds what is swept
    config: Mapping[str, Any]  # one composition of the sweep: what no job changes is in it
    folder: Path  # of the sweep; its runs have folders inside
    facts: Mapping[str, str]
    run_id: str | None = None  # of the tracker, when the sweep goes on after it was ended


@dataclass(frozen=True)
class SweepFinished:
    """The sweep ended."""

    status: str  # finished, failed (some job did not finish), killed
    reason: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    files: Sequence[Path] = ()  # what shows the whole sweep


@dataclass(frozen=True)
class Series:
    """One method at one batch size: the unit that metrics belong to."""

    name: str  # e.g. "plain, batch 1"
    method: str  # "plain" or the proposer's name
    batch_size: int
    num_requests: int
    warmup: bool = False
    repeat: int = 0
    num_repeats: int = 1
    max_tokens: int = 0  # output tokens each request may have, for the progress display


@dataclass(frozen=True)
class StepRecord:
    """One engine step, in counts and seconds."""

    index: int
    num_requests: int
    num_tokens: int  # packed tokens the target processed
    num_prompt_tokens: int  # of them prompt tokens
    num_emitted: int  # committed output tokens
    drafted: tuple[int, ...]  # drafts verified, one entry per request that had any
    accepted: tuple[int, ...]  # of them accepted, same order
    target_seconds: float
    sample_seconds: float
    propose_seconds: float
    total_seconds: float
    undivided_seconds: float = 0.0  # of a step that ran as one piece: its time, which no part above has


@dataclass(frozen=True)
class RequestRow:
    """One finished request; a line of the per-request JSONL artifact."""

    series: str
    method: str
    batch_size: int
    repeat: int
    request_id: str
    prompt_tokens: int
    output_tokens: int
    finish_reason: str  # stop, length, abort
    ttft_seconds: float | None
    latency_seconds: float
    inter_token_seconds: tuple[float, ...]  # gaps between the tokens as the client sees them
    rounds: int
    drafted: int
    accepted: int
    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Point:
    """One value of one curve."""

    name: str
    value: float
    step: int  # of a series: engine steps counted through all its repeats; of a training run: optimiser steps


@dataclass(frozen=True)
class RunFinished:
    """The run ended."""

    status: str  # finished, failed, killed
    reason: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    summary: Any = None  # the task's result object, e.g. report.summary.BenchSummary
