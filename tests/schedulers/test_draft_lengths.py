"""The choice of the lengths against trying everything."""

import itertools

import numpy as np
import pytest

from specflow.schedulers.draft_lengths import Others, best_lengths
from specflow.schedulers.step_costs import StepCosts

MOST = 60


def rate_of(lengths: tuple[int, ...], survival: np.ndarray, costs: StepCosts, others: Others = Others()) -> float:
    """Tokens per second of a choice."""
    count = len(survival)
    gain = count + others.emitting + sum(survival[row, :taken].sum() for row, taken in enumerate(lengths))
    seconds = costs.pass_at(count + others.emitting, count + others.tokens + sum(lengths))
    return float(gain / (seconds + costs.draft_seconds(count, max(lengths))[max(lengths)]))


@pytest.mark.parametrize("count", [1, 3])
def test_no_choice_is_better(count: int) -> None:
    draws = np.random.default_rng(count)
    chosen = set()
    for _ in range(80):
        survival = draws.uniform(0.05, 1, (count, 4)).cumprod(1)
        room = draws.integers(0, 5, count)
        points = [(1, 1.0), *((2**n, 1 + draws.uniform(0, 3)) for n in range(1, 6))]
        drafting = [(1, draws.uniform(0, 0.5)), (4, draws.uniform(0.5, 1))]
        costs = StepCosts(points, drafting, MOST, learns=False)
        others = Others(int(draws.integers(0, 3)), int(draws.integers(3, 9)))
        found = best_lengths(survival.tolist(), room.tolist(), [1.0] * count, costs, others)
        every = itertools.product(*(range(most + 1) for most in room))
        best = max(rate_of(lengths, survival, costs, others) for lengths in every)
        assert all(length <= most for length, most in zip(found.lengths, room, strict=True))
        assert found.rate == pytest.approx(best)
        assert rate_of(tuple(found.lengths), survival, costs, others) == pytest.approx(best)
        chosen.add(tuple(found.lengths))
    assert len(chosen) > 4


def test_none_under_load_all_where_tokens_are_free() -> None:
    good, bad = [0.9, 0.8, 0.7], [0.2, 0.04, 0.01]
    free = StepCosts([(1, 1.0)], [(1, 0.0)], MOST, learns=False)
    dear = StepCosts([(1, 1.0), (MOST, float(MOST))], [(1, 0.0)], MOST, learns=False)
    between = StepCosts([(1, 1.0), (2, 1.0), (MOST, 20.0)], [(1, 0.0)], MOST, learns=False)
    assert best_lengths([good, bad], [3, 3], [1.0, 1.0], free).lengths == [3, 3]
    assert best_lengths([good, bad], [3, 3], [1.0, 1.0], dear).lengths == [0, 0]
    assert best_lengths([good, bad], [3, 3], [1.0, 1.0], between).lengths == [2, 0]
    assert best_lengths([good], [3], [1.0], dear).lengths == [0]
    assert best_lengths([good], [0], [1.0], free).lengths == [0]


def test_a_probe_drafts_although_it_does_not_pay() -> None:
    dear = StepCosts([(1, 1.0), (MOST, float(MOST))], [(1, 0.0)], MOST, learns=False)
    assert sum(best_lengths([[0.3, 0.1], [0.4, 0.1]], [2, 2], [1.0, 1.0], dear, probe=True).lengths) == 1
    assert best_lengths([[0.3, 0.1]], [2], [1.0], dear, probe=True).lengths == [1]
    assert best_lengths([[0.3, 0.1]], [0], [1.0], dear, probe=True).lengths == [0]


def test_drafts_that_are_rarely_found_cost_rarely() -> None:
    """One round in ten has drafts: their verification is paid then and not otherwise, unlike the search for them."""
    costs = StepCosts([(1, 1.0), (2, 1.6), (MOST, 2.0)], [(1, 0.01)], MOST, learns=False)
    found = [best_lengths([[0.6, 0.5, 0.5]] * count, [3] * count, [0.1] * count, costs) for count in (1, 2)]
    assert [one.lengths for one in found] == [[3], [3, 3]]
    # By hand: one token, a tenth of 1.6 more, in one step or, a tenth of the time, in a dearer one.
    assert found[0].rate == pytest.approx(1.16 / (0.9 * 1.0 + 0.1 * costs.pass_at(1, 4) + 0.03))


def test_serial_drafting_shortens_everybody() -> None:
    costs = StepCosts([(1, 1.0)], [(1, 0.05), (6, 3.0)], MOST, learns=False)
    survival = [np.cumprod([0.9] * 6).tolist()] * 2
    assert best_lengths(survival, [6, 6], [1.0, 1.0], costs).lengths == [1, 1]
