"""Suffix decoding as a proposer: what it learns from whom, its options, and losslessness in the engine."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specflow.core.sampling_params import SamplingParams
from specflow.errors import ConfigError
from specflow.proposers.suffix import SuffixOptions
from specflow.proposers.suffix_cache import SuffixCache
from specflow.testing.conformance import assert_lossless, assert_lossless_at_every_length
from tests.engine.helpers import PROMPTS, make_engine
from tests.proposers.helpers import Row
from tests.proposers.suffix_helpers import propose, proposer

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


def test_nothing_repeats() -> None:
    """C49 and C50: the last token never matches itself."""
    talk = Talk()
    for name, prompt in (("one", [5]), ("none", list(range(1, 51))), ("some", [1, 2, 3, 1, 2])):
        talk.start(name, prompt, [])
    assert talk.draft("one")[0] == talk.draft("none")[0] == []
    assert talk.draft("some")[0][0] == 3


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


def test_the_last_tokens_are_learnt_from_the_end() -> None:
    """The tokens of a request's last step are in no context: they come with `finish`."""
    one = proposer()
    one.start("first", 0, [9])
    assert propose(one, Row(0, [9, 1, 2], (0, 2), 8, name="first")) == [[]]
    one.finish("first", 0, [9, 1, 2, 3, 4])
    assert one.cache.running == ()
    one.start("second", 0, [8])
    assert propose(one, Row(0, [8, 2, 3], (0, 2), 8, name="second")) == [[4]]
    # Of one that never drafted, and of one that is unknown.
    one.start("third", 1, [7])
    one.finish("third", 1, [7, 5, 6])
    one.finish("never started", 2, [7, 7])
    assert [ids.tolist() for ids in one.cache.outputs()] == [[1, 2, 3, 4], [2, 3], [5, 6]]


def test_reset_forgets_past_outputs() -> None:
    talk = Talk()
    talk.past("a", [1, 2, 8, 9])
    talk.start("b", [1, 2, 3], [1, 2])
    talk.cache.reset()
    assert talk.cache.cached == ()
    assert talk.cache.shared.num_tokens == 0
    talk.say("b", [3])  # whoever runs goes on with the own text alone
    assert talk.draft("b")[0] == [1, 2, 3]
    assert talk.cache.shared.num_tokens == 0
    talk.start("a", [5], [1, 2])
    assert talk.draft("a") == ([], 0.0)


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
    assert sorted(ids.tolist() for ids in one.cache.outputs()) == sorted(all_ids(outputs))  # to the last token


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
