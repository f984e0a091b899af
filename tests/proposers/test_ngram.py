"""N-gram proposer against vLLM's worked examples and a brute-force oracle."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specflow.errors import ConfigError
from specflow.proposers.ngram import NgramOptions, NgramProposer
from tests.proposers.prompt_lookup_cases import CASES, oracle, propose


def build(lookup_min: int, lookup_max: int, k: int, **options: Any) -> NgramProposer:
    return NgramProposer(
        NgramOptions(num_speculative_tokens=k, prompt_lookup_min=lookup_min, prompt_lookup_max=lookup_max, **options)
    )


@pytest.mark.parametrize(
    ("name", "history", "low", "high", "k", "earliest", "latest"), CASES, ids=[c[0] for c in CASES]
)
def test_worked_examples(
    name: str, history: list[int], low: int, high: int, k: int, earliest: list[int], latest: list[int] | None
) -> None:
    assert propose(build(low, high, k), (history, k)) == [earliest]
    if latest is not None:
        assert propose(build(low, high, k, match_policy="latest"), (history, k)) == [latest]


def test_the_draft_ends_at_the_context_limit() -> None:
    """N21 and N22: the engine caps max_drafts at what still fits."""
    history = [1, 2, 3, 4, 1, 2]
    assert propose(build(2, 2, 4), (history, 8 - 6)) == [[3, 4]]
    assert propose(build(2, 2, 4), (history, 0)) == [[]]


def test_rows_that_want_no_drafts_are_skipped() -> None:
    """N23 and N24."""
    n1 = [1, 2, 3, 4, 1, 2, 3]
    found = propose(build(2, 2, 4), (n1, 4), ([1, 2, 3, 4, 5], 4), ([1, 2, 3, 1, 2], 0), ([1, 2] * 32, 0))
    assert found == [[4, 1, 2, 3], [], [], []]
    assert propose(build(2, 2, 4), (n1, 2)) == [[4, 1]]


def test_one_token_and_short_prompts() -> None:
    """C49 and C50: no slice goes negative, nothing matches itself."""
    assert propose(build(1, 5, 3), ([5], 3)) == [[]]
    assert propose(build(5, 5, 3), ([1, 2, 3], 3)) == [[]]
    assert propose(build(2, 2, 3), ([1, 2, 3, 1, 2], 3)) == [[3, 1, 2]]
    assert propose(build(2, 2, 3), (list(range(1, 51)), 3)) == [[]]


def test_single_row_interface_agrees() -> None:
    proposer = build(2, 3, 4)
    assert list(proposer.draft(np.array([7, 1, 2, 9, 1, 2, 8, 7, 1, 2]), 2, "a")) == [9, 1]
    assert list(proposer.draft(np.array([1, 2]), 0, "a")) == []


@settings(max_examples=300, deadline=None)
@given(
    histories=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=40), min_size=1, max_size=4),
    low=st.integers(1, 5),
    extra=st.integers(0, 4),
    k=st.integers(1, 6),
    latest=st.booleans(),
)
def test_equals_the_definition(histories: list[list[int]], low: int, extra: int, k: int, latest: bool) -> None:
    proposer = build(low, low + extra, k, match_policy="latest" if latest else "earliest")
    found = propose(proposer, *((history, k) for history in histories))
    assert found == [oracle(history, low, low + extra, k, latest) for history in histories]


@pytest.mark.parametrize(
    ("options", "low", "high"),
    [({}, 5, 5), ({"prompt_lookup_max": 4}, 4, 4), ({"prompt_lookup_min": 2}, 2, 2)],
)
def test_missing_bounds(options: dict[str, int], low: int, high: int) -> None:
    """C55: what is in force is shown."""
    proposer = NgramProposer(NgramOptions(**options))
    described = proposer.describe()
    assert (described["prompt_lookup_min"], described["prompt_lookup_max"]) == (str(low), str(high))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_speculative_tokens": 0}, ["num_speculative_tokens=0", "1 or more"]),
        ({"prompt_lookup_min": 0}, ["prompt_lookup_min=0", "1 or more"]),
        ({"prompt_lookup_max": 0}, ["prompt_lookup_max=0", "1 or more"]),
        ({"prompt_lookup_min": 4, "prompt_lookup_max": 2}, ["prompt_lookup_min=4", "prompt_lookup_max=2", "Lower"]),
        ({"match_policy": "newest"}, ["match_policy='newest'", "earliest", "latest"]),
    ],
)
def test_bad_options(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        NgramOptions(**options)
    assert all(word in str(caught.value) for word in words)


def test_attach_compiles_the_scan() -> None:
    from specflow.proposers import ngram

    build(1, 2, 2).attach(SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
    assert ngram._scan_rows.signatures
    before = len(ngram._scan_rows.signatures)
    propose(build(2, 2, 4), ([1, 2, 3, 1, 2], 4))
    assert len(ngram._scan_rows.signatures) == before


def test_needs_host_tokens_only() -> None:
    requirements = build(1, 1, 1).requirements()
    assert requirements.host_tokens
    assert requirements.lookahead_tokens == 0
    assert not requirements.draft_logits
