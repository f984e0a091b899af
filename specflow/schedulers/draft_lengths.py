"""How many drafts each request of a step should get so that tokens per second are highest.

Everything here is known before the drafts are made: a choice that looked at the drafts themselves, or at anything that
follows from them, would change what is sampled.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specflow.schedulers.step_costs import StepCosts

__all__ = ["Choice", "Others", "best_lengths"]


@dataclass(frozen=True)
class Others:
    """What else is in the step."""

    emitting: int = 0  # requests that decode without drafts, a token each
    tokens: int = 0  # of them and of prompts


@dataclass(frozen=True)
class Choice:
    """Drafts by request, and the tokens per second that they promise."""

    lengths: list[int]
    rate: float


def best_lengths(
    survival: Sequence[Sequence[float]],
    room: Sequence[int],
    fill: Sequence[float],
    costs: StepCosts,
    others: Others | None = None,
    probe: bool = False,
) -> Choice:
    """Lengths of R requests (1 or more), the best of all choices.

    survival: for each request the chance that its drafts 1 … j are all accepted once they are made, K values that do
    not rise. room: most drafts that it can use. fill: drafts made per draft asked for. probe: at least one request gets
    drafts, if any has room.

    A draft adds its survival to the tokens of the step, so for a given number of drafts those of highest survival are
    the best, and they are prefixes. Drafting costs by the longest request, so every longest length is tried.
    """
    others = others or Others()
    most = max(room)
    drafting = costs.draft_seconds(len(survival), most)
    emitting = len(survival) + others.emitting
    some = 1 - math.prod(1 - share for share in fill)
    step = _Step(costs, emitting, len(survival) + others.tokens, some)
    nothing = emitting / (costs.pass_at(step.requests, step.tokens) + drafting[0])
    if not most:
        return Choice([0] * len(survival), nothing)
    if len(survival) == 1:
        length, best = _best_of_one(survival[0], fill[0], step, drafting)
        return Choice([length], best) if probe or best > nothing else Choice([0], nothing)
    chances = np.array([row[:most] for row in survival])
    chances[np.arange(most) >= np.array(room)[:, None]] = -1.0
    order = np.argsort(-chances, axis=None, kind="stable")  # of equals the earlier draft first
    gain, made = chances.flatten()[order], np.array(fill)[order // most]
    usable = (order % most < np.arange(1, most + 1)[:, None]) & (gain >= 0)  # [most, R * most]: by longest length
    gains = emitting + np.cumsum(np.where(usable, gain * made, 0.0), 1)
    drafts = np.cumsum(usable * made, 1)
    rates = np.where(usable, gains / (step.seconds(drafts) + np.array(drafting[1:])[:, None]), 0.0)
    longest, last = divmod(int(rates.argmax()), rates.shape[1])
    best = float(rates[longest, last])
    if not probe and best <= nothing:
        return Choice([0] * len(survival), nothing)
    taken = order[: last + 1][usable[longest, : last + 1]]
    return Choice(np.bincount(taken // most, minlength=len(survival)).tolist(), best)


def _best_of_one(survival: Sequence[float], fill: float, step: "_Step", drafting: Sequence[float]) -> tuple[int, float]:
    """Best length from 1 on and its rate: the common case of a single request, in plain numbers, which is quicker."""
    costs, without = step.costs, step.costs.pass_at(step.requests, step.tokens)
    gain, best = float(step.requests), (1, 0.0)
    for length in range(1, len(drafting)):
        gain += fill * survival[length - 1]
        drafted = costs.pass_at(step.requests, step.tokens + length)
        rate = gain / ((1 - fill) * without + fill * drafted + drafting[length])
        if rate > best[1]:
            best = length, rate
    return best


@dataclass(frozen=True)
class _Step:
    costs: StepCosts
    requests: int
    tokens: int  # without drafts
    some: float  # chance that the method finds any draft at all

    def seconds(self, drafts: np.ndarray) -> np.ndarray:
        """Mean seconds of a pass with so many drafts on the average: none at all, or the more of them."""
        if self.some >= 1 or self.some <= 0:
            return self.costs.pass_seconds(self.requests, self.tokens + drafts)
        without = self.costs.pass_seconds(self.requests, np.array([float(self.tokens)]))
        return (1 - self.some) * without + self.some * self.costs.pass_seconds(
            self.requests, self.tokens + drafts / self.some
        )
