"""How many drafts of each request to submit to verification, decided on the device.

Every choice here is made without the draft that it is about: whether draft j is submitted follows from the chances of
drafts 1 … j, and these from the tokens before draft j. A rule that looks at draft j itself, at its probability or at
any chance behind it, changes what is sampled: wherever it cuts, the target's own draw stands in for a draft that was
chosen for what it is (arXiv 2607.05147, appendix A).
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

__all__ = ["affordable", "confident", "cost_table", "more_per_request"]


def cost_table(points: Sequence[tuple[int, float]], most_tokens: int) -> np.ndarray:
    """Cost of a pass over 0 … most_tokens tokens, [most_tokens + 1] float64, from measured (tokens, cost) points.

    The table is the largest convex, non-decreasing function below the points, continued by its last slope. With it
    tokens per second have a single peak in the number of drafts, so that stopping at the first draft that does not pay,
    which keeps the choice honest, also finds the best number.
    """
    merged: dict[int, float] = {}
    for tokens, cost in points:
        merged[tokens] = min(cost, merged.get(tokens, cost))
    ordered = sorted(merged.items())
    lowest, rising = float("inf"), []
    for tokens, cost in reversed(ordered):  # a wider pass costs no less
        lowest = min(lowest, cost)
        rising.append((tokens, lowest))
    hull: list[tuple[int, float]] = []
    for point in reversed(rising):
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], point):
            hull.pop()
        hull.append(point)
    known = np.array(hull, dtype=np.float64)
    tokens = np.arange(most_tokens + 1, dtype=np.float64)
    costs = np.interp(tokens, known[:, 0], known[:, 1])
    last = _slope(hull[-2], hull[-1]) if len(hull) > 1 else 0.0
    return costs + np.maximum(tokens - known[-1, 0], 0.0) * last


def more_per_request(points: Sequence[tuple[int, int, float]], table: np.ndarray) -> float:
    """What each request but the first adds to a pass over as many tokens: the mean over the measured (requests, tokens,
    cost) points of several requests, against the table of `cost_table`; 0 without such points."""
    found = [
        (cost - table[min(tokens, len(table) - 1)]) / (requests - 1)
        for requests, tokens, cost in points
        if requests > 1
    ]
    return max(0.0, float(np.mean(found))) if found else 0.0


def affordable(survival: Tensor, costs: Tensor) -> Tensor:
    """How many drafts of each of R requests raise the tokens per second of the pass they share, [R] int64.

    survival: [R, K] float32, the chance that drafts 1 … j of a request are all accepted; not rising along a row; 0 for
    drafts that may not be submitted. costs: [R * K + 1] of a round that verifies 0, 1, … drafts in all.

    The drafts of all requests are taken up in the order of their survival, as long as each one raises (R + sum of
    survivals) / cost. Draft j of a request stands behind its drafts before it, and its own token moves only what comes
    later: it has no say in whether it is taken up.
    """
    count, length = survival.shape
    ranked, order = survival.T.flatten().sort(descending=True, stable=True)  # of equals the earlier draft first
    gains = count + torch.cat([ranked.new_zeros(1), ranked.cumsum(0)])
    rates = gains / costs
    taken = (rates[1:] > rates[:-1]).long().cumprod(0)
    return torch.zeros_like(taken).scatter_(0, order, taken).view(length, count).sum(0)


def confident(chances: Tensor, threshold: float) -> Tensor:
    """Drafts before the first whose chance [R, K], given those before it, is below the threshold; [R] int64."""
    return (chances >= threshold).long().cumprod(1).sum(1)


def _slope(first: tuple[int, float], second: tuple[int, float]) -> float:
    return (second[1] - first[1]) / (second[0] - first[0])
