"""Tokens per second of a method at a length that was not run, from a pass at another length and from costs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from specflow.schedulers.step_costs import StepCosts
from specflow.tuning.exploration import Exploration

__all__ = ["Cell", "corrected", "predict"]

_MOST_CORRECTION = 2.0  # a pass further than this from what its own steps add up to was disturbed


@dataclass(frozen=True)
class Cell:
    """One method at one length and batch size, with what is predicted and, for finalists, what was measured."""

    method: str
    num_speculative_tokens: int  # 0: plain decoding
    batch_size: int
    predicted: float | None  # tokens per second
    acceptance_length: float | None  # predicted tokens per request and step
    explored: bool = False  # the pass that the prediction is from ran at this very length
    measured: float | None = None
    measured_range: tuple[float, float] | None = None  # slowest and fastest repeat
    speedup: float | None = None  # over plain decoding, measured
    reason: str | None = None  # why it has no measured value although it was to have one

    @property
    def label(self) -> str:
        """E.g. "dflash K=5"."""
        return f"{self.method} K={self.num_speculative_tokens}" if self.num_speculative_tokens else self.method

    @property
    def error(self) -> float | None:
        """Predicted over measured, minus 1."""
        return self.predicted / self.measured - 1 if self.predicted and self.measured else None


def predict(seen: Exploration, costs: StepCosts, lengths: Iterable[int]) -> list[Cell]:
    """Cells of the method at each length up to the K of the pass.

    A round at a smaller K keeps the first drafts, so it makes fewer tokens, and the pass takes more steps of the same
    occupancy. Their time is that of the pass at its own K times the ratio of the costs, so that an error of the costs
    that is common to all lengths cancels out.
    """
    own = _seconds(seen, costs, seen.num_speculative_tokens)
    scale = seen.seconds / own if own else 1.0
    scale = min(_MOST_CORRECTION, max(1 / _MOST_CORRECTION, scale))
    return [
        Cell(
            seen.method,
            length,
            seen.batch_size,
            seen.output_tokens / (scale * _seconds(seen, costs, length)),
            seen.length(length),
            explored=length == seen.num_speculative_tokens,
        )
        for length in lengths
        if length <= seen.num_speculative_tokens
    ]


def _seconds(seen: Exploration, costs: StepCosts, length: int) -> float:
    """Of the whole pass at that length: its prompts, and its decode steps, of which there are more or fewer."""
    more = seen.length(seen.num_speculative_tokens) / seen.length(length)
    total = seen.prompt_seconds
    for part in seen.occupancy:
        some = part.drafting_steps / part.steps if length else 0.0
        drafts = part.requests * seen.verified(length)
        one = (1 - some) * _pass(costs, part.requests, 0.0)
        if some:
            one += some * _pass(costs, part.requests, drafts / some)
        one += costs.draft_seconds(part.requests, length)[length] if length else 0.0
        total += part.steps * more * one
    return total


def _pass(costs: StepCosts, requests: int, drafts: float) -> float:
    return float(costs.pass_seconds(requests, np.array([requests + drafts]))[0])


def corrected(cells: Sequence[Cell]) -> list[Cell]:
    """The cells, those not yet measured as much slower or faster than predicted as the measured ones of their method
    and batch size turned out to be."""
    found = []
    for cell in cells:
        alike = [
            one.measured / one.predicted
            for one in cells
            if one.measured and one.predicted and (one.method, one.batch_size) == (cell.method, cell.batch_size)
        ]
        if cell.measured is None and cell.predicted is not None and alike:
            found.append(replace(cell, predicted=cell.predicted * sum(alike) / len(alike)))
        else:
            found.append(cell)
    return found
