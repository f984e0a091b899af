"""Comparing conversations: what follows a difference says nothing."""

import dataclasses
from pathlib import Path

from specflow.core.sampling_params import SamplingParams
from specflow.engine.losslessness import comparable, find_differences
from specflow.engine.outputs import RequestOutput
from specflow.tasks.judging import judge
from tests.engine.helpers import make_engine

GREEDY = SamplingParams(max_tokens=6)


def test_later_turns_of_a_conversation_that_differed_are_passed_over(llama_folder: Path) -> None:
    """In half precision a tie in the first answer gave the second turn another prompt, and its answer was called a
    fault. A difference of a turn with the same prompt still counts, and so does one that no earlier turn explains."""
    engine = make_engine(llama_folder)
    names = ["a", "b", "a/turn-2", "b/turn-2"]
    plain = engine.generate([[5, 9], [7, 3], [5, 9, 1], [7, 3, 1]], GREEDY, request_ids=names)

    def other(output: RequestOutput, prompt: bool) -> RequestOutput:
        ids = (*output.prompt_ids[:-1], 2) if prompt else output.prompt_ids
        return dataclasses.replace(output, prompt_ids=ids, token_ids=(1, *output.token_ids[1:]))

    first, second, later, last = plain
    found = find_differences(engine, plain, [other(first, False), second, other(later, True), last], GREEDY)
    assert [one.request_id for one in found] == ["a"]
    assert comparable(plain, [other(first, False), second, other(later, True), last]) == (3, 18)
    same_prompt = find_differences(engine, plain, [other(first, False), second, other(later, False), last], GREEDY)
    assert [one.request_id for one in same_prompt] == ["a", "a/turn-2"]
    unexplained = find_differences(engine, plain, [first, second, later, other(last, True)], GREEDY)
    assert [one.request_id for one in unexplained] == ["b/turn-2"]
    assert "1 later turns not compared" in judge(found, 3, 18, left_out=1).sentence()
