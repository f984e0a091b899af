"""Context limits, odd prompts, crowds and pre-emption (user cases, section F)."""

import random
from pathlib import Path

import pytest

from specflow.core.request import FinishReason
from specflow.core.sampling_params import SamplingParams
from specflow.errors import ConfigError, PromptError
from specflow.testing.conformance import assert_idle, assert_lossless, assert_same
from specflow.testing.proposers import NoiseProposer
from tests.engine.helpers import PROMPTS, make_engine, oracle_engine, plain, watch_positions

FREE = SamplingParams(max_tokens=50, ignore_eos=True)


@pytest.mark.parametrize("length", range(120, 129))
def test_drafts_stop_at_the_context_limit(llama_folder: Path, length: int) -> None:
    """C48: same tokens and finish reason as plain decoding; no position past the last one is fed."""
    prompt = [(7 * i) % 300 + 1 for i in range(length)]
    engine = make_engine(llama_folder, NoiseProposer(8, 384))
    highest = watch_positions(engine)
    output = assert_lossless(engine, [prompt], FREE)[0]
    assert max(highest) <= 127
    assert output.finish_reason is FinishReason.LENGTH
    assert len(output.token_ids) == max(1, 128 - length)


def test_a_prompt_past_the_context_is_refused(llama_folder: Path) -> None:
    engine = make_engine(llama_folder)
    with pytest.raises(PromptError, match=r"129 tokens.*max_model_len=128"):
        engine.generate([[1] * 129], FREE)
    assert_idle(engine)


def test_empty_prompts_are_refused(llama_folder: Path) -> None:
    """C49."""
    engine = make_engine(llama_folder)
    for empty in ([], ""):
        with pytest.raises(PromptError, match="prompt is empty"):
            engine.generate([empty], FREE)


def test_one_token_prompt(llama_folder: Path) -> None:
    assert_lossless(make_engine(llama_folder, NoiseProposer(3, 384)), [[5]], FREE)


def test_ids_outside_the_vocabulary_are_refused(llama_folder: Path) -> None:
    with pytest.raises(PromptError, match="384"):
        make_engine(llama_folder).generate([[1, 384]], FREE)


def test_a_crowd_of_short_requests(llama_folder: Path) -> None:
    """C52: 257 prompts through 8 slots; every row equals its solo run and nobody starves."""
    generator = random.Random(0)
    prompts = [[generator.randrange(1, 384) for _ in range(generator.randint(1, 30))] for _ in range(257)]
    samplings = [SamplingParams(max_tokens=generator.randint(1, 20), ignore_eos=True) for _ in prompts]
    engine, names = oracle_engine(llama_folder, prompts, 4, 1, length=24)
    together = engine.generate(prompts, samplings, request_ids=names)
    assert_idle(engine)
    for index in range(0, 257, 16):
        alone = engine.generate([prompts[index]], samplings[index], speculate=False, request_ids=[names[index]])
        assert_same([together[index]], alone)
    assert [len(output.token_ids) for output in together] == [sampling.max_tokens for sampling in samplings]
    assert all(output.drafted <= max(0, s.max_tokens - 1) * 2 for output, s in zip(together, samplings, strict=True))


@pytest.mark.parametrize("budget", [8, 13, 64])
def test_chunked_prefill(llama_folder: Path, budget: int) -> None:
    prompts = [[(3 * i + 7 * j) % 383 + 1 for i in range(30 + 9 * j)] for j in range(4)]
    engine = make_engine(llama_folder, NoiseProposer(2, 384), max_num_batched_tokens=budget)
    found = assert_lossless(engine, prompts, SamplingParams(max_tokens=12, ignore_eos=True))
    whole = plain(llama_folder, prompts, SamplingParams(max_tokens=12, ignore_eos=True), max_num_batched_tokens=512)
    assert [one.token_ids for one in found] == [one.token_ids for one in whole]


@pytest.mark.parametrize("wrong_at", [None, 1])
def test_pre_emption_changes_nothing(llama_folder: Path, wrong_at: int | None) -> None:
    """Blocks for fewer requests than run: the newest are recomputed, output and acceptance stay the same."""
    engine, names = oracle_engine(llama_folder, PROMPTS, 4, wrong_at, num_kv_blocks=38)
    expected = plain(llama_folder, PROMPTS, SamplingParams(max_tokens=60, ignore_eos=True))
    found = engine.generate(PROMPTS, SamplingParams(max_tokens=60, ignore_eos=True), request_ids=names)
    assert engine.scheduler.num_preemptions > 0
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert_idle(engine)


def test_concurrency_limits_what_runs(llama_folder: Path) -> None:
    engine = make_engine(llama_folder)
    sizes = []
    engine.generate(PROMPTS, FREE, concurrency=2, on_step=lambda record: sizes.append(record.num_requests))
    assert max(sizes) == 2


def test_arrivals_delay_requests(llama_folder: Path) -> None:
    engine = make_engine(llama_folder)
    short = SamplingParams(max_tokens=2, ignore_eos=True)
    first, second = engine.generate(PROMPTS[:2], short, arrivals=[0.0, 0.3])
    assert second.arrival - first.arrival > 0.25
    assert second.token_times[0] >= second.arrival


def test_too_many_drafts_for_the_context(llama_folder: Path) -> None:
    with pytest.raises(ConfigError, match="num_speculative_tokens=200"):
        make_engine(llama_folder, NoiseProposer(200, 384))


def test_context_beyond_the_checkpoint(llama_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_model_len=100000.*512"):
        make_engine(llama_folder, max_model_len=100_000)
