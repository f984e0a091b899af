"""Every request option with speculation is what it is without (user cases, section C)."""

from pathlib import Path

import pytest
import torch

from specflow.core.request import FinishReason
from specflow.core.sampling_params import SamplingParams
from specflow.testing.conformance import assert_same
from specflow.testing.proposers import NoiseProposer
from tests.engine.helpers import PROMPTS, generate_by_transformers, make_engine, oracle_engine, plain, reference_model

LENGTHS = [1, 2, 8]


def check(folder: Path, sampling: SamplingParams, num_drafts: int = 5, wrong_at: int | None = None) -> list:
    """Oracle, spoilt oracle and noise under these options equal plain decoding under the same options."""
    engine, names = oracle_engine(folder, PROMPTS, num_drafts, wrong_at)
    expected = engine.generate(PROMPTS, sampling, speculate=False, request_ids=names)
    found = engine.generate(PROMPTS, sampling, request_ids=names)
    assert_same(found, expected)
    noise = make_engine(folder, NoiseProposer(num_drafts, 384)).generate(PROMPTS, sampling, request_ids=names)
    assert_same(noise, expected)
    return found


@pytest.mark.parametrize("num_drafts", LENGTHS)
@pytest.mark.parametrize(
    "penalty", [{"repetition_penalty": 1.3}, {"frequency_penalty": 0.5}, {"presence_penalty": 0.5}]
)
def test_penalties(llama_folder: Path, num_drafts: int, penalty: dict[str, float]) -> None:
    """C18: row i counts the drafts before it."""
    check(llama_folder, SamplingParams(max_tokens=40, ignore_eos=True, **penalty), num_drafts)


def test_repetition_penalty_equals_transformers(llama_folder: Path) -> None:
    outputs = plain(llama_folder, PROMPTS, SamplingParams(max_tokens=40, repetition_penalty=1.3))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert list(output.token_ids) == generate_by_transformers(llama_folder, prompt, 40, repetition_penalty=1.3)


def test_neutral_penalty_is_no_penalty(llama_folder: Path) -> None:
    """C20."""
    neutral = plain(llama_folder, PROMPTS, SamplingParams(repetition_penalty=1.0, max_tokens=20))
    assert_same(neutral, [*_renamed(plain(llama_folder, PROMPTS, SamplingParams(max_tokens=20)), neutral)])


def _renamed(outputs: list, like: list) -> list:
    import dataclasses

    return [dataclasses.replace(one, request_id=other.request_id) for one, other in zip(outputs, like, strict=True)]


def test_a_banned_token_never_appears(llama_folder: Path) -> None:
    """C21: the oracle replays the continuation that holds the banned id."""
    free = plain(llama_folder, PROMPTS, SamplingParams(max_tokens=40, ignore_eos=True))
    ids = [token for output in free for token in output.token_ids]
    banned = max(set(ids), key=ids.count)
    sampling = SamplingParams(max_tokens=40, ignore_eos=True, logit_bias={banned: float("-inf")})
    for output in check(llama_folder, sampling):
        assert banned not in output.token_ids


def test_bad_words(llama_folder: Path) -> None:
    free = plain(llama_folder, PROMPTS, SamplingParams(max_tokens=40, ignore_eos=True))
    printable = [character for character in free[0].text if character.isalnum() and character.isascii()]
    outputs = check(llama_folder, SamplingParams(max_tokens=40, ignore_eos=True, bad_words=printable[:2]))
    tokenizer = make_engine(llama_folder).target.tokenizer
    banned = {tokenizer(word)["input_ids"][0] for word in printable[:2] if len(tokenizer(word)["input_ids"]) == 1}
    assert banned
    for output in outputs:
        assert not banned & set(output.token_ids)


@pytest.mark.parametrize("num_drafts", LENGTHS)
def test_min_tokens_equals_transformers(llama_folder: Path, num_drafts: int) -> None:
    """C22: the fourth token is declared EOS, nine tokens are wanted at least."""
    free = plain(llama_folder, PROMPTS[:1], SamplingParams(max_tokens=40, ignore_eos=True))[0]
    eos = free.token_ids[3]
    sampling = SamplingParams(max_tokens=40, min_tokens=9, ignore_eos=True, stop_token_ids=[eos])
    engine, names = oracle_engine(llama_folder, PROMPTS[:1], num_drafts)
    output = engine.generate(PROMPTS[:1], sampling, request_ids=names)[0]
    expected = generate_by_transformers(llama_folder, PROMPTS[0], 40, min_new_tokens=9, eos_token_id=eos)
    assert list(output.token_ids) == expected
    assert len(output.token_ids) >= 9


