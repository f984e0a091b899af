"""The parallel drafter in the engine: lossless always, and right where its masks play no part."""

from pathlib import Path

import pytest

from specflow.core.sampling_params import SamplingParams
from specflow.errors import ConfigError
from specflow.proposers.pard import PardOptions, PardProposer
from specflow.testing.conformance import assert_lossless
from tests.engine.helpers import PROMPTS, make_engine
from tests.models import add_to_config, tiny_llama

GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
LONG = [[(3 * i + 7 * j) % 383 + 1 for i in range(30 + 9 * j)] for j in range(4)]


@pytest.fixture(scope="module")
def copy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target itself: its first draft of a round is always right, those from masks hardly ever."""
    return add_to_config(tiny_llama(tmp_path_factory.mktemp("copy")), spd_type="pard", pard_token=2)


def pard(folder: Path, num_drafts: int = 3, method: str = "greedy") -> PardProposer:
    return PardProposer(PardOptions(path=str(folder), num_speculative_tokens=num_drafts, draft_sample_method=method))


@pytest.mark.parametrize(
    ("prompts", "options"),
    [
        (PROMPTS, {}),
        (LONG, {"max_num_batched_tokens": 13}),  # prompts in chunks
        (PROMPTS, {"num_kv_blocks": 40}),  # pre-emption
        ([row[:n] for row in LONG for n in (1, 2, 3, 5, 8, 30)], {"max_num_seqs": 3}),  # a crowd through few slots
    ],
    ids=["whole", "chunks", "pre-emption", "crowd"],
)
@pytest.mark.parametrize("num_drafts", [1, 4])
def test_the_first_draft_of_a_copy_is_always_right(
    copy_folder: Path, num_drafts: int, prompts: list[list[int]], options: dict[str, int]
) -> None:
    """Anything below one accepted draft per round in float32 is a slip of positions or of the cache."""
    engine = make_engine(copy_folder, pard(copy_folder, num_drafts), **options)
    for output in assert_lossless(engine, prompts, SamplingParams(max_tokens=60, ignore_eos=True)):
        assert output.accepted >= output.rounds > 0
        if num_drafts == 1:
            assert output.accepted == output.drafted
    assert (engine.scheduler.num_preemptions > 0) == ("num_kv_blocks" in options)


def test_to_the_end_of_the_context(copy_folder: Path) -> None:
    prompts = [[(7 * i) % 300 + 1 for i in range(length)] for length in (100, 120, 126, 127, 128)]
    for output in assert_lossless(make_engine(copy_folder, pard(copy_folder, 5)), prompts, GREEDY):
        assert output.accepted >= output.rounds


def test_an_ordinary_model_is_refused_by_the_engine(llama_folder: Path) -> None:
    with pytest.raises(ConfigError, match="not trained to draft in parallel"):
        make_engine(llama_folder, pard(llama_folder))
