"""Plain decoding measured once in a sweep: files that its jobs share, whichever process or machine runs them."""

import fcntl
import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from specflow.core.request import FinishReason
from specflow.engine.cost_curve import measure_cost_curve
from specflow.engine.engine import Engine
from specflow.engine.outputs import RequestOutput
from specflow.errors import StorageError
from specflow.tasks.measure import Measurement
from specflow.tracking.events import RequestRow, Series, StepRecord

__all__ = ["MOST_DRIFT", "Baseline", "Baselines", "feel_pulse"]

MOST_DRIFT = 1.1  # between two pulses; steady machines stay within a few percent
_PULSE_SECONDS, _MOST_PULSES = 0.3, 200  # the median pass of this time, or of so many passes, is one pulse


@dataclass(frozen=True)
class Baseline:
    """Plain decoding of one batch size as a job of the sweep measured it."""

    measurements: tuple[Measurement, ...]  # one per repeat
    pulse: float | None  # seconds of one target pass over one token at that time; None: could not be measured
    job: str  # folder of the job that measured it
    measured: str  # when, local time

    def still_holds(self, pulse: float | None) -> bool:
        """Whether the machine is as fast as it was then: a comparison with a faster or slower one would be wrong."""
        return self.pulse is None or pulse is None or 1 / MOST_DRIFT <= pulse / self.pulse <= MOST_DRIFT


def feel_pulse(engine: Engine) -> float | None:
    """How fast the machine is at this moment: median seconds of a target pass over one token. The engine is idle."""
    first = measure_cost_curve(engine, widths=(1,), repeats=3)
    if not first:
        return None
    repeats = min(_MOST_PULSES, max(3, round(_PULSE_SECONDS / first[0][1])))
    return measure_cost_curve(engine, widths=(1,), repeats=repeats)[0][1]


class Baselines:
    """Baselines by what they depend on, one JSON file each in `folder`. A file is written whole or not at all."""

    def __init__(self, folder: Path, job: str) -> None:
        self.folder, self.job = folder, job

    @contextmanager
    def claim(self, key: Mapping[str, Any]) -> Iterator["_Claim"]:
        """The baseline that depends on `key`, for this process alone during the block.

        A job that wants the same one waits, so that it is measured once; the system frees the claim of a process that
        died. Raises `StorageError`.
        """
        name = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:16]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = (self.folder / f"{name}.lock").open("w")
        except OSError as error:
            raise StorageError(f"cannot keep the baseline: {error.filename}: {error.strerror or error}") from error
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield _Claim(self.folder / f"{name}.json", key, self.job)


@dataclass(frozen=True)
class _Claim:
    file: Path
    key: Mapping[str, Any]
    job: str

    def load(self) -> Baseline | None:
        """What an earlier job measured; None when nobody has."""
        try:
            data = json.loads(self.file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise StorageError(f"the baseline {self.file} cannot be read: {error}. Remove it.") from error
        measurements = tuple(map(_measurement, data["measurements"]))
        return Baseline(measurements, data["pulse"], data["job"], data["measured"])

    def save(self, measurements: Sequence[Measurement], pulse: float | None) -> None:
        """Keep it for the jobs that follow, in place of an older one."""
        data = {
            "key": self.key,
            "pulse": pulse,
            "job": self.job,
            "measured": time.strftime("%Y-%m-%d %H:%M:%S"),
            "measurements": [asdict(one) for one in measurements],
        }
        partial = self.file.with_suffix(".partial")
        try:
            partial.write_text(json.dumps(data, default=str), encoding="utf-8")
            partial.replace(self.file)
        except OSError as error:
            raise StorageError(f"cannot keep the baseline: {self.file}: {error.strerror or error}") from error


def _measurement(data: Mapping[str, Any]) -> Measurement:
    return Measurement(
        series=_restored(Series, data["series"]),
        rows=[_restored(RequestRow, row) for row in data["rows"]],
        steps=[_restored(StepRecord, step) for step in data["steps"]],
        outputs=[_output(output) for output in data["outputs"]],
        wall_seconds=data["wall_seconds"],
        peak_memory_bytes=data["peak_memory_bytes"],
    )


def _output(data: Mapping[str, Any]) -> RequestOutput:
    # Log-probabilities are no part of a comparison of tokens.
    reason = FinishReason(data["finish_reason"])
    return _restored(RequestOutput, {**data, "finish_reason": reason, "logprobs": ()})


def _restored(kind: type, values: Mapping[str, Any]) -> Any:
    """A dataclass whose sequences are tuples."""
    names = {one.name for one in fields(kind)}
    return kind(
        **{key: tuple(value) if isinstance(value, list) else value for key, value in values.items() if key in names}
    )