@pytest.mark.parametrize("position", range(1, 11))
def test_stop_token_inside_an_accepted_block(llama_folder: Path, position: int) -> None:
    """C23: nothing follows the end token, wherever in the block it stands."""
    free = plain(llama_folder, PROMPTS[:1], SamplingParams(max_tokens=30, ignore_eos=True))[0]
    eos = free.token_ids[position]
    end = free.token_ids.index(eos) + 1
    engine, names = oracle_engine(llama_folder, PROMPTS[:1], 6)
    for stop_ids in ([eos], [eos, free.token_ids[-1]]):
        sampling = SamplingParams(max_tokens=30, ignore_eos=True, stop_token_ids=stop_ids)
        output = engine.generate(PROMPTS[:1], sampling, request_ids=names)[0]
        first = min(free.token_ids.index(one) for one in stop_ids) + 1
        assert output.token_ids == free.token_ids[: min(end, first)]
        assert output.finish_reason is FinishReason.STOP
    ignored = engine.generate(PROMPTS[:1], SamplingParams(max_tokens=30, ignore_eos=True), request_ids=names)[0]
    assert ignored.token_ids == free.token_ids


def test_eos_of_the_checkpoint_stops(llama_folder: Path) -> None:
    """EOS (id 0) is pushed up, so that it comes early; it is the last token and no text."""
    for output in check(llama_folder, SamplingParams(max_tokens=40, logit_bias={0: 6.0})):
        if 0 in output.token_ids:
            assert output.token_ids.index(0) == len(output.token_ids) - 1
            assert output.finish_reason is FinishReason.STOP
            assert "endoftext" not in output.text


