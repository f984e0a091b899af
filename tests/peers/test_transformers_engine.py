"""`engine=transformers`: the answers of our plain decoding, drafts counted from outside, refusals by option name."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from specflow.core.request import FinishReason
from specflow.core.sampling_params import SamplingParams
from specflow.engine.outputs import RequestOutput
from specflow.errors import ConfigError
from specflow.peers.base import PeerRequest, PeerSession, PeerSetup
from specflow.peers.transformers_engine import TransformersEngine, TransformersOptions
from tests.engine.helpers import make_engine
from tests.models import tiny_llama
from tests.peers.compositions import compose

LOOKUP = ["+proposer=ngram", "proposer.prompt_lookup_min=1", "proposer.prompt_lookup_max=2"]
PROMPTS = ((5, 9, 5, 9, 5, 9, 5), (40, 41, 42, 40, 41))


@contextmanager
def session(folder: Path, *words: str, **options: Any) -> Iterator[PeerSession]:
    config, registry = compose("target=hf", f"target.path={folder}", "target.dtype=float32", *words)
    setup = PeerSetup(config, registry, config["proposer"] is not None, torch.device("cpu"), folder)
    with TransformersEngine(TransformersOptions(**options)).open(setup) as found:
        yield found


def requests(**sampling: Any) -> list[PeerRequest]:
    params = SamplingParams(**{"max_tokens": 20, "ignore_eos": True, "seed": 3, **sampling})
    return [PeerRequest(f"r{index}", ids, params) for index, ids in enumerate(PROMPTS)]


def ours(folder: Path, **sampling: Any) -> list[tuple[int, ...]]:
    params = SamplingParams(**{"max_tokens": 20, "ignore_eos": True, **sampling})
    return [one.token_ids for one in make_engine(folder).generate([list(ids) for ids in PROMPTS], params)]


def tokens(outputs: Any) -> list[tuple[int, ...]]:
    return [one.token_ids for one in outputs]


@pytest.mark.parametrize("words", [[], LOOKUP, ["+proposer=draft_model"]], ids=["plain", "ngram", "draft_model"])
def test_the_answers_are_those_of_our_plain_decoding(llama_folder: Path, tmp_path: Path, words: list[str]) -> None:
    if "+proposer=draft_model" in words:
        words = [*words, f"proposer.path={tiny_llama(tmp_path / 'draft', seed=5)}"]
    told: list[RequestOutput] = []
    with session(llama_folder, *words) as engine:
        done = engine.run(requests(), 1, told.append)
    assert tokens(done.outputs) == ours(llama_folder)
    assert told == list(done.outputs)
    for output in done.outputs:
        assert output.finish_reason is FinishReason.LENGTH
        assert len(output.token_times) == 20
        assert output.arrival < output.token_times[0] <= output.token_times[-1] <= output.finished
    assert done.wall_seconds > 0


def test_prompt_lookup_is_counted_round_by_round(llama_folder: Path) -> None:
    """Tokens = passes + accepted drafts; every pass is a round with drafts or one without."""
    with session(llama_folder, *LOOKUP, "proposer.num_speculative_tokens=3") as engine:
        done = engine.run(requests(), 1, lambda _: None)
        assert engine.describe()["method"] == "prompt lookup"
        assert engine.describe()["max_matching_ngram_size"] == "2"
    counts = done.acceptance
    assert counts.num_rounds > 0
    assert counts.num_positions <= 3
    assert counts.num_rounds == sum(one.rounds for one in done.outputs)
    assert counts.num_draft_tokens == sum(one.drafted for one in done.outputs)
    assert counts.num_accepted_tokens == sum(one.accepted for one in done.outputs)
    for output in done.outputs:
        passes = len(set(output.token_times))
        assert len(output.token_ids) == passes + output.accepted
        assert output.rounds <= passes


def test_a_drafter_that_is_the_target_is_always_right(llama_folder: Path) -> None:
    """K drafts in every round, all accepted up to the last, which max_tokens cuts."""
    words = ["+proposer=draft_model", f"proposer.path={llama_folder}", "proposer.num_speculative_tokens=4"]
    with session(llama_folder, *words) as engine:
        done = engine.run(requests(max_tokens=15), 1, lambda _: None)
        assert engine.describe()["num_assistant_tokens"] == "4"
    assert done.acceptance.acceptance_rate == 1
    assert done.acceptance.num_rounds == 6
    assert done.acceptance.num_positions == 4


def test_plain_decoding_drafts_nothing(llama_folder: Path) -> None:
    with session(llama_folder) as engine:
        done = engine.run(requests(), 1, lambda _: None)
    assert done.acceptance.num_rounds == 0
    assert done.outputs[0].rounds == 0


@pytest.mark.parametrize("words", [[], LOOKUP], ids=["plain", "ngram"])
def test_end_of_text_and_stop_tokens(llama_folder: Path, words: list[str]) -> None:
    """A stop token ends an answer as it does in our engine; with ignore_eos it does not."""
    stop = ours(llama_folder)[0][6]
    expected = ours(llama_folder, stop_token_ids=[stop])
    assert len(expected[0]) < 20
    with session(llama_folder, *words) as engine:
        done = engine.run(requests(stop_token_ids=[stop]), 1, lambda _: None)
        assert tokens(done.outputs) == expected
        assert done.outputs[0].finish_reason is FinishReason.STOP
        engine._eos = (stop,)  # type: ignore[attr-defined]
        assert tokens(engine.run(requests(ignore_eos=False), 1, lambda _: None).outputs) == expected
        assert tokens(engine.run(requests(), 1, lambda _: None).outputs) == ours(llama_folder)


def test_ignoring_the_end_of_text_that_the_checkpoint_names(llama_folder: Path, tmp_path: Path) -> None:
    """`generate` would take the end of text from generation_config.json when it is told none."""
    import json
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(llama_folder, folder)
    end = ours(llama_folder)[0][3]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    with session(folder) as engine:
        assert tokens(engine.run(requests(), 1, lambda _: None).outputs) == ours(llama_folder)
        assert len(engine.run(requests(ignore_eos=False), 1, lambda _: None).outputs[0].token_ids) <= 4


def test_sampling_follows_the_seed_of_the_request(llama_folder: Path) -> None:
    with session(llama_folder) as engine:
        first, again, other = (
            tokens(engine.run(requests(temperature=1.0, top_k=50, seed=seed), 1, lambda _: None).outputs)
            for seed in (1, 1, 2)
        )
    assert first == again
    assert first != other


def test_another_attention(llama_folder: Path) -> None:
    with session(llama_folder, attn_implementation="eager") as engine:
        assert engine.describe()["attention"] == "eager"
    failure = pytest.raises(ConfigError, match=r"engine\.attn_implementation=nonsense")
    with failure, session(llama_folder, attn_implementation="nonsense"):
        pass


# -- what it cannot do ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["task.batch_sizes=[1,8]"], "task.batch_sizes=[1, 8]"),
        (["+proposer=ngram"], "proposer.prompt_lookup_min=null"),
        ([*LOOKUP, "proposer.match_policy=latest"], "proposer.match_policy=latest"),
        (["+proposer=suffix"], "proposer=suffix"),
        (["+proposer=draft_model", "sampling.temperature=1"], "proposer.draft_sample_method=greedy"),
        (["+proposer=draft_model", "proposer.dtype=float16"], "proposer.dtype=float16"),
        ([*LOOKUP, "sampler=coupled"], "sampler=coupled"),
        (["sampling.presence_penalty=1"], "sampling.presence_penalty=1.0"),
        (["sampling.stop=[END]"], "sampling.stop="),
        (["sampling.logprobs=0"], "sampling.logprobs=0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_what_it_cannot_do_is_refused_by_name(words: list[str], option: str) -> None:
    sizes = [] if any("batch_sizes" in word for word in words) else ["task.batch_sizes=[1]"]
    config, registry = compose(*sizes, *words)
    with pytest.raises(ConfigError) as raised:
        TransformersEngine(TransformersOptions()).check(config, registry)
    assert str(raised.value).startswith(f"engine=transformers: {option}")
    assert str(raised.value).count("\n") == 0


def test_what_it_can_do() -> None:
    for words in ([], LOOKUP, ["+proposer=draft_model"], ["sampling.temperature=1", "sampling.top_k=5"]):
        config, registry = compose("task.batch_sizes=[1]", *words)
        TransformersEngine(TransformersOptions()).check(config, registry)
