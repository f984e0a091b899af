"""A decoder whose costs and acceptance are known, and the step records that it leaves."""

from collections.abc import Sequence

import numpy as np

from specflow.schedulers.step_costs import StepCosts
from specflow.tracking.events import StepRecord


def pass_seconds(requests: int, tokens: int) -> float:
    """Of the target: dear beyond eight tokens."""
    return 0.010 + 0.001 * max(0, tokens - 8) + 0.0005 * requests


def run(
    chances: Sequence[float],
    length: int,
    batch: int,
    tokens: int,
    per_draft: float = 0.001,
    find: float = 1.0,
    seed: int = 0,
) -> tuple[list[StepRecord], int, float]:
    """Steps, output tokens and seconds of `batch` requests of `tokens` tokens each; a round finds drafts with a chance.

    A draft is accepted with its position's chance if those before it were.
    """
    draws = np.random.default_rng(seed)
    left = [tokens] * batch
    first = StepRecord(1, batch, 50 * batch, 50 * batch, 0, (), (), 0.1, 0.0, 0.0, 0.1)
    steps, seconds = [first], 0.1
    while any(left):
        going = [index for index, one in enumerate(left) if one]
        drafted, accepted, emitted = [], [], 0
        for index in going:
            most = length if draws.random() < find else 0
            kept = 0
            while kept < most and draws.random() < chances[kept]:
                kept += 1
            if most:
                drafted.append(most)
                accepted.append(kept)
            count = min(left[index], kept + 1)
            left[index] -= count
            emitted += count
        verified = len(going) + sum(drafted)
        target, propose = pass_seconds(len(going), verified), per_draft * length
        total = target + propose + 0.002
        steps.append(
            StepRecord(
                len(steps) + 1, len(going), verified, 0, emitted, tuple(drafted), tuple(accepted), target, 0.001,
                propose, total,
            )
        )  # fmt: skip
        seconds += total
    return steps, batch * tokens, seconds


def costs() -> StepCosts:
    """What passes at the start would have measured: one request alone."""
    points = [(tokens, pass_seconds(1, tokens)) for tokens in (1, 2, 4, 8, 16, 32, 64)]
    return StepCosts(points, None, 256, learns=True)