@pytest.mark.parametrize("num_drafts", range(1, 9))
@pytest.mark.parametrize("include", [False, True])
def test_stop_string_across_tokens(llama_folder: Path, num_drafts: int, include: bool) -> None:
    """C25: text, ids and finish reason are those of plain decoding for every K."""
    free = plain(llama_folder, PROMPTS[:1], SamplingParams(max_tokens=40, ignore_eos=True))[0]
    clean = [i for i in range(len(free.text) - 6) if "\ufffd" not in free.text[i : i + 6]]
    stop = free.text[clean[len(clean) // 2] :][:6]
    sampling = SamplingParams(
        max_tokens=40, ignore_eos=True, stop=[stop], include_stop_str_in_output=include, logprobs=0
    )
    engine, names = oracle_engine(llama_folder, PROMPTS[:1], num_drafts)
    found = engine.generate(PROMPTS[:1], sampling, request_ids=names)
    assert_same(found, engine.generate(PROMPTS[:1], sampling, speculate=False, request_ids=names))
    expected = free.text[: free.text.index(stop) + (6 if include else 0)]
    assert found[0].text == expected
    assert found[0].finish_reason is FinishReason.STOP
    assert len(found[0].logprobs) == len(found[0].token_ids)
    assert found[0].token_ids == free.token_ids[: len(found[0].token_ids)]


def test_stop_wins_over_length_in_the_same_block(llama_folder: Path) -> None:
    free = plain(llama_folder, PROMPTS[:1], SamplingParams(max_tokens=5, ignore_eos=True))[0]
    engine, names = oracle_engine(llama_folder, PROMPTS[:1], 6)
    first = free.token_ids.index(free.token_ids[2]) + 1
    sampling = SamplingParams(max_tokens=5, ignore_eos=True, stop_token_ids=[free.token_ids[2]])
    output = engine.generate(PROMPTS[:1], sampling, request_ids=names)[0]
    assert output.token_ids == free.token_ids[:first]
    assert output.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("limit", range(17))
def test_never_more_than_max_tokens(llama_folder: Path, limit: int) -> None:
    """C26: exact length for every limit, and no draft that could not be kept."""
    engine, names = oracle_engine(llama_folder, PROMPTS[:2], 7)
    for output in engine.generate(PROMPTS[:2], SamplingParams(max_tokens=limit, ignore_eos=True), request_ids=names):
        assert len(output.token_ids) == limit
        assert output.finish_reason is FinishReason.LENGTH
        assert output.drafted <= max(0, limit - 1)


def test_logprobs_belong_to_their_position(llama_folder: Path) -> None:
    """C27: against one teacher-forced pass of transformers over prompt and output."""
    engine, names = oracle_engine(llama_folder, PROMPTS, 4, 2)
    outputs = engine.generate(PROMPTS, SamplingParams(max_tokens=40, ignore_eos=True, logprobs=5), request_ids=names)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = torch.tensor([[*prompt, *output.token_ids]])
        with torch.inference_mode():
            logits = reference_model(llama_folder)(ids).logits[0, len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits, -1)
        assert len(output.logprobs) == len(output.token_ids)
        for row, token, entry in zip(expected, output.token_ids, output.logprobs, strict=True):
            assert abs(entry.chosen - row[token].item()) < 1e-4
            values, ids = row.topk(5)
            assert [one for one, _ in entry.top] == ids.tolist()
            assert torch.allclose(torch.tensor([value for _, value in entry.top]), values, atol=1e-4)


@pytest.mark.parametrize("num_drafts", [1, 5])
def test_streamed_chunks_are_the_output(llama_folder: Path, num_drafts: int) -> None:
    """C29: no holes, no held-back tail; byte-level random text is full of incomplete characters."""
    engine = make_engine(llama_folder, NoiseProposer(num_drafts, 384))
    sampling = SamplingParams(max_tokens=60, ignore_eos=True)
    expected = engine.generate(PROMPTS, sampling, speculate=False)
    texts, ids, ends = [""] * len(PROMPTS), [[] for _ in PROMPTS], [0] * len(PROMPTS)
    for chunk in engine.stream(PROMPTS, sampling):
        texts[chunk.index] += chunk.text
        ids[chunk.index].extend(chunk.token_ids)
        ends[chunk.index] += chunk.finish_reason is not None
    assert texts == [output.text for output in expected]
    assert ids == [list(output.token_ids) for output in expected]
    assert ends == [1] * len(PROMPTS)


def test_streaming_an_emoji(llama_folder: Path) -> None:
    """A character of four tokens is streamed whole, once."""
    engine = make_engine(llama_folder)
    emoji = engine.target.tokenizer("a😀b")["input_ids"]
    assert len(emoji) >= 6
    from specflow.engine.detokenizer import Detokenizer

    detokenizer = Detokenizer(engine.target.tokenizer)
    pieces = []
    for token in emoji:
        detokenizer.add(token)
        pieces.append(detokenizer.release(0))
    detokenizer.finish()
    assert "".join(pieces) == "a😀b"
    assert "😀" in pieces


def test_stop_string_is_never_streamed(llama_folder: Path) -> None:
    free = plain(llama_folder, PROMPTS[:1], SamplingParams(max_tokens=40, ignore_eos=True))[0]
    stop = free.text[10:16]
    engine = make_engine(llama_folder)
    sampling = SamplingParams(max_tokens=40, ignore_eos=True, stop=[stop])
    text = "".join(chunk.text for chunk in engine.stream(PROMPTS[:1], sampling))
    assert text == free.text[: free.text.index(stop)]


def test_closing_a_stream_gives_everything_back(llama_folder: Path) -> None:
    engine = make_engine(llama_folder)
    stream = engine.stream(PROMPTS, SamplingParams(max_tokens=40, ignore_eos=True))
    next(stream)
    stream.close()
    assert list(engine.scheduler.check_idle()) == []


def test_abort_keeps_what_there_is(llama_folder: Path) -> None:
    engine = make_engine(llama_folder)
    steps = []

    def stop(_: object) -> None:
        steps.append(1)
        if len(steps) == 5:
            engine.abort("b")

    sampling = SamplingParams(max_tokens=20, ignore_eos=True)
    outputs = engine.generate(PROMPTS[:2], sampling, request_ids=["a", "b"], on_step=stop)
    assert [output.finish_reason for output in outputs] == [FinishReason.LENGTH, FinishReason.ABORT]
    assert 0 < len(outputs[1].token_ids) < 20
