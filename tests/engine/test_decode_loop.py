"""Decode steps that run ahead of the host, here without a graph: nothing that a caller sees may differ."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specflow.core.request import FinishReason
from specflow.core.sampling_params import SamplingParams
from specflow.engine.build import build_engine
from specflow.engine.decode_loop import DecodeLoop
from specflow.engine.engine import Engine
from specflow.engine.graphs import Calls, batch_buckets
from specflow.engine.outputs import RequestOutput
from specflow.proposers.base import Proposer
from specflow.proposers.draft_model import DraftModelOptions, DraftModelProposer
from specflow.proposers.ngram import NgramOptions, NgramProposer
from specflow.proposers.ngram_gpu import NgramGpuOptions, NgramGpuProposer
from specflow.proposers.pard import PardOptions, PardProposer
from specflow.samplers.block import BlockOptions, BlockSampler
from specflow.samplers.coupled import CoupledOptions, CoupledSampler
from specflow.schedulers.base import Scheduler, StepPlan
from specflow.testing.conformance import assert_idle, assert_same
from specflow.tracking.events import StepRecord
from tests.engine.helpers import PROMPTS, make_engine
from tests.models import add_to_config, tiny_llama

GREEDY = SamplingParams(max_tokens=30, ignore_eos=True)
REPEATS = [[1, 2, 3, 1, 2, 3, 1, 2], [7, 7, 7, 7], *PROMPTS]
COUNTERS = ("rounds", "drafted", "accepted")


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of one layer that know nothing of the target, and its twin, which knows all."""
    folder = tmp_path_factory.mktemp("drafters")
    tiny_llama(folder / "draft_model", seed=1, layers=1)
    tiny_llama(folder / "twin")
    add_to_config(tiny_llama(folder / "pard", seed=1, layers=1), spd_type="pard", pard_token=2)
    return folder


def proposer(name: str, drafters: Path, num_drafts: int = 3) -> Proposer | None:
    if name == "plain":
        return None
    if name == "ngram":
        return NgramProposer(NgramOptions(num_speculative_tokens=num_drafts, prompt_lookup_max=2, prompt_lookup_min=1))
    if name == "ngram_gpu":
        return NgramGpuProposer(
            NgramGpuOptions(num_speculative_tokens=num_drafts, prompt_lookup_max=2, prompt_lookup_min=1)
        )
    options: dict[str, Any] = {"path": str(drafters / name), "num_speculative_tokens": num_drafts}
    if name == "pard":
        return PardProposer(PardOptions(**options))
    return DraftModelProposer(DraftModelOptions(draft_sample_method="probabilistic", **options))


def loop_of(engine: Engine) -> DecodeLoop:
    loop = engine._runner.loop
    assert loop is not None
    return loop


def assert_alike(first: Sequence[RequestOutput], second: Sequence[RequestOutput]) -> None:
    """Same tokens, same reasons, same counters."""
    assert_same(first, second)
    for one, other in zip(first, second, strict=True):
        assert [getattr(one, name) for name in COUNTERS] == [getattr(other, name) for name in COUNTERS]


def both(
    folder: Path, make: Any, sampling: Any, prompts: Sequence[Any] = REPEATS, sampler: Any = None, **options: Any
) -> tuple[Engine, list[RequestOutput]]:
    """The engine that ran ahead, and its outputs, which are those of the ordinary one."""
    engines = [
        make_engine(folder, make(), sampler and sampler(), run_ahead=ahead, **options) for ahead in (False, True)
    ]
    before, after = [
        engine.generate(prompts, sampling, request_ids=[*map(str, range(len(prompts)))]) for engine in engines
    ]
    assert_alike(before, after)
    assert loop_of(engines[1]).num_steps > 0
    assert_idle(engines[1])
    return engines[1], after


@pytest.mark.parametrize("name", ["plain", "ngram", "ngram_gpu", "draft_model", "twin", "pard"])
@pytest.mark.parametrize("length", [1, 4])
def test_greedy(llama_folder: Path, drafters: Path, name: str, length: int) -> None:
    engine, _ = both(llama_folder, lambda: proposer(name, drafters, length), GREEDY)
    how = engine.describe()["backend"]["decode steps"]
    assert ("drafting in between" if name == "ngram" else "the host one step behind") in how


