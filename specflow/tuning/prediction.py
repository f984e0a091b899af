"""Tokens per second of a method at a length that was not run, from a pass at another length and from costs."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from specflow.schedulers.step_costs import StepCosts
from specflow.tuning.exploration import Exploration

__all__ = ["Cell", "corrected", "predict"]

_MOST_CORRECTION = 2.0  # a pass further than this from what its own steps add up to was disturbed
# Of the log of measured over predicted, standard deviations seen on the bundled target: what a method's lengths have in
# common, what each token of distance from the explored length adds, and what repeats scatter.
_DRIFT, _TILT, _NOISE = 0.08, 0.02, 0.02


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
    """The cells, those not yet measured corrected by what the measured ones of their method and batch size turned out
    to be.

    The log of measured over predicted is taken for a part that all lengths have in common, and a part that grows with
    the distance from the length that was explored: the least-squares fit, held back by how large either usually is.
    """
    groups: dict[tuple[str, int], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.method, cell.batch_size), []).append(cell)
    errors = {key: _errors(group) for key, group in groups.items()}
    return [
        cell
        if cell.measured is not None or cell.predicted is None
        else replace(cell, predicted=cell.predicted * errors[cell.method, cell.batch_size](cell))
        for cell in cells
    ]


def _errors(cells: Sequence[Cell]) -> Callable[[Cell], float]:
    """Factor on the prediction of a cell, from the measured cells of its method and batch size."""
    explored = [cell.num_speculative_tokens for cell in cells if cell.explored]

    def terms(cell: Cell) -> np.ndarray:
        own = cell.num_speculative_tokens
        return np.array([1.0, min((length - own for length in explored), key=abs, default=0)])

    known = [cell for cell in cells if cell.measured and cell.predicted]
    rows = np.array([terms(cell) for cell in known]).reshape(-1, 2)
    found = np.array([np.log(cell.measured / cell.predicted) for cell in known if cell.measured and cell.predicted])
    held_back = np.diag([_NOISE**2 / _DRIFT**2, _NOISE**2 / _TILT**2])
    fit = np.linalg.solve(rows.T @ rows + held_back, rows.T @ found)
    return lambda cell: float(np.exp(terms(cell) @ fit))
