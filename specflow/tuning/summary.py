"""Result of `task=tune` as data."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from specflow.tuning.prediction import Cell

__all__ = ["Recommendation", "TuneSummary", "recommend"]

_SCHEMA = 1  # of tune.json


@dataclass(frozen=True)
class Recommendation:
    """The fastest measured cell of a batch size; plain decoding is an answer like any other."""

    best: Cell
    plain: Cell
    close: tuple[Cell, ...]  # whose fastest repeat is at least as fast as the slowest of the best

    @property
    def speculate(self) -> bool:
        """False: plain decoding is the fastest."""
        return self.best.num_speculative_tokens > 0

    def sentence(self) -> str:
        """The answer in words."""
        close = f"; within the repeats' noise of it: {', '.join(one.label for one in self.close)}" if self.close else ""
        speed = f"{self.best.measured or self.best.predicted or 0:.0f} tokens/s"
        where = f"batch {self.best.batch_size}:"
        if not self.speculate:
            return f"{where} do not speculate: plain decoding is the fastest, {speed}{close}"
        predicted = f" (predicted {self.best.predicted:.0f})" if self.best.predicted else ""
        return f"{where} {self.best.label}, {speed}{predicted}, {self.best.speedup or 0:.2f}× plain decoding{close}"


@dataclass(frozen=True)
class TuneSummary:
    """Everything a run found."""

    name: str
    cells: Sequence[Cell]
    recommendations: Sequence[Recommendation]
    acceptance: Mapping[str, Sequence[float]]  # by "method, batch n": chance of each draft position, all before it too
    costs: Mapping[str, Mapping[str, str]]  # by method, milliseconds
    unusable: Mapping[str, str]  # methods without a result, with the reason
    exhaustive: int  # passes over the workload that measuring every cell would take
    used: float  # passes made
    commands: Mapping[int, str]  # by batch size: the command of the recommendation
    really_ran: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def measured(self) -> list[Cell]:
        """Cells with a measured value, by batch size, the greatest speed-up first."""
        found = [cell for cell in self.cells if cell.measured is not None]
        return sorted(found, key=lambda cell: (cell.batch_size, -(cell.speedup or 0.0)))

    def to_metrics(self) -> dict[str, float]:
        """`recommended/batch_N/…`, and what finding it took."""
        found: dict[str, float] = {}
        for one in self.recommendations:
            prefix = f"recommended/batch_{one.best.batch_size}"
            values = {
                "speedup": one.best.speedup if one.speculate else 1.0,
                "tokens_per_second": one.best.measured,
                "predicted_tokens_per_second": one.best.predicted,
                "num_speculative_tokens": float(one.best.num_speculative_tokens),
            }
            found |= {f"{prefix}/{name}": float(value) for name, value in values.items() if value is not None}
        errors = [abs(cell.error) for cell in self.cells if cell.error is not None and cell.num_speculative_tokens]
        if errors:
            found["prediction_error"] = sum(errors) / len(errors)
        return found | {"passes": self.used, "passes_of_exhaustive": self.used / self.exhaustive}

    def to_dict(self) -> dict[str, Any]:
        """Plain containers for tune.json."""
        return {
            "schema": _SCHEMA,
            "name": self.name,
            "recommendations": [
                {
                    "batch_size": one.best.batch_size,
                    "speculate": one.speculate,
                    "method": one.best.method,
                    "num_speculative_tokens": one.best.num_speculative_tokens,
                    "within_noise": [cell.label for cell in one.close],
                    "sentence": one.sentence(),
                    "command": self.commands.get(one.best.batch_size),
                }
                for one in self.recommendations
            ],
            "cells": [asdict(cell) | {"error": cell.error} for cell in self.cells],
            "acceptance": {name: list(values) for name, values in self.acceptance.items()},
            "costs": {name: dict(values) for name, values in self.costs.items()},
            "unusable": dict(self.unusable),
            "passes": {"exhaustive": self.exhaustive, "used": self.used, "share": self.used / self.exhaustive},
            "really_ran": {name: dict(facts) for name, facts in self.really_ran.items()},
        }

    def to_csv(self) -> str:
        """One line per cell."""
        buffer = io.StringIO()
        lines = [asdict(cell) | {"error": cell.error} for cell in self.cells]
        for line in lines:
            line["measured_slowest"], line["measured_fastest"] = line.pop("measured_range") or (None, None)
        writer = csv.DictWriter(buffer, list(lines[0]) if lines else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
        return buffer.getvalue()


def recommend(cells: Sequence[Cell], batch_size: int) -> Recommendation:
    """The best cell of a batch size by measured speed-up, that of plain decoding being 1."""
    here = [cell for cell in cells if cell.batch_size == batch_size]
    plain = next(cell for cell in here if not cell.num_speculative_tokens)
    drafted = [cell for cell in here if cell.num_speculative_tokens and cell.speedup is not None]
    best = max([plain, *drafted], key=lambda cell: cell.speedup if cell.speedup is not None else 1.0)
    close = [cell for cell in [plain, *drafted] if cell is not best and _overlap(cell, best)]
    return Recommendation(best, plain, tuple(sorted(close, key=lambda cell: -(cell.measured or 0.0))))


def _overlap(cell: Cell, best: Cell) -> bool:
    ours, theirs = cell.measured_range, best.measured_range
    return ours is not None and theirs is not None and ours[1] >= theirs[0]