SAMPLED = [
    SamplingParams(max_tokens=20, temperature=0.9, seed=1, ignore_eos=True),
    SamplingParams(max_tokens=25, temperature=1.3, top_p=0.8, seed=2, ignore_eos=True),
    SamplingParams(max_tokens=22, temperature=0.7, top_k=5, min_p=0.05, seed=3, ignore_eos=True),
    SamplingParams(max_tokens=18, ignore_eos=True),
    SamplingParams(max_tokens=9, temperature=1.0, seed=5),
    SamplingParams(max_tokens=30, temperature=0.5, seed=6),
]


@pytest.mark.parametrize(
    "sampler", [None, lambda: BlockSampler(BlockOptions()), lambda: CoupledSampler(CoupledOptions())]
)
@pytest.mark.parametrize("name", ["plain", "draft_model", "twin", "ngram"])
def test_sampling_under_seeds(llama_folder: Path, drafters: Path, name: str, sampler: Any) -> None:
    """Noise follows seed, position and step, and filters act on the device as on the host."""
    for some in (SAMPLED, [replace(one, top_p=1.0, top_k=0, min_p=0.0) for one in SAMPLED]):
        both(llama_folder, lambda: proposer(name, drafters), some, sampler=sampler)


@pytest.mark.parametrize("name", ["plain", "ngram_gpu", "twin"])
def test_stops(llama_folder: Path, drafters: Path, name: str) -> None:
    """What the device has made of a request behind its stop is dropped, the request in flight included."""
    free = make_engine(llama_folder).generate(REPEATS, GREEDY)
    ids = [replace(GREEDY, stop_token_ids=(output.token_ids[place],)) for place, output in enumerate(free)]
    _, outputs = both(llama_folder, lambda: proposer(name, drafters), ids)
    assert {output.finish_reason for output in outputs} == {FinishReason.STOP}
    texts = [replace(GREEDY, stop=(output.text[4 + place : 7 + place],)) for place, output in enumerate(free)]
    both(llama_folder, lambda: proposer(name, drafters), texts)
    both(llama_folder, lambda: proposer(name, drafters), [replace(one, min_tokens=7) for one in ids])


@pytest.mark.parametrize("name", ["plain", "ngram", "twin", "pard"])
def test_pre_emption(llama_folder: Path, drafters: Path, name: str) -> None:
    """Too few blocks: the loop gives way, the ordinary path pre-empts, and the books of the proposer stay right."""
    engine, _ = both(
        llama_folder,
        lambda: proposer(name, drafters),
        replace(GREEDY, max_tokens=40),
        max_model_len=64,
        num_kv_blocks=24,
    )
    assert engine.scheduler.num_preemptions > 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["plain", "ngram_gpu", "twin"])
def test_the_end_of_the_context(llama_folder: Path, drafters: Path, name: str) -> None:
    prompts = [[(7 * i) % 300 + 1 for i in range(length)] for length in (118, 124, 125, 126, 127, 128)]
    budget = replace(GREEDY, max_tokens=50)
    _, outputs = both(llama_folder, lambda: proposer(name, drafters, 6), budget, prompts, max_num_batched_tokens=1024)
    assert [len(output.token_ids) for output in outputs] == [10, 4, 3, 2, 1, 1]


def test_more_requests_than_slots(llama_folder: Path, drafters: Path) -> None:
    """Slots change hands again and again, each time between steps that run ahead."""
    prompts = [[(5 * i + j) % 300 + 1 for j in range(1 + i % 7)] for i in range(25)]
    sampling = [replace(GREEDY, max_tokens=1 + i % 13) for i in range(25)]
    both(llama_folder, lambda: proposer("draft_model", drafters), sampling, prompts, max_num_seqs=3)


@pytest.mark.parametrize("name", ["dflash", "eagle3"])
def test_heads_that_read_the_target(name: str) -> None:
    """Trained ones, so that drafts are accepted and features of several rows per request count."""
    prompts = [
        "import os\nimport sys\n\ndef main(",
        "class Point:\n    def __init__(self, x, y):\n        self.x = x\n",
    ]
    found = []
    for ahead in (False, True):
        engine = build_engine(
            {
                "target": {"name": "bundled", "prove": False},
                "proposer": {"name": name},
                "backend": {"name": "cpu", "run_ahead": ahead},
                "scheduler": {"max_num_seqs": 2, "max_model_len": 96},
            }
        )
        found.append(engine.generate(prompts, GREEDY, request_ids=["a", "b"]))
    assert_alike(*found)
    assert sum(output.accepted for output in found[1]) > 8


