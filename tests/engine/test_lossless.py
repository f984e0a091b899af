"""Greedy output equals plain decoding and transformers' own, whatever the proposer does (user cases, section A)."""

from pathlib import Path

import pytest

from specflow.core.sampling_params import SamplingParams
from specflow.errors import ProposerError
from specflow.proposers.base import Proposer
from specflow.proposers.ngram import NgramOptions, NgramProposer
from specflow.proposers.ngram_gpu import NgramGpuOptions, NgramGpuProposer
from specflow.testing.conformance import assert_idle, assert_lossless, assert_same
from specflow.testing.proposers import CallbackProposer, NoiseProposer
from tests.engine.helpers import PROMPTS, generate_by_transformers, make_engine, oracle_engine, plain

GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)


def prompt_lookup(name: str, **options: int) -> Proposer:
    """Prompt lookup on the host or on the device."""
    return NgramProposer(NgramOptions(**options)) if name == "ngram" else NgramGpuProposer(NgramGpuOptions(**options))


def test_plain_decoding_equals_transformers(llama_folder: Path) -> None:
    for prompt, output in zip(PROMPTS, plain(llama_folder, PROMPTS, SamplingParams(max_tokens=40)), strict=True):
        assert list(output.token_ids) == generate_by_transformers(llama_folder, prompt, 40)


def test_plain_decoding_equals_transformers_on_the_bundled_architecture(qwen3_folder: Path) -> None:
    for prompt, output in zip(PROMPTS, plain(qwen3_folder, PROMPTS, SamplingParams(max_tokens=40)), strict=True):
        assert list(output.token_ids) == generate_by_transformers(qwen3_folder, prompt, 40)


@pytest.mark.parametrize("wrong_at", [0, 1, 2, 3, 4, None])
def test_rollback_leaves_no_trace(llama_folder: Path, wrong_at: int | None) -> None:
    """C03: a rejection at every position; the cache holds exactly the committed tokens but the anchor."""
    engine, names = oracle_engine(llama_folder, PROMPTS, 5, wrong_at)
    lengths = []

    def check(_: object) -> None:
        for request in engine._requests.values():
            if request.output_ids and request.finish_reason is None:
                lengths.append(request.num_tokens - 1 - request.num_computed)

    outputs = engine.generate(PROMPTS, GREEDY, request_ids=names, on_step=check)
    assert_same(outputs, engine.generate(PROMPTS, GREEDY, speculate=False, request_ids=names))
    assert set(lengths) == {0}
    assert_idle(engine)
    for output in outputs:
        assert output.rounds > 0
        if wrong_at is None:
            assert output.accepted == output.drafted
        else:
            assert output.accepted <= output.rounds * wrong_at


def test_ragged_acceptance_in_one_batch(llama_folder: Path) -> None:
    """C04: rows that accept 0, 2, 4 and all drafts in the same steps."""
    engine, names = oracle_engine(llama_folder, PROMPTS, 5, [0, 2, 4, None])
    batched = engine.generate(PROMPTS, GREEDY, request_ids=names)
    for index, (prompt, name) in enumerate(zip(PROMPTS, names, strict=True)):
        alone = engine.generate([prompt], GREEDY, speculate=False, request_ids=[name])
        assert_same([batched[index]], alone)


@pytest.mark.parametrize("name", ["ngram", "ngram_gpu"])
def test_rows_with_and_without_drafts_mix(llama_folder: Path, name: str) -> None:
    """C06: ngram finds repeats in some prompts only; order of the rows does not matter."""
    repeated = [[1, 2, 3, 4] * 4, [9, 9, 9, 9, 9, 9], [50, 60, 50, 60, 50, 60]]
    distinct = [list(range(100 + 10 * i, 108 + 10 * i)) for i in range(3)]
    prompts = [prompt for pair in zip(repeated, distinct, strict=True) for prompt in pair]
    engine = make_engine(llama_folder, prompt_lookup(name, num_speculative_tokens=4, prompt_lookup_max=2))
    outputs = assert_lossless(engine, prompts, GREEDY)
    assert any(output.drafted for output in outputs)
    shuffled = [4, 2, 0, 5, 3, 1]
    again = engine.generate(
        [prompts[i] for i in shuffled], GREEDY, request_ids=[outputs[i].request_id for i in shuffled]
    )
    assert_same(again, [outputs[i] for i in shuffled])


@pytest.mark.parametrize("every", [1, 2])
def test_empty_drafts(llama_folder: Path, every: int) -> None:
    """C07: a proposer that returns nothing, always or every second time."""
    proposer = CallbackProposer(3, lambda call, tokens, most: [] if call % every == 0 else [1] * most)
    outputs = assert_lossless(make_engine(llama_folder, proposer), PROMPTS, GREEDY)
    if every == 1:
        assert all(output.rounds == 0 for output in outputs)


def test_noise_is_rejected(llama_folder: Path) -> None:
    outputs = assert_lossless(make_engine(llama_folder, NoiseProposer(6, 384)), PROMPTS, GREEDY)
    assert sum(output.accepted for output in outputs) < 0.1 * sum(output.drafted for output in outputs)


def test_ids_outside_the_vocabulary_are_dropped_and_counted(llama_folder: Path) -> None:
    engine = make_engine(llama_folder, CallbackProposer(3, lambda call, tokens, most: [384, -5, 10**9][:most]))
    outputs = assert_lossless(engine, PROMPTS, GREEDY)
    assert all(output.drafted == 0 for output in outputs)
    assert engine.incidents == {"callback drafted ids outside the vocabulary": sum(engine.incidents.values())}


def test_a_raising_proposer_fails_by_name_and_leaves_no_trace(llama_folder: Path) -> None:
    """C74: the third call raises; the next request is as good as the first."""

    def fail(call: int, tokens: object, most: int) -> list[int]:
        if call == 3:
            raise ValueError("out of luck")
        return [1] * most

    engine = make_engine(llama_folder, CallbackProposer(2, fail))
    with pytest.raises(ProposerError, match=r"callback.*ValueError.*out of luck"):
        engine.generate(PROMPTS[:1], GREEDY)
    assert_idle(engine)
    assert_lossless(engine, PROMPTS, GREEDY)


@pytest.mark.parametrize("name", ["ngram", "ngram_gpu"])
def test_highly_repetitive_prompt(llama_folder: Path, name: str) -> None:
    """C01 on a tiny model: long repetition, ngram 2 to 5."""
    proposer = prompt_lookup(name, num_speculative_tokens=4, prompt_lookup_min=2, prompt_lookup_max=5)
    assert_lossless(make_engine(llama_folder, proposer), [[33] * 48, [33, 34] * 24], SamplingParams(max_tokens=64))


def test_two_engines_share_a_process(llama_folder: Path, qwen3_folder: Path) -> None:
    """No global "current batch": two targets interleave."""
    first, second = make_engine(llama_folder), make_engine(qwen3_folder)
    one = first.stream(PROMPTS[:1], GREEDY)
    other = second.stream(PROMPTS[:1], GREEDY)
    ids: tuple[list[int], list[int]] = ([], [])
    for chunk, chunk_2 in zip(one, other, strict=True):
        ids[0].extend(chunk.token_ids)
        ids[1].extend(chunk_2.token_ids)
    assert ids[0] == generate_by_transformers(llama_folder, PROMPTS[0], 40, eos_token_id=None)
    assert ids[1] == generate_by_transformers(qwen3_folder, PROMPTS[0], 40, eos_token_id=None)
