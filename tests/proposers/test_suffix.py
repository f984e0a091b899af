"""Suffix decoding as a proposer: what it learns from whom, its file, its options, and losslessness in the engine."""

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specflow.core.sampling_params import SamplingParams
from specflow.errors import ConfigError, StorageError
from specflow.proposers import suffix_file
from specflow.proposers.suffix import SuffixOptions, SuffixProposer
from specflow.proposers.suffix_cache import SuffixCache
from specflow.proposers.suffix_file import read_outputs, write_outputs
from specflow.testing.conformance import assert_lossless, assert_lossless_at_every_length
from tests.engine.helpers import PROMPTS, make_engine
from tests.proposers.helpers import Row, make_context, make_limits

GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)


class Talk:
    """A cache driven as the engine does it: prompts, outputs, drafts."""

    def __init__(self, cap: int = 100, depth: int = 24, factor: float = 1.0) -> None:
        self.cache, self.factor = SuffixCache(depth, cap), factor
        self.texts: dict[str, list[int]] = {}

    def start(self, name: str, prompt: list[int], output: list[int]) -> None:
        self.cache.start(name, len(prompt))
        self.texts[name] = list(prompt)
        self.say(name, output)

    def say(self, name: str, ids: list[int]) -> None:
        self.texts[name] += ids
        self.cache.update(name, np.array(self.texts[name], np.int64))

    def past(self, name: str, output: list[int], prompt: list[int] | None = None) -> None:
        self.start(name, prompt or [], output)
        self.cache.stop(name)

    def draft(self, name: str, most: int = 32) -> tuple[list[int], float]:
        found = self.cache.draft(name, np.array(self.texts[name], np.int64), most, self.factor, 0.1)
        return found.token_ids.tolist(), pytest.approx(found.score)


def test_s17_outputs_of_concurrent_requests_are_visible_at_once() -> None:
    talk = Talk()
    talk.start("a", [], [1, 2, 3, 4])
    talk.start("b", [9], [1, 2])
    assert talk.draft("b", 8) == ([3, 4], 1.0)


def test_s18_to_s21_past_outputs_and_ties() -> None:
    talk = Talk()
    talk.past("a", [1, 2, 8, 9])
    talk.start("b", [5], [1, 2])
    assert talk.draft("b") == ([8, 9], 1.0)
    talk = Talk()
    talk.past("a", [1, 2, 8, 9])
    talk.past("b", [1, 2, 8, 9])
    talk.start("c", [1, 2, 3], [1, 2])
    assert talk.draft("c") == ([8, 9], 4 / 3)
    for factor, expected in ((1.0, ([3, 1], 1.0)), (0.5, ([3], 0.5))):
        talk = Talk(factor=factor)
        talk.past("a", [1, 2, 8])
        talk.start("b", [1, 2, 3], [1, 2])
        assert talk.draft("b") == expected


def test_s22_without_past_outputs() -> None:
    talk = Talk(cap=0)
    talk.past("a", [1, 2, 8, 9])
    talk.start("b", [1, 2, 3], [1, 2])
    assert talk.draft("b") == ([3, 1], 1.0)
    assert talk.cache.cached == ()
    assert talk.cache.shared.num_nodes == 1


def test_s23_prompts_are_never_shared() -> None:
    talk = Talk()
    talk.past("a", [4], prompt=[1, 2, 6, 6])
    talk.start("b", [5], [1, 2])
    assert talk.draft("b") == ([], 0.0)


def test_s28_eviction_by_order_of_starts() -> None:
    talk = Talk(cap=2)
    seen = []
    for name in ("r0", "r1", "r2", "r3"):
        talk.start(name, [7, 8, 7], [1, 2])
        if name != "r0":
            talk.cache.stop(name)
        seen.append(talk.cache.cached)
    assert seen == [("r0",), ("r0", "r1"), ("r1", "r2"), ("r2", "r3")]
    assert talk.cache.running == ("r0",)
    talk.say("r0", [7])
    assert talk.draft("r0")[0] == [8]
    assert talk.cache.shared.num_tokens == 4


