"""Rejection sampling: exact on worked examples, right in law, and the checks catch wrong rules."""

import itertools

import numpy as np
import pytest
import torch
from scipy import stats

from tests.samplers.helpers import P, Q, bound, draw_drafts, first_tokens, make_inputs, standard, total_variation

MANY = 100_000


def test_greedy_accepts_up_to_the_first_difference() -> None:
    rows = torch.full((4, 10), 0.0)
    rows[range(4), [5, 7, 9, 2]] = 1.0
    verdict = standard().verify(rows, make_inputs(torch.tensor([[5, 7, 8]]), temperature=0.0))
    assert verdict.token_ids.tolist() == [[5, 7, 9, -1]]
    assert verdict.num_emitted.tolist() == [3]
    assert verdict.num_accepted.tolist() == [2]
    verdict = standard().verify(rows, make_inputs(torch.tensor([[5, 7, 9]]), temperature=0.0))
    assert verdict.token_ids.tolist() == [[5, 7, 9, 2]]


def test_greedy_rejects_placeholders() -> None:
    rows = torch.zeros(3, 10)
    rows[range(3), [5, 7, 9]] = 1.0
    verdict = standard().verify(rows, make_inputs(torch.tensor([[-1, -1]]), temperature=0.0))
    assert verdict.token_ids.tolist() == [[5, -1, -1]]


def test_ties_take_the_lowest_id() -> None:
    verdict = standard().verify(
        torch.tensor([[1.0, 3.0, 3.0, 0.0]]), make_inputs(torch.zeros(1, 0, dtype=torch.int64), temperature=0.0)
    )
    assert verdict.token_ids.tolist() == [[1]]


def test_ragged_rows_belong_to_their_request() -> None:
    counts = torch.tensor([2, 0, 1])
    rows = torch.zeros(6, 8)
    rows[range(6), [1, 2, 3, 4, 5, 6]] = 1.0
    drafts = torch.tensor([[1, 2], [-1, -1], [7, -1]])
    verdict = standard().verify(rows, make_inputs(drafts, num_drafts=counts, temperature=0.0))
    assert verdict.token_ids.tolist() == [[1, 2, 3], [4, -1, -1], [5, -1, -1]]
    assert verdict.num_emitted.tolist() == [3, 1, 1]


def test_all_nan_rows_give_a_valid_id() -> None:
    rows = torch.full((2, 6), float("nan"))
    for temperature in (0.0, 1.0):
        verdict = standard().verify(rows, make_inputs(torch.tensor([[3]]), temperature=temperature))
        assert 0 <= int(verdict.token_ids[0, 0]) < 6
        assert int(verdict.num_emitted[0]) == 1


def test_one_hot_drafts_keep_the_law() -> None:
    drafts = torch.zeros(MANY, 1, dtype=torch.int64)  # always "the", the argmax
    verdict = standard().verify(P.log().repeat(2 * MANY, 1), make_inputs(drafts))
    assert total_variation(first_tokens(verdict), P) < bound(5, MANY)
    acceptance = float(verdict.num_accepted.double().mean())
    assert abs(acceptance - 0.5) < 4 * (0.25 / MANY) ** 0.5


@pytest.mark.parametrize("q", [Q, P, torch.tensor([0.0, 0.0, 0.0, 0.5, 0.5]), torch.tensor([0.0, 0.6, 0.4, 0.0, 0.0])])
def test_probabilistic_drafts_keep_the_law(q: torch.Tensor) -> None:
    seeds = torch.arange(MANY) + 7
    drafts = draw_drafts(q, seeds, 10).unsqueeze(1)
    inputs = make_inputs(drafts, draft_logits=q.log().repeat(MANY, 1, 1), seeds=seeds)
    verdict = standard().verify(P.log().repeat(2 * MANY, 1), inputs)
    assert total_variation(first_tokens(verdict), P) < bound(5, MANY)
    beta = float(torch.minimum(P, q).sum())
    acceptance = float(verdict.num_accepted.double().mean())
    assert abs(acceptance - beta) <= 4 * (beta * (1 - beta) / MANY) ** 0.5 + 1e-6


def test_disjoint_support_never_accepts() -> None:
    p, q = torch.tensor([0.6, 0.4, 0.0, 0.0]), torch.tensor([0.0, 0.0, 0.3, 0.7])
    seeds = torch.arange(20_000)
    inputs = make_inputs(draw_drafts(q, seeds, 10).unsqueeze(1), draft_logits=q.log().repeat(20_000, 1, 1), seeds=seeds)
    verdict = standard().verify(p.log().repeat(40_000, 1), inputs)
    assert int(verdict.num_accepted.sum()) == 0
    assert total_variation(first_tokens(verdict), p) < bound(4, 20_000)