def test_the_host_is_one_step_behind(llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a step is committed the next one is queued, until the last token is certain to be on its way."""
    queued: list[int] = []
    commit = DecodeLoop._commit

    def watched(self: DecodeLoop, step: Any) -> Any:
        queued.append(len(self._queue))
        return commit(self, step)

    monkeypatch.setattr(DecodeLoop, "_commit", watched)
    engine = make_engine(llama_folder, run_ahead=True)
    engine.generate(PROMPTS[:2], replace(GREEDY, max_tokens=8))
    assert queued == [1, 1, 1, 1, 1, 1, 0]  # the first token came with the prompt


@pytest.mark.parametrize("name", ["ngram_gpu", "twin", "ngram"])
def test_records_add_up(llama_folder: Path, drafters: Path, name: str) -> None:
    records: list[StepRecord] = []
    engine = make_engine(llama_folder, proposer(name, drafters), run_ahead=True)
    sampling = [replace(GREEDY, max_tokens=25 + place) for place in range(len(REPEATS))]
    outputs = engine.generate(REPEATS, sampling, on_step=records.append)
    assert sum(record.num_emitted for record in records) == sum(len(output.token_ids) for output in outputs)
    assert sum(sum(record.drafted) for record in records) == sum(output.drafted for output in outputs) > 0
    assert sum(sum(record.accepted) for record in records) == sum(output.accepted for output in outputs)
    assert sum(len(record.drafted) for record in records) == sum(output.rounds for output in outputs)
    assert [record.index for record in records] == [*range(1, len(records) + 1)]
    for record in records:
        parts = record.target_seconds + record.sample_seconds + record.propose_seconds + record.undivided_seconds
        assert 0 < parts <= record.total_seconds * (1 + 1e-9)


@pytest.mark.parametrize(
    "option", [{"logprobs": 2}, {"repetition_penalty": 1.3}, {"logit_bias": {5: 2.0}}, {"bad_words": ("a",)}]
)
def test_what_only_the_host_applies(llama_folder: Path, drafters: Path, option: Mapping[str, Any]) -> None:
    """Such requests take the ordinary path, and so does whoever runs beside them."""
    each = [replace(GREEDY, **option), GREEDY]
    engines = [make_engine(llama_folder, proposer("draft_model", drafters), run_ahead=ahead) for ahead in (False, True)]
    assert_alike(*(engine.generate(PROMPTS[:2], each, request_ids=["a", "b"]) for engine in engines))
    assert loop_of(engines[1]).num_steps == 0


def test_abort_and_the_next_run(llama_folder: Path, drafters: Path) -> None:
    """Requests that go while their step is queued leave no trace for those that get their slots."""
    engine = make_engine(llama_folder, proposer("draft_model", drafters), run_ahead=True)
    expected = engine.generate(REPEATS, GREEDY)
    seen: list[int] = []

    def abort(_: StepRecord) -> None:
        seen.append(1)
        if len(seen) == 4:
            engine.abort("1")

    names = [*map(str, range(len(REPEATS)))]
    outputs = engine.generate(REPEATS, GREEDY, request_ids=names, on_step=abort)
    assert outputs[1].finish_reason is FinishReason.ABORT
    for index, output in enumerate(outputs):
        assert output.token_ids == expected[index].token_ids[: len(output.token_ids)]
        assert index == 1 or len(output.token_ids) == 30
    stream = engine.stream(REPEATS, GREEDY)
    for _ in range(9):
        next(stream)
    stream.close()
    assert_idle(engine)
    assert_same(expected, engine.generate(REPEATS, GREEDY, request_ids=[one.request_id for one in expected]))


def test_with_and_without_speculation_in_turn(llama_folder: Path, drafters: Path) -> None:
    engine = make_engine(llama_folder, proposer("draft_model", drafters), run_ahead=True)
    for _ in range(2):
        fast, plain = (
            engine.generate(REPEATS, GREEDY, speculate=on, request_ids=list("abcdef")) for on in (True, False)
        )
        assert_same(fast, plain)
        assert all(output.drafted == 0 for output in plain)
        assert all(output.drafted for output in fast)


class _Refusing(Calls[Any, Any]):
    """Captures nothing that drafts, or nothing at all."""

    drafts_only = True

    def ready(self, variant: Any) -> bool:
        return False

    def prepare(self, variant: Any) -> None:
        if variant.drafts or not self.drafts_only:
            raise RuntimeError("operation not permitted when stream is capturing\nmore of it")


@pytest.mark.parametrize("everything", [False, True])
def test_a_capture_that_fails(
    llama_folder: Path, drafters: Path, monkeypatch: pytest.MonkeyPatch, everything: bool
) -> None:
    """It is named and counted, and the output is the same without it."""
    monkeypatch.setattr("specflow.engine.decode_loop.Calls", _Refusing)
    monkeypatch.setattr(_Refusing, "drafts_only", not everything)
    expected = make_engine(llama_folder, proposer("draft_model", drafters)).generate(REPEATS, GREEDY)
    engine = make_engine(llama_folder, proposer("draft_model", drafters), run_ahead=True)
    assert_alike(expected, engine.generate(REPEATS, GREEDY, request_ids=[one.request_id for one in expected]))
    incidents = list(engine.incidents.items())
    cause = "(operation not permitted when stream is capturing)"
    first = f"draft_model was not captured and drafts outside of the graphs {cause}"
    rest = f"decode steps were not captured and run operation by operation {cause}"
    assert incidents == ([(first, 1), (rest, 1)] if everything else [(first, 1)])
    assert (loop_of(engine).num_steps > 0) is not everything
    assert engine.describe()["incidents"][first] == "1"


def test_a_scheduler_that_cannot_plan_ahead(
    llama_folder: Path, drafters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps the host in the loop, and its plans are followed."""
    plans: list[StepPlan] = []
    engine = make_engine(llama_folder, proposer("draft_model", drafters))
    monkeypatch.setattr(type(engine.scheduler), "plan_ahead", Scheduler.plan_ahead)
    engine = make_engine(llama_folder, proposer("draft_model", drafters), run_ahead=True)
    plan = engine.scheduler.plan

    def noted() -> StepPlan:
        plans.append(plan())
        return plans[-1]

    engine.scheduler.plan = noted  # type: ignore[method-assign]
    records: list[StepRecord] = []
    engine.generate(REPEATS, GREEDY, on_step=records.append)
    assert len(plans) == len(records)
    assert loop_of(engine).num_steps == len(records) - 1  # the prompts took one step


def test_plain_decoding_runs_ahead_whatever_could_draft(llama_folder: Path, drafters: Path) -> None:
    """Else a baseline beside a method that drafts on the host would be slower than plain decoding is."""
    engine = make_engine(llama_folder, proposer("ngram", drafters), run_ahead=True)
    assert not loop_of(engine).whole
    found: dict[bool, list[StepRecord]] = {False: [], True: []}
    outputs = {}
    for speculate in (True, False, True):
        outputs[speculate] = engine.generate(
            REPEATS, GREEDY, speculate=speculate, request_ids=list("abcdefgh"[: len(REPEATS)]),
            on_step=found[speculate].append,
        )  # fmt: skip
    assert [one.token_ids for one in outputs[True]] == [one.token_ids for one in outputs[False]]
    assert not any(record.undivided_seconds for record in found[True])
    assert all(record.undivided_seconds for record in found[False] if not record.num_prompt_tokens)


def test_proposers_are_told_what_was_replayed(llama_folder: Path, drafters: Path) -> None:
    """`replayed` brings, in order, the view that `propose` would have had."""

    class Told(DraftModelProposer):
        views: list[tuple[list[int], list[int], list[int]]]

        def replayed(self, host: Any) -> None:
            self.views.append((host.num_tokens.tolist(), host.chunk_start.tolist(), host.chunk_len.tolist()))
            assert (host.token_table[host.slots, host.num_tokens - 1] > 0).all()
            super().replayed(host)

    told = Told(DraftModelOptions(path=str(drafters / "draft_model"), num_speculative_tokens=3))
    told.views = []
    engine = make_engine(llama_folder, told, run_ahead=True)
    output = engine.generate([[5, 9, 17]], GREEDY)[0]
    starts = np.array([view[1][0] for view in told.views])
    ends = np.array([view[0][0] for view in told.views])
    kept = np.array([view[2][0] for view in told.views])
    assert (ends == starts + kept + 1).all()
    assert (starts[1:] == ends[:-1] - 1).all()
    assert starts[0] == 3
    assert ends[-1] < 3 + len(output.token_ids)


def test_buckets() -> None:
    assert batch_buckets(1) == (1,)
    assert batch_buckets(3) == (1, 2, 3)
    assert batch_buckets(16) == (1, 2, 4, 8, 16)
    assert batch_buckets(40) == (1, 2, 4, 8, 16, 24, 32, 40)
