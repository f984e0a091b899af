"""The one number of a run that a sweeper optimises."""

from collections.abc import Mapping

from specflow.errors import ConfigError
from specflow.words import did_you_mean

__all__ = ["lower_is_better", "objective"]

_OBJECTIVES = ("speedup", "tokens_per_second")  # without `objective`: the first metric that has the word in it
_COSTS = ("_seconds", "_bytes", "_time_share")


def objective(metrics: Mapping[str, float], wanted: str | None) -> float | None:
    """The metric a sweeper optimises: the one named, or else the first about speed-up, then throughput."""
    if wanted is not None:
        if wanted not in metrics:
            hint = did_you_mean(wanted, metrics)
            raise ConfigError(f"objective={wanted}: the run has no such metric.{hint} It has: {', '.join(metrics)}.")
        return float(metrics[wanted])
    found = [name for word in _OBJECTIVES for name in metrics if word in name]
    return float(metrics[found[0]]) if found else None


def lower_is_better(wanted: str | None) -> bool:
    """Whether the metric named is a time, a share of time or memory."""
    return wanted is not None and wanted.endswith(_COSTS)
