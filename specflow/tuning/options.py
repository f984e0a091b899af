"""Options of `task=tune`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specflow.errors import ConfigError

__all__ = ["TuneOptions"]


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """Options of `task=tune`. Raises `ConfigError` when a value is out of range."""

    methods: tuple[str, ...] | None = None  # drafting methods to try; None = all that the target can be drafted by
    options: Mapping[str, Any] = field(default_factory=dict)  # of methods, by name: their paths and the like
    num_speculative_tokens: tuple[int, ...] = (1, 2, 3, 4, 5, 7)  # the K to choose from
    batch_sizes: tuple[int, ...] = (1, 8)  # requests in flight; one recommendation each
    finalists: int = 3  # most methods and lengths measured per batch size, the most promising ones
    margin: float = 0.15  # those predicted slower than the best by more than this share are not measured
    share: float = 0.2  # most passes over the workload, as a share of those that measuring everything would take
    repeats: int = 3  # passes of each finalist and of plain decoding, interleaved; the median counts
    warmup_requests: int = 1  # prompts run before measuring, not counted
    require_lossless: bool = True  # a finalist whose output differs from plain decoding is out

    def __post_init__(self) -> None:
        for name in ("num_speculative_tokens", "batch_sizes"):
            values = getattr(self, name)
            if not values or min(values) < 1 or len(set(values)) < len(values):
                raise ConfigError(f"task.{name}={list(values)} must be different numbers of 1 or more.")
        if self.methods is not None and (not self.methods or len(set(self.methods)) < len(self.methods)):
            raise ConfigError(f"task.methods={list(self.methods)} must be different methods, or null for all.")
        for name, least in (("finalists", 1), ("repeats", 1), ("warmup_requests", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"task.{name}={getattr(self, name)} must be {least} or more.")
        if not 0 <= self.margin < 1:
            raise ConfigError(f"task.margin={self.margin} must be from 0 to below 1.")
        if not 0 < self.share <= 1:
            raise ConfigError(f"task.share={self.share} must be above 0 and at most 1.")
        strange = [name for name, value in self.options.items() if not isinstance(value, Mapping)]
        if strange:
            raise ConfigError(f"task.options.{strange[0]} must be options: write task.options.{strange[0]}.KEY=VALUE.")
