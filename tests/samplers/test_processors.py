"""Request options on logits rows, as if the drafts before each row had been committed."""

import pytest
import torch

from specflow.core.request import Request
from specflow.core.sampling_params import SamplingParams
from specflow.samplers.processors import RequestRows, needs_processing, process_logits


def process(
    logits: torch.Tensor, prompt: list[int], output: list[int], drafts: list[int], stop_ids=(), bad=(), **options
) -> torch.Tensor:
    request = Request(
        "a",
        prompt,
        SamplingParams(**options),
        seed=0,
        slot=1,
        output_ids=output,
        stop_ids=frozenset(stop_ids),
        bad_word_ids=tuple(bad),
    )
    table = torch.zeros(3, 64, dtype=torch.int64)
    tokens = prompt + output + drafts
    table[1, : len(tokens)] = torch.tensor(tokens)
    return process_logits(logits.float().clone(), [RequestRows(request, 0, len(drafts) + 1)], table)


def test_penalties_worked_example() -> None:
    """Oracle row 15 of the verification note."""
    logits = torch.tensor([[2.0, 1, 0, -1]]).repeat(3, 1)
    rows = process(logits, [2], [0], [0, 3], repetition_penalty=1.5, frequency_penalty=0.2, presence_penalty=0.5)
    expected = torch.tensor([[0.633333, 1, 0, -1], [0.433333, 1, 0, -1], [0.433333, 1, 0, -2.2]])
    assert torch.allclose(rows, expected, atol=1e-5)


def test_presence_ignores_the_prompt_and_repetition_counts_it() -> None:
    """User case C77."""
    logits = torch.full((1, 10), 3.0)
    prompt = [7] * 10 + list(range(5)) * 4
    assert process(logits, prompt, [], [], presence_penalty=2.0)[0, 7] == 3
    assert process(logits, prompt, [], [], frequency_penalty=2.0)[0, 7] == 3
    assert process(logits, prompt, [], [], repetition_penalty=1.3)[0, 7] < 3
    assert process(logits, [1], [7] + [2] * 40, [], presence_penalty=1.0)[0, 7] == 2


def test_bias_bans_in_every_row() -> None:
    rows = process(torch.zeros(3, 5), [1], [], [2, 3], logit_bias={4: float("-inf"), 1: 2.0})
    assert (rows[:, 4] == float("-inf")).all()
    assert (rows[:, 1] == 2).all()


def test_min_tokens_masks_stop_ids_position_by_position() -> None:
    rows = process(torch.zeros(4, 5), [1], [2, 2], [3, 3, 3], stop_ids=[0, 4], min_tokens=4)
    assert (rows[:2, [0, 4]] == float("-inf")).all()
    assert (rows[2:] == 0).all()


def test_bad_words_look_at_the_hypothetical_prefix() -> None:
    rows = process(torch.zeros(3, 10), [1], [5], [6, 7], bad=[(5, 6, 8), (9,)])
    assert rows[:, 9].tolist() == [float("-inf")] * 3
    assert rows[:, 8].tolist() == [0, float("-inf"), 0]


def test_bad_word_longer_than_the_prefix_is_ignored() -> None:
    assert (process(torch.zeros(1, 10), [1], [], [], bad=[(1, 2, 3, 4)]) == 0).all()


def test_temperature_and_filters() -> None:
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0]])
    assert torch.allclose(process(logits, [0], [], [], temperature=0.5), logits * 2)
    assert torch.isinf(process(logits, [0], [], [], temperature=1.0, top_k=2)[0]).tolist() == [False, False, True, True]
    # Mass .644, .237, .087, .032: the second token carries the sum over 0.7.
    assert torch.isinf(process(logits, [0], [], [], temperature=1.0, top_p=0.7)[0]).tolist() == [
        False,
        False,
        True,
        True,
    ]
    assert torch.isinf(process(logits, [0], [], [], temperature=1.0, top_p=0.6)[0]).tolist() == [
        False,
        True,
        True,
        True,
    ]
    assert torch.isinf(process(logits, [0], [], [], temperature=1.0, min_p=0.3)[0]).tolist() == [
        False,
        False,
        True,
        True,
    ]


def test_top_k_keeps_the_lowest_ids_among_equals() -> None:
    rows = process(torch.zeros(1, 6), [0], [], [], temperature=1.0, top_k=2)
    assert torch.isfinite(rows[0]).nonzero().flatten().tolist() == [0, 1]


def test_plain_greedy_needs_no_copy() -> None:
    assert not needs_processing(Request("a", [1], SamplingParams(), seed=0))
    assert needs_processing(Request("a", [1], SamplingParams(temperature=1.0), seed=0))
    warm, cut, bent = ({"temperature": 0.5, **more} for more in ({}, {"top_k": 3}, {"frequency_penalty": 0.1}))
    needed = [
        needs_processing(Request("a", [1], SamplingParams(**options), seed=0), temperature=False)
        for options in (warm, cut, bent)
    ]
    assert needed == [False, True, True]


@pytest.mark.parametrize("repetition", [0, -1, 2.5])
def test_repetition_penalty_range(repetition: float) -> None:
    """User case C20: zero would divide by zero."""
    from specflow.errors import ConfigError

    with pytest.raises(ConfigError, match=r"repetition_penalty.*\(0, 2\]"):
        SamplingParams(repetition_penalty=repetition)
