"""Latency and throughput of a series, from its request rows and step records. All times in seconds."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from specflow.tracking.events import RequestRow, StepRecord

__all__ = [
    "Percentiles",
    "TimeShares",
    "arrival_gaps",
    "decode_throughput",
    "throughput",
    "tpot_seconds",
    "ttft_seconds",
]


@dataclass(frozen=True)
class Percentiles:
    """p50, p90 and p99 in seconds, linearly interpolated; None when there is no value."""

    p50: float | None = None
    p90: float | None = None
    p99: float | None = None

    @classmethod
    def of(cls, values: Iterable[float]) -> "Percentiles":
        """Percentiles of the values, in seconds."""
        array = np.fromiter(values, dtype=np.float64)
        if not array.size:
            return cls()
        p50, p90, p99 = np.percentile(array, (50, 90, 99))
        return cls(float(p50), float(p90), float(p99))


@dataclass(frozen=True)
class TimeShares:
    """Where the time of the steps went, as fractions that add up to 1; all zero without steps."""

    target: float = 0.0  # the target's passes: prompts and verification
    sample: float = 0.0  # judging the drafts
    propose: float = 0.0  # drafting
    other: float = 0.0  # scheduling, packing, committing
    undivided: float = 0.0  # steps that ran as one piece, in which the parts above are not told apart

    @property
    def verify(self) -> float:
        """Target and sampler together."""
        return self.target + self.sample

    @classmethod
    def of(cls, steps: Sequence[StepRecord]) -> "TimeShares":
        """Sums over the steps, each divided by their total time."""
        total = sum(step.total_seconds for step in steps)
        if total <= 0:
            return cls()
        target = sum(step.target_seconds for step in steps) / total
        sample = sum(step.sample_seconds for step in steps) / total
        propose = sum(step.propose_seconds for step in steps) / total
        undivided = sum(step.undivided_seconds for step in steps) / total
        return cls(target, sample, propose, max(0.0, 1 - target - sample - propose - undivided), undivided)


def ttft_seconds(rows: Iterable[RequestRow]) -> list[float]:
    """Time to first token of each request: from its arrival to its first output token, queueing included."""
    return [row.ttft_seconds for row in rows if row.ttft_seconds is not None]


def arrival_gaps(rows: Iterable[RequestRow]) -> list[float]:
    """Inter-token latency: times between moments at which a request received tokens.

    Tokens that one step emits arrive together and count as one arrival, as they do for a client that reads a stream;
    counted singly, most gaps of speculative decoding would be zero and its median would say nothing.
    """
    return [gap for row in rows for gap in row.inter_token_seconds if gap > 0]


def tpot_seconds(rows: Iterable[RequestRow]) -> list[float]:
    """Time per output token of each request: (last token - first token) / (tokens - 1); needs two tokens."""
    return [sum(row.inter_token_seconds) / len(row.inter_token_seconds) for row in rows if row.inter_token_seconds]


def throughput(output_tokens: int, wall_seconds: float) -> float | None:
    """Committed output tokens per second of wall time, prompts included in the time; None without time."""
    return output_tokens / wall_seconds if wall_seconds > 0 else None


def decode_throughput(steps: Iterable[StepRecord]) -> float | None:
    """Output tokens per second of the steps that ran no prompt token; None when there is no such step."""
    decoding = [step for step in steps if step.num_prompt_tokens == 0]
    return throughput(sum(step.num_emitted for step in decoding), sum(step.total_seconds for step in decoding))
