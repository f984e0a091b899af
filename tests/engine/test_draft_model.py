"""The draft model in the engine: lossless always, and right wherever it is the target itself."""

from pathlib import Path

import pytest

from specflow.core.sampling_params import SamplingParams
from specflow.proposers.draft_model import DraftModelOptions, DraftModelProposer
from specflow.testing.conformance import assert_lossless
from tests.engine.helpers import PROMPTS, make_engine

GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)


def draft(folder: Path, num_drafts: int = 3, method: str = "greedy") -> DraftModelProposer:
    return DraftModelProposer(
        DraftModelOptions(path=str(folder), num_speculative_tokens=num_drafts, draft_sample_method=method)
    )


@pytest.mark.parametrize("num_drafts", [1, 3, 7])
@pytest.mark.parametrize("architecture", ["llama_folder", "qwen3_folder"])
def test_a_copy_of_the_target_is_always_right(
    architecture: str, num_drafts: int, request: pytest.FixtureRequest
) -> None:
    """C02: anything below full acceptance in float32 is a slip of positions or of the cache."""
    folder = request.getfixturevalue(architecture)
    for output in assert_lossless(make_engine(folder, draft(folder, num_drafts)), PROMPTS, GREEDY):
        assert output.drafted > 0
        assert output.accepted == output.drafted


def test_a_copy_stays_right_when_prompts_come_in_chunks(llama_folder: Path) -> None:
    prompts = [[(3 * i + 7 * j) % 383 + 1 for i in range(30 + 9 * j)] for j in range(4)]
    engine = make_engine(llama_folder, draft(llama_folder), max_num_batched_tokens=13)
    for output in assert_lossless(engine, prompts, SamplingParams(max_tokens=20, ignore_eos=True)):
        assert output.accepted == output.drafted > 0


def test_a_copy_stays_right_after_pre_emption(llama_folder: Path) -> None:
    engine = make_engine(llama_folder, draft(llama_folder, 4), num_kv_blocks=40)
    outputs = assert_lossless(engine, PROMPTS, SamplingParams(max_tokens=60, ignore_eos=True))
    assert engine.scheduler.num_preemptions > 0
    for output in outputs:
        assert output.accepted == output.drafted > 0


def test_a_copy_stays_right_to_the_end_of_the_context(llama_folder: Path) -> None:
    prompts = [[(7 * i) % 300 + 1 for i in range(length)] for length in (100, 120, 126, 127, 128)]
    for output in assert_lossless(make_engine(llama_folder, draft(llama_folder, 5)), prompts, GREEDY):
        assert output.accepted == output.drafted


def test_a_crowd_through_few_slots(llama_folder: Path) -> None:
    """Slots are reused by requests of other lengths: nothing of the last owner is left in the draft's pages."""
    prompts = [[(5 * i + 11 * j) % 383 + 1 for i in range(1 + 3 * j)] for j in range(12)]
    engine = make_engine(llama_folder, draft(llama_folder), max_num_seqs=3)
    for output in assert_lossless(engine, prompts, SamplingParams(max_tokens=15, ignore_eos=True)):
        assert output.accepted == output.drafted > 0


def test_a_sampling_copy_is_always_right(llama_folder: Path) -> None:
    """Drafts sampled from q equal to p are accepted with probability one."""
    engine = make_engine(llama_folder, draft(llama_folder, 3, "probabilistic"))
    sampling = [
        SamplingParams(max_tokens=40, ignore_eos=True, temperature=t, seed=i) for i, t in enumerate((0.3, 0.7, 1, 2))
    ]
    for output in engine.generate(PROMPTS, sampling):
        assert output.accepted >= output.drafted - 1  # a coin within rounding of one
        assert output.drafted > 0