def test_joint_law_of_two_positions() -> None:
    """V=8, K=2, the second position depends on the first: 64 pairs by chi-square (user case C11)."""
    generator = torch.Generator().manual_seed(3)
    vocab, num = 8, 50_000
    p1 = torch.rand(vocab, generator=generator).softmax(0)
    p2 = (2 * torch.rand(vocab, vocab, generator=generator)).softmax(1)
    q1, q2 = (torch.rand(vocab, generator=generator).softmax(0) for _ in range(2))
    seeds = torch.arange(num)
    drafts = torch.stack([draw_drafts(q1, seeds, 10), draw_drafts(q2, seeds, 11)], 1)
    rows = torch.stack([p1.expand(num, -1), p2[drafts[:, 0]], p2[drafts[:, 1]]], 1).reshape(-1, vocab).log()
    inputs = make_inputs(drafts, draft_logits=torch.stack([q1, q2]).log().expand(num, -1, -1), seeds=seeds)
    tokens = standard().verify(rows, inputs).token_ids
    # A run that ended after one token is continued plainly from p2.
    short = tokens[:, 1] < 0
    plain = make_inputs(torch.zeros(num, 0, dtype=torch.int64), seeds=seeds, position=11)
    following = standard().verify(p2[tokens[:, 0]].log(), plain).token_ids[:, 0]
    second = torch.where(short, following, tokens[:, 1])
    observed = np.bincount((tokens[:, 0] * vocab + second).numpy(), minlength=vocab * vocab)
    expected = (p1.unsqueeze(1) * p2).flatten().double().numpy()
    assert stats.chisquare(observed, expected / expected.sum() * num).pvalue > 1e-3


def test_near_equal_laws_fall_back_to_p_and_not_to_token_zero() -> None:
    p = torch.tensor([0.0, 0.0, 0.5, 0.5])
    inputs = make_inputs(
        torch.zeros(1000, 1, dtype=torch.int64),
        draft_logits=torch.tensor([[0.5, 0.5, 0.0, 0.0]]).log().repeat(1000, 1, 1),
    )
    tokens = first_tokens(standard().verify(p.log().repeat(2000, 1), inputs))
    assert set(tokens.tolist()) == {2, 3}


def test_nan_draft_law_is_rejected_and_drawn_from_p() -> None:
    nan = torch.full((20_000, 1, 5), float("nan"))
    verdict = standard().verify(
        P.log().repeat(40_000, 1), make_inputs(torch.zeros(20_000, 1, dtype=torch.int64), draft_logits=nan)
    )
    assert int(verdict.num_accepted.sum()) == 0
    assert total_variation(first_tokens(verdict), P) < bound(5, 20_000)


def test_placeholder_at_temperature_draws_from_p() -> None:
    drafts = torch.full((50_000, 1), -1)
    tokens = first_tokens(standard().verify(P.log().repeat(100_000, 1), make_inputs(drafts)))
    assert total_variation(tokens, P) < bound(5, 50_000)


def test_rows_do_not_depend_on_the_batch() -> None:
    """Same seeds alone and shuffled in a batch give the same tokens."""
    seeds = torch.arange(64)
    drafts = draw_drafts(Q, seeds, 10).unsqueeze(1)
    rows = P.log().repeat(2, 1)
    law = Q.log().view(1, 1, -1)
    alone = [
        standard()
        .verify(rows, make_inputs(drafts[i : i + 1], draft_logits=law, seeds=seeds[i : i + 1]))
        .token_ids[0]
        .tolist()
        for i in range(64)
    ]
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    inputs = make_inputs(drafts[order], draft_logits=law.repeat(64, 1, 1), seeds=seeds[order])
    batched = standard().verify(rows.repeat(64, 1), inputs).token_ids.tolist()
    assert batched == [alone[i] for i in order.tolist()]


def test_mixed_greedy_and_sampling_rows() -> None:
    drafts = torch.tensor([[1], [1]])
    inputs = make_inputs(drafts)
    inputs.temperature[0] = 0.0
    rows = torch.tensor([[0.0, 5.0, 1.0]] * 4)
    verdict = standard().verify(rows, inputs)
    assert verdict.token_ids[0].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("wrong_law", "distance"),
    [((1.0, 0.0, 0.0, 0.0, 0.0), 0.5), ((0.75, 0.15, 0.075, 0.02, 0.005), 0.25), (tuple(Q.tolist()), 0.21)],
)
def test_the_bound_catches_wrong_rules(wrong_law: tuple[float, ...], distance: float) -> None:
    """The biased laws of the verification note, section 2.4, are far outside what the tests above allow."""
    drawn = np.random.default_rng(0).choice(5, MANY, p=np.array(wrong_law) / sum(wrong_law))
    assert total_variation(drawn, P) > bound(5, MANY)
    assert abs(total_variation(drawn, P) - distance) < 0.01


def test_greedy_does_not_depend_on_seeds() -> None:
    rows = torch.randn(9, 20, generator=torch.Generator().manual_seed(1))
    drafts = torch.zeros(3, 2, dtype=torch.int64)
    outputs = {
        tuple(
            itertools.chain(
                *standard()
                .verify(rows, make_inputs(drafts, temperature=0.0, seeds=torch.arange(3) + s))
                .token_ids.tolist()
            )
        )
        for s in range(5)
    }
    assert len(outputs) == 1
