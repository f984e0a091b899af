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
        Cell("a", 1, 1, 100.0, 1.5, explored=True, measured=80.0),
        Cell("a", 2, 1, 120.0, 1.8, explored=True),
        Cell("a", 2, 8, 120.0, 1.8),
        Cell("b", 1, 1, 90.0, 1.4),
    ]
    found = corrected(cells)
    assert [found[place].predicted for place in (0, 2, 3)] == [100.0, 120.0, 90.0]
    assert found[1].predicted == pytest.approx(96.0, rel=0.02)
    assert cells[0].error == pytest.approx(0.25)
    assert cells[1].error is None


def test_an_error_that_grows_with_the_distance_is_carried_on() -> None:
    """Slower than predicted near the length that was explored, faster further away: so the shorter ones are faster
    still, and the explored one is as it was."""
    cells = [
        Cell("a", 7, 8, 1302.0, 4.1, explored=True),
        Cell("a", 5, 8, 1321.0, 3.5, measured=1282.0),
        Cell("a", 4, 8, 1315.0, 3.2, measured=1343.0),
        Cell("a", 3, 8, 1298.0, 2.8),
        Cell("a", 1, 8, 1113.0, 1.7),
    ]
    ratios = [after.predicted / cell.predicted for after, cell in zip(corrected(cells), cells, strict=True)]  # type: ignore[operator]
    assert ratios[1:3] == [1.0, 1.0]
    assert ratios[4] > ratios[3] > 1.005
    assert ratios[0] < 1


def test_one_measured_length_says_little_about_the_slope() -> None:
    """Half of what was found is taken for an error of all lengths."""
    cells = [Cell("a", 7, 1, 100.0, 4.0, explored=True), Cell("a", 5, 1, 100.0, 3.5, measured=90.0)]
    found = corrected([*cells, Cell("a", 3, 1, 100.0, 2.7)])
    assert found[0].predicted is not None
    assert found[2].predicted is not None
    assert 90 < found[0].predicted < 95
    assert 85 < found[2].predicted < 90


def test_plain_decoding_has_a_length_of_one() -> None:
    steps, tokens, seconds = simulated.run([], 0, 2, 50)
    seen = explore_steps("plain", 0, 2, steps, tokens, seconds)
    assert isinstance(seen, Exploration)
    assert seen.length(0) == 1
    assert seen.survival == ()
