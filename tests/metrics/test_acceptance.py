"""The definitions of acceptance, by worked examples."""

from dataclasses import dataclass

import pytest

from specflow.metrics.acceptance import AcceptanceCounts, macro_acceptance_rate, macro_mean_acceptance_length


def counts(*rounds: tuple[int, int]) -> AcceptanceCounts:
    result = AcceptanceCounts()
    for drafted, accepted in rounds:
        result.add(drafted, accepted)
    return result


def test_five_meanings_of_acceptance() -> None:
    """C69: K=4, accepted per round 4, 0, 2, 1, 3."""
    found = counts((4, 4), (4, 0), (4, 2), (4, 1), (4, 3))
    assert (found.num_accepted_tokens, found.num_draft_tokens, found.num_rounds) == (10, 20, 5)
    assert found.acceptance_rate == 0.5
    assert found.mean_acceptance_length == 3.0
    assert found.mean_accepted_drafts == 2.0
    assert found.per_position_unconditional == pytest.approx([0.8, 0.6, 0.4, 0.2])
    assert found.per_position_conditional == pytest.approx([0.8, 0.75, 2 / 3, 0.5])
    assert found.accepted_length_histogram == [1, 1, 1, 1, 1]


def test_drafts_of_unequal_length() -> None:
    """The worked example of vLLM's quantities: (drafted, accepted) = (3,3), (3,1), (3,0), (2,2)."""
    found = counts((3, 3), (3, 1), (3, 0), (2, 2))
    assert found.acceptance_rate == pytest.approx(6 / 11)
    assert found.mean_acceptance_length == 2.5
    assert found.mean_draft_length == pytest.approx(11 / 4)
    assert found.per_position_unconditional == pytest.approx([0.75, 0.5, 0.25])
    assert found.per_position_per_drafted == pytest.approx([0.75, 0.5, 1 / 3])
    # The round with two drafts reached no third position, though all of its drafts were accepted.
    assert found.per_position_conditional == pytest.approx([3 / 4, 2 / 3, 1 / 1])
    assert found.system_efficiency == pytest.approx(10 / 15)
    assert found.system_efficiency_at(3) == pytest.approx(10 / 16)


def test_nothing_drafted_is_no_number() -> None:
    """C07: empty drafts are no rounds, and rates are absent instead of 0/0."""
    found = counts((0, 0), (0, 0))
    assert found.num_rounds == 0
    assert found.acceptance_rate is None
    assert found.mean_acceptance_length is None
    assert found.system_efficiency is None
    assert found.per_position_conditional == []
    assert found.accepted_length_histogram == []


def test_all_rejected() -> None:
    found = counts((2, 0), (2, 0))
    assert found.acceptance_rate == 0
    assert found.mean_acceptance_length == 1
    assert found.per_position_conditional == [0.0, None]  # nothing ever reached the second position


def test_merge_equals_adding_one_by_one() -> None:
    first, second = counts((1, 1)), counts((4, 2), (3, 3))
    first.merge(second)
    assert first == counts((1, 1), (4, 2), (3, 3))
    assert second == counts((4, 2), (3, 3))


@pytest.mark.parametrize("wrong", [(2, 3), (2, -1), (-1, 0)])
def test_impossible_counts_are_refused(wrong: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="accepted="):
        AcceptanceCounts().add(*wrong)


@dataclass
class _Request:
    rounds: int
    drafted: int
    accepted: int


def test_macro_means_weigh_requests_equally() -> None:
    """C69: two requests of unequal length; the micro rate is 21/104, nearer to the long one's."""
    requests = [_Request(1, 4, 1), _Request(25, 100, 20), _Request(0, 0, 0)]
    assert macro_acceptance_rate(requests) == pytest.approx((0.25 + 0.2) / 2)
    assert macro_mean_acceptance_length(requests) == pytest.approx((2 + 1.8) / 2)
    assert macro_acceptance_rate([_Request(0, 0, 0)]) is None
    assert macro_mean_acceptance_length([]) is None
