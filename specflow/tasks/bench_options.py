"""Options of `task=bench`, whichever engine runs it."""

from dataclasses import dataclass
from typing import Literal

from specflow.errors import ConfigError

__all__ = ["BenchOptions"]


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Options of `task=bench`."""

    batch_sizes: tuple[int, ...] = (1, 8)  # requests in flight, one comparison each
    repeats: int = 3  # passes over the workload per method and batch size, interleaved; medians are reported
    warmup_requests: int | None = None  # prompts run before each batch size, not counted; None = all on a GPU, else 1
    proposer_memory: Literal["cold", "keep"] = "cold"  # what it learns: within a pass (cold), from earlier ones too
    cost_curve: bool = True  # measure what verifying 1 to 16 tokens costs
    require_lossless: bool = True  # fail the run when the output differs from plain decoding
    require_acceptance_length: float | None = None  # fail the run at or below this mean acceptance length

    def __post_init__(self) -> None:
        if not self.batch_sizes or min(self.batch_sizes) < 1 or len(set(self.batch_sizes)) < len(self.batch_sizes):
            raise ConfigError(f"task.batch_sizes={list(self.batch_sizes)} must be different numbers of 1 or more.")
        if self.repeats < 1:
            raise ConfigError(f"task.repeats={self.repeats} must be 1 or more.")
        if self.warmup_requests is not None and self.warmup_requests < 0:
            raise ConfigError(f"task.warmup_requests={self.warmup_requests} must be 0 or more.")
        if self.require_acceptance_length is not None and self.require_acceptance_length < 1:
            raise ConfigError(
                f"task.require_acceptance_length={self.require_acceptance_length} must be 1 or more: "
                "a verification step always emits one token."
            )

    def warmups(self, num_prompts: int, on_gpu: bool) -> int:
        """Prompts of a warm-up. On a GPU kernels are compiled for lengths and batches as these are first met."""
        if self.warmup_requests is not None:
            return self.warmup_requests
        return num_prompts if on_gpu else 1
