"""specflow's conformance kit on this method, and what is special about it."""

import numpy as np
from specflow_custom_class.proposer import PhraseLookupOptions, PhraseLookupProposer, phrase_ends

from specflow.testing import ProposerConformance


class TestPhraseLookup(ProposerConformance):
    proposer = "phrase_lookup"
    invalid_options = ({"min_phrase": 0}, {"max_phrase": 1, "min_phrase": 2})
    drafts_follow_the_text = False  # it matters where the prompt ends


def drafts(prompt: list[int], output: list[int], most: int = 2, **options: int) -> list[int]:
    proposer = PhraseLookupProposer(PhraseLookupOptions(**options))
    proposer.start("one", 0, prompt)
    return proposer.draft(np.array([*prompt, *output]), most, "one").tolist()


def test_the_prompt_counts_more_than_the_output() -> None:
    assert drafts([1, 2, 3, 4], [9, 1, 2, 7, 1, 2]) == [3, 4]


def test_the_output_counts_where_the_prompt_has_nothing() -> None:
    assert drafts([5], [1, 2, 7, 8, 1, 2]) == [7, 8]


def test_the_longest_phrase_wins() -> None:
    assert drafts([1, 2, 3, 9, 2, 6], [1, 2]) == [3, 9]
    assert drafts([1, 2, 3, 9, 2, 6], [1, 2], max_phrase=1) == [6, 1]


def test_nothing_is_drafted_without_a_phrase() -> None:
    assert drafts([1, 2, 3], [4]) == []
    assert drafts([1, 2, 3], [9, 3], min_phrase=2) == []


def test_phrases_that_overlap_the_end_are_found() -> None:
    assert phrase_ends(np.array([7, 7, 7]), 2).tolist() == [2]
    assert phrase_ends(np.array([7]), 1).tolist() == []
