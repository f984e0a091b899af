"""What a step costs: the measured shape, and what the steps themselves teach."""

import numpy as np
import pytest

from specflow.schedulers.step_costs import StepCosts, cost_steps

POINTS = [(1, 1.0), (2, 1.5), (8, 1.4), (16, 3.0)]


def test_the_table_goes_through_the_points_never_falls_and_goes_on() -> None:
    table = cost_steps(POINTS, 20)
    assert table[[1, 2, 8, 16]] == pytest.approx([1.0, 1.5, 1.5, 3.0])
    assert table[12] == pytest.approx(2.25)
    assert table[20] == pytest.approx(3.0 + 4 * 1.5 / 8)
    assert cost_steps([(4, 2.0)], 6).tolist() == [2.0] * 7


def test_arrays_and_single_numbers_agree() -> None:
    costs = StepCosts(POINTS, None, 30, learns=True)
    for tokens in (2, 8) * 3:
        costs.add_pass(2, tokens, 4.0)
        costs.add_besides(2, 0.5)
    many = costs.pass_seconds(2, np.arange(2.0, 60.0))
    assert [costs.pass_at(2, tokens) for tokens in range(2, 60)] == pytest.approx(many.tolist())


def test_steps_correct_ratio_and_rest() -> None:
    """In truth passes of two requests take half as long again, and longer the more tokens; and 0.3 s go elsewhere."""
    costs = StepCosts(POINTS, None, 30, learns=True)
    table = cost_steps(POINTS, 30)
    for turn in range(100):
        tokens = 2 + 2 * (turn % 7)
        costs.add_pass(2, tokens, float(table[tokens]) * (1.5 + 0.1 * (tokens / 2 - 1)))
        costs.add_besides(2, 0.3)
    for tokens in (2, 8, 14):
        assert costs.pass_at(2, tokens) == pytest.approx(table[tokens] * (1.5 + 0.1 * (tokens / 2 - 1)) + 0.3)
    assert costs.pass_at(3, 8) == pytest.approx(table[8] * (1.5 + 0.1 * (8 / 3 - 1)) + 0.3)  # the nearest count
    assert costs.knows_plain(2)
    assert not costs.knows_plain(3)


def test_what_is_not_run_any_more_is_not_forgotten() -> None:
    """Else a length, once chosen, would look as cheap as any other."""
    costs = StepCosts([(1, 1.0)], None, 30, learns=True)
    for tokens in [1] * 3 + [5] * 200:
        costs.add_pass(1, tokens, float(tokens))
    assert [costs.pass_at(1, tokens) for tokens in (1, 3, 5)] == pytest.approx([1.0, 3.0, 5.0])


def test_a_first_step_that_compiles_and_a_pause_of_the_machine_are_not_believed() -> None:
    costs = StepCosts(POINTS, None, 30, learns=True)
    for seconds in (50.0, 1.0, 1.0, 1.0, 1.0):
        costs.add_pass(1, 1, seconds)
    assert costs.pass_at(1, 1) == pytest.approx(1.0)
    costs.add_pass(1, 1, 80.0)
    assert costs.pass_at(1, 1) == pytest.approx(1.0)
    for seconds in (30.0, 0.1, 0.1, 0.1, 0.1):
        costs.add_drafting(1, 4, seconds)
    assert costs.draft_seconds(1, 4)[4] == pytest.approx(0.1)


def test_drafting_is_interpolated_and_untried_lengths_look_cheap() -> None:
    costs = StepCosts(POINTS, None, 30, learns=True)
    assert costs.draft_seconds(1, 3) == [0.0] * 4
    for _ in range(3):
        costs.add_drafting(1, 4, 0.8)
    assert costs.draft_seconds(1, 6) == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2])
    for _ in range(3):
        costs.add_drafting(1, 1, 0.7)
    assert costs.draft_seconds(1, 4) == pytest.approx([0.0, 0.7, 0.7333, 0.7667, 0.8], abs=1e-3)
    assert costs.draft_seconds(5, 1) == pytest.approx([0.0, 0.7])  # the nearest number of requests


def test_given_costs_stay() -> None:
    costs = StepCosts(POINTS, [(1, 0.5), (3, 0.7)], 30, learns=False)
    costs.add_pass(1, 1, 99.0)
    costs.add_drafting(1, 1, 99.0)
    assert costs.pass_at(1, 1) == 1.0
    assert costs.draft_seconds(1, 3) == pytest.approx([0.0, 0.5, 0.6, 0.7])
    assert costs.describe() == {
        "verify_costs": "[[1, 1000.0], [2, 1500.0], [8, 1400.0], [16, 3000.0]]",
        "draft_costs": "[[1, 500.0], [3, 700.0]]",
    }
