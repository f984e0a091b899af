"""The paged attention reference against a dense definition in float64."""

import math

import numpy as np
import pytest
import torch

from specflow.core.attention import AttentionInputs
from specflow.kernels.paged_attention import paged_attention, plan_groups, write_pages
from tests.kernels.paged_cases import BLOCK, HEADS, RULES, STEPS, Paged


@pytest.mark.parametrize("layout", ["scattered", "adjacent"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("step", STEPS)
def test_equals_the_dense_definition(step: str, heads: str, rule: str, layout: str) -> None:
    """Every kind of step, grouping of heads, rule and layout of blocks."""
    paged = Paged(STEPS[step], HEADS[heads], (16, 16), layout)
    rules = dict(RULES[rule])
    if "sinks" in rules:
        rules["sinks"] = torch.linspace(-1, 2, HEADS[heads][0])
    found = paged_attention(paged.query, paged.key_pages, paged.value_pages, paged.inputs(), scale=0.3, **rules)
    torch.testing.assert_close(found.double(), paged.expected(0.3, **rules), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("step", STEPS)
def test_keys_and_values_of_different_size(step: str) -> None:
    """MLA: keys carry a rotary part that values lack."""
    paged = Paged(STEPS[step], (4, 4), (24, 16), "scattered")
    found = paged_attention(paged.query, paged.key_pages, paged.value_pages, paged.inputs(), scale=0.2)
    assert found.shape == (len(paged.query), 4, 16)
    torch.testing.assert_close(found.double(), paged.expected(0.2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 20])
def test_long_chunk(window: int | None, causal: bool) -> None:
    """Past the length where heads are folded, for one request and for two."""
    for spans in ([(90, 100)], [(70, 70), (70, 95)]):
        paged = Paged(spans, (4, 2), (8, 8), "scattered")
        rules = {"window": window, "causal": causal}
        found = paged_attention(paged.query, paged.key_pages, paged.value_pages, paged.inputs(), scale=0.3, **rules)
        torch.testing.assert_close(found.double(), paged.expected(0.3, **rules), rtol=1e-4, atol=1e-5)


def test_blocks_see_their_own_length_and_nothing_stale() -> None:
    """Behind a short request's last key stand old ones, of its own blocks and of the longest neighbour's length."""
    paged = Paged([(3, 5), (3, 19), (3, 6)], (4, 2), (8, 8), "scattered")
    for row, end in enumerate(paged.ends):
        stale = np.arange(end, paged.table.shape[1] * BLOCK)
        slots = torch.from_numpy(paged.table[row, stale // BLOCK] * BLOCK + stale % BLOCK)
        write_pages(paged.key_pages, slots, torch.full((len(stale), 2, 8), -30.0))
        write_pages(paged.value_pages, slots, torch.full((len(stale), 2, 8), 1e6))
    inputs = paged.inputs()
    found = paged_attention(paged.query, paged.key_pages, paged.value_pages, inputs, scale=0.3, causal=False)
    torch.testing.assert_close(found.double(), paged.expected(0.3, causal=False), rtol=1e-4, atol=1e-5)


def test_query_may_be_strided() -> None:
    """Models hand over transposed views."""
    paged = Paged(STEPS["mixed"], (6, 2), (16, 16), "scattered")
    by_head = paged.query.transpose(0, 1).contiguous().transpose(0, 1)
    found = paged_attention(by_head, paged.key_pages, paged.value_pages, paged.inputs(), scale=0.3)
    torch.testing.assert_close(found.double(), paged.expected(0.3), rtol=1e-4, atol=1e-5)


def test_pages_may_be_views() -> None:
    """Keys and values of a drafter lie side by side in one tensor."""
    paged = Paged(STEPS["mixed"], (6, 2), (16, 16), "scattered")
    both = torch.cat([paged.key_pages, paged.value_pages], 2)
    found = paged_attention(paged.query, both[:, :, :2], both[:, :, 2:], paged.inputs(), scale=0.3)
    torch.testing.assert_close(found.double(), paged.expected(0.3), rtol=1e-4, atol=1e-5)


def test_one_step_serves_layers_with_different_rules() -> None:
    """Masks are kept for the step; layers with another window, grouping or dtype must not get each other's."""
    paged = Paged(STEPS["mixed"], (4, 4), (16, 16), "scattered")
    inputs = paged.inputs()
    both = {"causal": False}
    for rules in ({}, both, {"window": 4}, {"window": 7}, both | {"window": 4}, {"softcap": 2.0}, {"window": 4}):
        found = paged_attention(paged.query, paged.key_pages, paged.value_pages, inputs, scale=0.3, **rules)
        torch.testing.assert_close(found.double(), paged.expected(0.3, **rules), rtol=1e-4, atol=1e-5)
    halved = [tensor.bfloat16() for tensor in (paged.query, paged.key_pages, paged.value_pages)]
    found = paged_attention(*halved, inputs, scale=0.3)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), paged.expected(0.3), rtol=0.1, atol=0.05)


def test_scores_are_float32_in_half_precision() -> None:
    """Two keys whose scores differ by less than bfloat16 can hold near 64 still get different weights."""
    query = torch.tensor([8.0, 1.0]).view(1, 1, 2).bfloat16()
    keys = torch.tensor([[8.0, 0.0], [8.0, 0.125]]).view(1, 2, 1, 2).bfloat16()
    values = torch.tensor([0.0, 1.0]).view(1, 2, 1, 1).bfloat16()
    lengths, ends, table = np.array([1]), np.array([2]), np.array([[0]])
    inputs = AttentionInputs(
        torch.tensor([1]), torch.zeros(1, dtype=torch.int64), torch.tensor([[0]]), torch.tensor([2]),
        plan_groups(lengths, ends, table, 2),
    )  # fmt: skip
    expected = math.exp(0.125) / (1 + math.exp(0.125))
    for softcap in (None, 1e4):
        weight = paged_attention(query, keys, values, inputs, scale=1.0, softcap=softcap).item()
        assert weight == pytest.approx(expected, abs=2e-3)


def test_overflow_in_float16_stays_with_its_owner() -> None:
    """A key that overflowed must not reach another request through a reused block."""
    pages = torch.zeros(2, 2, 1, 1, dtype=torch.float16)
    bad = torch.tensor([float("nan"), float("inf"), 1.0]).view(3, 1, 1).half()
    write_pages(pages, torch.tensor([1, 2, 3]), bad)
    assert torch.isfinite(pages).all()
    assert pages.flatten()[3] == 1


def test_groups_join_adjacent_requests_of_equal_length() -> None:
    """Equal neighbours form one batch; a lone request in adjacent blocks is read in place."""
    table = np.array([[3, 4, 5], [9, 7, 8], [1, 2, 6], [0, 0, 0]])
    groups = plan_groups(np.array([2, 1, 1, 2]), np.array([8, 5, 9, 2]), table, BLOCK)
    assert [(g.first_request, g.num_requests, g.query_len, g.max_seq_len) for g in groups] == [
        (0, 1, 2, 8),
        (1, 2, 1, 9),
        (3, 1, 2, 2),
    ]
    assert [(g.tokens.start, g.tokens.stop) for g in groups] == [(0, 2), (2, 4), (4, 6)]
    assert [g.first_key for g in groups] == [3 * BLOCK, None, 0]
    scattered = plan_groups(np.array([1]), np.array([9]), table[1:2], BLOCK)
    assert scattered[0].first_key is None
    assert plan_groups(np.array([1]), np.array([8]), table[2:3], BLOCK)[0].first_key == BLOCK
