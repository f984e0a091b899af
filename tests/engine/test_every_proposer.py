"""What holds for every built-in proposer alike, whatever it drafts (user cases C46, C48, C49, C52, C54, C78)."""

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from specflow.checkpoints.dflash import save_dflash
from specflow.checkpoints.trained_on import note_trained_on_chat
from specflow.checkpoints.weights_hash import weights_hash
from specflow.core.request import FinishReason
from specflow.core.sampling_params import SamplingParams
from specflow.errors import PromptError
from specflow.plugins.component import Kind
from specflow.plugins.registry import load_plugins
from specflow.proposers.base import Proposer
from specflow.testing.conformance import assert_idle, assert_lossless
from tests.engine.helpers import make_engine, oracle_engine, watch_positions
from tests.heads import dflash_cases, eagle3_helpers
from tests.models import LAYERS, VOCAB, add_to_config, tiny_llama

CLASS = """
class Mine:
    def draft(self, tokens, max_drafts, request_id):
        return [(int(tokens[-1]) * 7 + index) % 384 for index in range(max_drafts)]
"""
OWN_WEIGHTS = ("draft_model", "pard", "eagle3", "dflash")
NAMES = ("ngram", "ngram_gpu", "suffix", "custom_class", *OWN_WEIGHTS)
Build = Callable[..., Proposer]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """A proposer by its name, drafting K tokens for the tiny Llama; those with weights know nothing of it."""
    folder = tmp_path_factory.mktemp("proposers")
    (folder / "mine.py").write_text(CLASS)
    tiny_llama(folder / "draft_model", seed=1, layers=1)
    add_to_config(tiny_llama(folder / "pard", seed=1, layers=1), spd_type="pard", pard_token=2)
    eagle3_helpers.save_head(folder / "eagle3", eagle3_helpers.make_head(own_embedding=False, own_head=False))
    config = dflash_cases.make_config(
        block_size=9,
        target_hidden_size=64,
        num_target_layers=LAYERS,
        capture_layers=(0, 2),
        vocab_size=VOCAB,
        draft_vocab_size=VOCAB,
        own_embedding=True,
        own_head=True,
    )
    save_dflash(folder / "dflash", dflash_cases.make_head(config))
    registry = load_plugins(only="")

    def make(name: str, num_drafts: int) -> Proposer:
        options: dict[str, Any] = {"num_speculative_tokens": num_drafts}
        if name.startswith("ngram"):
            options["prompt_lookup_max"] = 2
        elif name in OWN_WEIGHTS:
            options["path"] = str(folder / name)
        elif name == "custom_class":
            options["path"] = f"{folder / 'mine.py'}:Mine"
        proposer: Proposer = registry.get(Kind.PROPOSER, name).build({"name": name, **options})
        return proposer

    return make


def test_no_proposer_is_forgotten() -> None:
    assert set(NAMES) | {"extract_hidden_states"} == set(load_plugins(only="").components(Kind.PROPOSER))


@pytest.mark.parametrize("name", NAMES)
def test_the_end_of_the_context(name: str, build: Build, llama_folder: Path) -> None:
    """C48: eight drafts at most, prompts of 120 to 128 tokens in a context of 128; one more token is refused."""
    engine = make_engine(llama_folder, build(name, 8))
    highest = watch_positions(engine)
    prompts = [[(7 * i) % 300 + 1 for i in range(length)] for length in range(120, 129)]
    outputs = assert_lossless(engine, prompts, SamplingParams(max_tokens=50, ignore_eos=True))
    assert max(highest) == 127
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output.token_ids) == max(1, 128 - len(prompt))
        assert output.finish_reason is FinishReason.LENGTH
    with pytest.raises(PromptError, match="129 tokens"):
        engine.generate([[1] * 129], SamplingParams(max_tokens=1))
    assert_idle(engine)


@pytest.mark.parametrize("name", NAMES)
def test_one_token_prompts(name: str, build: Build, llama_folder: Path) -> None:
    """C49."""
    assert_lossless(make_engine(llama_folder, build(name, 3)), [[5]], SamplingParams(max_tokens=40, ignore_eos=True))


@pytest.mark.parametrize("name", NAMES)
def test_a_crowd_of_short_requests(name: str, build: Build, llama_folder: Path) -> None:
    """C52: lengths and limits of all kinds through eight slots; nobody drafts more than it can still use."""
    draw = random.Random(1)
    prompts = [[draw.randrange(1, 384) for _ in range(draw.randint(1, 30))] for _ in range(60)]
    sampling = [SamplingParams(max_tokens=draw.randint(1, 20), ignore_eos=True) for _ in prompts]
    outputs = assert_lossless(make_engine(llama_folder, build(name, 4)), prompts, sampling)
    for output, own in zip(outputs, sampling, strict=True):
        assert len(output.token_ids) == own.max_tokens
        assert output.drafted <= sum(range(own.max_tokens))


def test_finished_requests_draft_no_more(llama_folder: Path) -> None:
    """C52: after its last token a request is in no step, so its count of drafts stands still."""
    prompts = [[5 + index, 9] for index in range(20)]
    engine, names = oracle_engine(llama_folder, prompts, 3, 1, length=24)
    left: dict[str, int] = {}
    sampling = [SamplingParams(max_tokens=1 + index, ignore_eos=True) for index in range(20)]
    sizes: list[int] = []
    outputs = engine.generate(
        prompts,
        sampling,
        request_ids=names,
        on_step=lambda record: sizes.append(record.num_requests),
        on_finish=lambda output: left.update({output.request_id: output.drafted}),
    )
    assert left == {output.request_id: output.drafted for output in outputs}
    assert outputs[0].drafted == 0  # its only token needs no draft
    assert sizes[-1] < max(sizes)


@pytest.mark.parametrize("name", NAMES)
def test_the_report_names_what_ran(name: str, build: Build, llama_folder: Path) -> None:
    """C54: taken from the object in the engine."""
    assert make_engine(llama_folder, build(name, 3)).describe()["proposer"]["method"] == name


@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_a_head_says_what_it_was_trained_on(name: str, build: Build, llama_folder: Path, tmp_path: Path) -> None:
    """C39."""
    proposer: Any = build(name, 3)
    assert "trained on" not in make_engine(llama_folder, proposer).describe()["proposer"]
    folder = shutil.copytree(proposer.options.path, tmp_path / "head")
    for chat, words in ((True, "conversations in a chat template"), (False, "plain text")):
        note_trained_on_chat(folder, chat)
        noted: Any = type(proposer)(replace(proposer.options, path=str(folder)))
        assert make_engine(llama_folder, noted).describe()["proposer"]["trained on"] == words
        assert noted.trained_on_chat is chat


@pytest.mark.parametrize("name", OWN_WEIGHTS)
def test_the_report_counts_the_weights_that_draft(name: str, build: Build, llama_folder: Path) -> None:
    """C78: parameters and hash are the drafter's own, not the target's and not another file's."""
    proposer = build(name, 3)
    described = make_engine(llama_folder, proposer).describe()["proposer"]
    folder = Path(proposer.options.path)  # type: ignore[attr-defined]
    weights = load_file(folder / "model.safetensors")
    assert described["parameters"] == f"{sum(weight.numel() for weight in weights.values()):,}"
    assert described["weights"] == weights_hash(weights)
    assert described["dtype"] == "float32"