def test_s29_what_is_evicted_is_forgotten() -> None:
    talk = Talk(cap=1)
    talk.past("a", [1, 2, 3, 4])
    talk.start("b", [], [1, 2])
    assert talk.cache.cached == ("b",)
    assert talk.draft("b") == ([], 0.0)


def test_a_request_that_comes_back_is_not_counted_twice() -> None:
    """After a pre-emption the own tree has prompt and output again, and the shared output goes on where it was."""
    talk = Talk()
    talk.start("a", [1, 2, 3], [4, 5])
    talk.cache.stop("a")
    talk.cache.start("a", 3)
    talk.say("a", [6, 1, 2])
    assert talk.cache.cached == ("a",)
    assert talk.cache.outputs()[0].tolist() == [4, 5, 6, 1, 2]
    assert talk.draft("a") == ([3, 4], 1.0)


def test_another_request_of_the_same_id_leaves_the_past_output() -> None:
    talk = Talk()
    talk.past("a", [4, 5, 6])
    talk.start("a", [1], [4])
    assert talk.draft("a", 1) == ([5], 0.5)
    talk.say("a", [7])
    assert [ids.tolist() for ids in talk.cache.outputs()] == [[4, 5, 6], [4, 7]]
    assert talk.cache.cached == ("a", "a")


def proposer(**options: Any) -> SuffixProposer:
    return SuffixProposer(SuffixOptions(**options))


def propose(one: SuffixProposer, *rows: Row) -> list[list[int]]:
    table = np.zeros((5, 64), np.int64)
    for row in rows:
        table[row.slot, : len(row.tokens)] = row.tokens
    draft = one.propose(make_context(table, np.zeros((5, 1), np.int64), rows))
    return [ids[:count].tolist() for ids, count in zip(draft.token_ids, draft.num_drafts.tolist(), strict=True)]


