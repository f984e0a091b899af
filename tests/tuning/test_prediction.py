"""Speeds at lengths that were not run, against running them."""

import pytest

from specflow.tuning.exploration import Exploration, explore_steps, learn_costs
from specflow.tuning.prediction import Cell, corrected, predict
from tests.tuning import simulated

CHANCES = [0.85, 0.75, 0.7, 0.6, 0.5, 0.5, 0.4]
SPEED_LENGTHS = (1, 2, 3, 5, 7)


@pytest.mark.parametrize("find", [1.0, 0.3])
@pytest.mark.parametrize("batch", [1, 6])
def test_lengths_that_were_not_run_are_foreseen(batch: int, find: float) -> None:
    """From one pass at K=7 and a few steps at K=1, of a method whose drafting costs by the draft."""
    costs = simulated.costs()
    steps, tokens, seconds = simulated.run(CHANCES, 7, batch, 1500, find=find)
    seen = explore_steps("m", 7, batch, steps, tokens, seconds)
    learn_costs(costs, 7, steps)
    learn_costs(costs, 1, simulated.run(CHANCES, 1, batch, 30, find=find, seed=5)[0])
    cells = predict(seen, costs, (*SPEED_LENGTHS, 9))
    assert [cell.num_speculative_tokens for cell in cells] == list(SPEED_LENGTHS)
    assert [cell.explored for cell in cells] == [False] * 4 + [True]
    truth = {}
    for length in SPEED_LENGTHS:
        _, tokens, seconds = simulated.run(CHANCES, length, batch, 1500, find=find, seed=9)
        truth[length] = tokens / seconds
    for cell in cells:
        assert cell.predicted == pytest.approx(truth[cell.num_speculative_tokens], rel=0.06), cell.label
    assert max(truth.values()) > 1.1 * min(truth.values())


def test_acceptance_is_counted_over_all_steps_of_a_request() -> None:
    """Rounds that found nothing count: asking did not help."""
    steps, tokens, seconds = simulated.run([0.8, 0.5], 2, 1, 4000, find=0.5)
    seen = explore_steps("m", 2, 1, steps, tokens, seconds)
    assert seen.survival == pytest.approx([0.4, 0.2], abs=0.03)
    assert seen.drafted == pytest.approx([0.5, 0.5], abs=0.03)
    assert seen.length(1) == pytest.approx(1.4, abs=0.03)
    assert seen.verified(2) == pytest.approx(1.0, abs=0.05)
    assert seen.acceptance.acceptance_rate == pytest.approx(0.6, abs=0.03)
    assert seen.prompt_seconds == 0.1
    (part,) = seen.occupancy
    assert part.requests == 1
    assert part.drafting_steps / part.steps == pytest.approx(0.5, abs=0.03)


def test_positions_that_were_never_drafted_are_there() -> None:
    steps, tokens, seconds = simulated.run([0.8], 1, 1, 100)
    assert explore_steps("m", 3, 1, steps, tokens, seconds).survival[1:] == (0.0, 0.0)


def test_a_disturbed_pass_moves_the_prediction_only_so_far() -> None:
    steps, tokens, seconds = simulated.run(CHANCES, 7, 1, 500)
    costs = simulated.costs()
    learn_costs(costs, 7, steps)
    usual = predict(explore_steps("m", 7, 1, steps, tokens, seconds), costs, [7])[0]
    asleep = predict(explore_steps("m", 7, 1, steps, tokens, 50 * seconds), costs, [7])[0]
    assert usual.predicted == pytest.approx(tokens / seconds, rel=0.02)
    assert asleep.predicted == pytest.approx(tokens / seconds / 2, rel=0.02)


def test_measured_cells_correct_their_method() -> None:
    cells = [
        Cell("a", 1, 1, 100.0, 1.5, measured=80.0),
        Cell("a", 2, 1, 120.0, 1.8),
        Cell("a", 2, 8, 120.0, 1.8),
        Cell("b", 1, 1, 90.0, 1.4),
    ]
    assert [cell.predicted for cell in corrected(cells)] == pytest.approx([100.0, 96.0, 120.0, 90.0])
    assert cells[0].error == pytest.approx(0.25)
    assert cells[1].error is None


def test_plain_decoding_has_a_length_of_one() -> None:
    steps, tokens, seconds = simulated.run([], 0, 2, 50)
    seen = explore_steps("plain", 0, 2, steps, tokens, seconds)
    assert isinstance(seen, Exploration)
    assert seen.length(0) == 1
    assert seen.survival == ()
