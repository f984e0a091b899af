"""Where the time of a decode step goes, and how near its target pass comes to what the memory allows."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from specflow.metrics.summary import CostPoint

__all__ = ["ProfileSummary", "StepProfile"]


@dataclass(frozen=True)
class StepProfile:
    """One method at one batch size. Seconds are medians; parts that were not told apart are missing."""

    method: str
    batch_size: int
    num_query_tokens: int  # of each request in a step: K + 1, or 1
    step_seconds: float
    parts: Mapping[str, float]  # target, verify, draft, books: inputs and token table
    target_bytes: int  # least bytes that the target pass reads

    @property
    def host_gap(self) -> float | None:
        """What the step takes beyond its parts: the host's own time, and the device's waiting for it."""
        return max(0.0, self.step_seconds - sum(self.parts.values())) if self.parts else None

    @property
    def target_bandwidth(self) -> float | None:
        """Bytes per second of the target pass, counting only the least it has to read."""
        seconds = self.parts.get("target")
        return self.target_bytes / seconds if seconds else None

    def to_metrics(self) -> dict[str, float]:
        """Numbers by name."""
        found = {"step_seconds": self.step_seconds, "target_bytes": float(self.target_bytes)}
        found |= {f"{part}_seconds": seconds for part, seconds in self.parts.items()}
        if self.host_gap is not None:
            found["host_gap_seconds"] = self.host_gap
        if self.target_bandwidth is not None:
            found["target_bytes_per_second"] = self.target_bandwidth
        return {f"{self.method}/batch_{self.batch_size}/profile.{name}": value for name, value in found.items()}


@dataclass(frozen=True)
class ProfileSummary:
    """Everything that `task=profile` measured."""

    name: str
    context: int  # tokens of each request
    steps: Sequence[StepProfile]
    cost_curve: Sequence[CostPoint]
    copy_bandwidth: float  # bytes per second, read plus written
    really_ran: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def to_metrics(self) -> dict[str, float]:
        """Numbers for a tracker."""
        found = {"profile.copy_bytes_per_second": self.copy_bandwidth}
        for one in self.steps:
            found |= one.to_metrics()
        for point in self.cost_curve:
            found[f"profile.cost_of_{point.query_tokens}_seconds"] = point.seconds
        return found

    def to_dict(self) -> dict[str, Any]:
        """For profile.json."""
        return {
            "name": self.name,
            "context": self.context,
            "copy_bytes_per_second": self.copy_bandwidth,
            "steps": [
                {**asdict(one), "host_gap_seconds": one.host_gap, "target_bytes_per_second": one.target_bandwidth}
                for one in self.steps
            ],
            "cost_curve": [asdict(point) for point in self.cost_curve],
            "really_ran": {section: dict(facts) for section, facts in self.really_ran.items()},
        }