def test_a_step_takes_in_all_rows_before_it_drafts() -> None:
    one = proposer()
    one.start("late", 0, [9])
    one.start("early", 1, [])
    rows = (Row(0, [9, 1, 2], (0, 2), 8, name="late"), Row(1, [1, 2, 3, 4], (0, 3), 0, name="early"))
    assert propose(one, *rows) == [[3, 4], []]
    # Limits are the engine's, and K is the depth unless set.
    assert propose(one, Row(0, [9, 1, 2], (0, 2), 1, name="late")) == [[3]]
    assert one.num_speculative_tokens == 24
    assert proposer(suffix_decoding_max_tree_depth=6).num_speculative_tokens == 6
    assert proposer(num_speculative_tokens=5).num_speculative_tokens == 5


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_speculative_tokens": 0}, ["num_speculative_tokens=0", "1 or more"]),
        ({"suffix_decoding_max_tree_depth": 1}, ["max_tree_depth=1", "2 or more"]),
        ({"suffix_decoding_max_cached_requests": -1}, ["max_cached_requests=-1", "0 (no past outputs)"]),
        ({"suffix_decoding_max_spec_factor": -0.5}, ["max_spec_factor=-0.5", "0 or more"]),
        ({"suffix_decoding_max_spec_factor": float("nan")}, ["max_spec_factor=nan"]),
        ({"suffix_decoding_min_token_prob": 1.1}, ["min_token_prob=1.1", "from 0 to 1"]),
        ({"cache_path": ""}, ["cache_path", "null"]),
        ({"cache_path": "x", "suffix_decoding_max_cached_requests": 0}, ["cache_path=x", "max_cached_requests=0"]),
    ],
)
def test_bad_options(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        SuffixOptions(**options)
    assert all(word in str(caught.value) for word in words)


def test_the_cache_survives_the_run(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "outputs.bin"
    first = proposer(cache_path=str(path))
    first.attach(None, make_limits(24, 100))  # type: ignore[arg-type]
    for slot, output in enumerate(([1, 2, 8, 9], [1, 2, 8, 7, 6])):
        first.start(f"r{slot}", slot, [5])
        propose(first, Row(slot, [5, *output], (0, 1), 8, name=f"r{slot}"))
        first.finish(f"r{slot}", slot)
    first.start("cut short", 0, [5])
    propose(first, Row(0, [5, 3, 3], (0, 1), 8, name="cut short"))
    del first  # the end of the process does the same
    gc.collect()
    assert [ids.tolist() for ids in read_outputs(path).outputs] == [[1, 2, 8, 9], [1, 2, 8, 7, 6], [3, 3]]
    assert [file.name for file in path.parent.iterdir()] == ["outputs.bin"]

    second = proposer(cache_path=str(path), suffix_decoding_max_tree_depth=10, suffix_decoding_max_cached_requests=3)
    second.attach(None, make_limits(10, 100))  # type: ignore[arg-type]
    second.start("r0", 0, [50])
    assert propose(second, Row(0, [50, 1, 2], (0, 1), 8, name="r0")) == [[8, 7]]  # [1, 2, 8, 9] has made room
    assert second.cache.cached == (None, None, "r0")
    assert "3 requests" in second.describe()["past outputs"]
    assert second.describe()["cache_path"] == str(path)


def damaged(tmp_path: Path) -> list[tuple[bytes, str]]:
    path = tmp_path / "good.bin"
    write_outputs(path, [np.array([1, 2, 3], np.int32)], 100)
    good = path.read_bytes()
    flipped = bytearray(good)
    flipped[-1] ^= 1
    other = bytearray(good)
    other[8] = 9
    write_outputs(path, [np.array([1, 200], np.int32)], 100)
    return [
        (b"", "no suffix cache"),
        (b"PK\x03\x04" + bytes(60), "no suffix cache"),
        (good[:-2], "damaged"),
        (good + b"\0", "damaged"),
        (bytes(flipped), "damaged"),
        (path.read_bytes(), "impossible"),
        (bytes(other), "version 9"),
    ]


def test_a_bad_file_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "bad.bin"
    for content, words in damaged(tmp_path):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=words) as caught:
            proposer(cache_path=str(path))
        assert str(path) in str(caught.value)
        assert "left as it is" in str(caught.value)
        assert path.read_bytes() == content
    with pytest.raises(ConfigError, match="cannot be read"):
        proposer(cache_path=str(tmp_path))


def test_a_file_for_another_vocabulary_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "outputs.bin"
    write_outputs(path, [np.array([1, 2, 3], np.int32)], 100)
    content = path.read_bytes()
    one = proposer(cache_path=str(path))
    with pytest.raises(ConfigError, match=r"100 token ids, and this target has 50"):
        one.attach(None, make_limits(24, 50))  # type: ignore[arg-type]
    del one
    gc.collect()
    assert path.read_bytes() == content


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "outputs.bin"
    write_outputs(path, [np.array([1], np.int32)], 100)
    content = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(suffix_file.os, "fsync", full)
    with pytest.raises(StorageError, match="No space left"):
        write_outputs(path, [np.array([2], np.int32)], 100)
    one = proposer(cache_path=str(path))
    one.attach(None, make_limits(24, 100))  # type: ignore[arg-type]
    one.start("a", 0, [5])
    propose(one, Row(0, [5, 1], (0, 1), 8, name="a"))
    with pytest.warns(RuntimeWarning, match="could not be written"):
        one.finish("a", 0)
    assert "not written" in one.describe()["cache_path"]
    assert path.read_bytes() == content
    assert [file.name for file in tmp_path.iterdir()] == ["outputs.bin"]
    monkeypatch.undo()
    one.save()
    assert "not written" not in one.describe()["cache_path"]
    assert len(read_outputs(path).outputs) == 2


def test_lossless_at_every_length(llama_folder: Path) -> None:
    repeated = [[1, 2, 3, 4] * 4, [9] * 6, [50, 60, 50, 60, 50, 60]]
    assert_lossless_at_every_length(
        lambda num_speculative_tokens: make_engine(
            llama_folder, proposer(num_speculative_tokens=num_speculative_tokens, suffix_decoding_max_spec_factor=2.0)
        ),
        [*PROMPTS, *repeated],
        GREEDY,
    )


def test_lossless_in_chunks_and_after_pre_emption(llama_folder: Path) -> None:
    prompts = [[(3 * i + 7 * j) % 40 + 1 for i in range(30 + 9 * j)] for j in range(4)]
    engine = make_engine(llama_folder, proposer(), max_num_batched_tokens=37)
    outputs = assert_lossless(engine, prompts, SamplingParams(max_tokens=20, ignore_eos=True))
    assert any(output.drafted for output in outputs)
    one = proposer(num_speculative_tokens=6)
    engine = make_engine(llama_folder, one, num_kv_blocks=40)
    outputs = assert_lossless(engine, PROMPTS, SamplingParams(max_tokens=60, ignore_eos=True))
    assert engine.scheduler.num_preemptions > 0
    assert one.cache.running == ()
    assert len(one.cache.cached) == len(PROMPTS)  # no output twice
    for ids, output in zip(sorted(map(list, one.cache.outputs())), sorted(map(list, all_ids(outputs))), strict=True):
        assert ids == output[: len(ids)]


def all_ids(outputs: Any) -> list[list[int]]:
    return [list(output.token_ids) for output in outputs]


def test_a_second_pass_is_accepted_more(llama_folder: Path) -> None:
    """It learns from its own past outputs, whether the ids of the requests are new or the same."""
    for names in (None, ["a", "b", "c", "d"]):
        engine = make_engine(llama_folder, proposer())
        first = engine.generate(PROMPTS, GREEDY, request_ids=names)
        second = engine.generate(PROMPTS, GREEDY, request_ids=names)
        assert all_ids(first) == all_ids(second)
        accepted = [sum(output.accepted for output in outputs) for outputs in (first, second)]
        times = [sum(len(set(output.token_times)) for output in outputs) for outputs in (first, second)]
        assert accepted[1] > 1.5 * accepted[0]
        assert times[1] < 0.7 * times[0]  # steps: a step's tokens carry one time


@pytest.mark.peer
def test_equals_arctic_inference() -> None:
    """Same history, same drafts, scores and match lengths: also after evictions and among equal counts."""
    peer = pytest.importorskip("arctic_inference.suffix_decoding")
    for seed in range(60):
        compare(peer.SuffixDecodingCache, np.random.default_rng(seed))


def compare(peer: Any, generator: np.random.Generator) -> None:
    vocab, depth, cap = int(generator.integers(2, 8)), int(generator.integers(2, 12)), int(generator.integers(0, 5))
    theirs, ours = peer(depth, cap), Talk(cap, depth)
    for number in range(60):
        names = list(ours.cache.running)
        choice = generator.random()
        if choice < 0.2 or not names:
            prompt = generator.integers(0, vocab, generator.integers(0, 20))
            theirs.start_request(f"r{number}", prompt.astype(np.int32))
            ours.start(f"r{number}", prompt.tolist(), [])
        elif choice < 0.3:
            theirs.stop_request(names[0])
            ours.cache.stop(names[0])
        else:
            name, ids = names[generator.integers(len(names))], generator.integers(0, vocab, generator.integers(1, 4))
            theirs.add_active_response(name, ids.astype(np.int32))
            ours.say(name, ids.tolist())
        ours.factor = float(generator.choice([0.5, 1, 2]))
        for name in ours.cache.running:
            text = np.array(ours.texts[name], np.int32)
            expected = theirs.speculate(name, text, max_spec_tokens=9, max_spec_factor=ours.factor, min_token_prob=0.1)
            found = ours.cache.draft(name, text, 9, ours.factor, 0.1)
            assert found.token_ids.tolist() == list(expected.token_ids)
            assert found.score == pytest.approx(expected.score, abs=1e-5)
            assert found.match_length == expected.match_len
