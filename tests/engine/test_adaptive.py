"""Draft lengths chosen while requests run: the output stays what it was, and drafters do only what is wanted."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from specflow.backends.cpu import CpuBackend, CpuOptions
from specflow.core.request import Request
from specflow.core.sampling_params import SamplingParams
from specflow.engine.engine import Engine
from specflow.proposers.base import Proposer
from specflow.proposers.draft_model import DraftModelOptions, DraftModelProposer
from specflow.proposers.draft_round import CpuRound
from specflow.proposers.ngram import NgramOptions, NgramProposer
from specflow.proposers.pard import PardOptions, PardProposer
from specflow.samplers.block import BlockOptions, BlockSampler
from specflow.samplers.standard import StandardOptions, StandardSampler
from specflow.schedulers.adaptive import AdaptiveOptions, AdaptiveScheduler
from specflow.schedulers.base import ScheduledRequest
from specflow.targets.hf import HfOptions, HfTarget
from specflow.testing.conformance import assert_idle, assert_lossless, assert_same
from specflow.testing.proofs import LawProof, prove_law
from specflow.testing.wrappers import Watched
from tests.engine.helpers import PROMPTS
from tests.models import add_to_config, tiny_llama

GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
REPEATS = [[1, 2, 3, 1, 2, 3, 1, 2], [7, 7, 7, 7], *PROMPTS]
# More tokens cost little up to eight, and a twelfth of such a step each behind them.
LOADED = ((1, 1.0), (8, 1.2), (64, 6.0))
SERIAL = ((1, 0.1), (4, 0.5))
VOCAB = 8


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A twin of the shared target, a draft model and a parallel drafter; and a pair over eight tokens."""
    folder = tmp_path_factory.mktemp("models")
    tiny_llama(folder / "twin")
    tiny_llama(folder / "draft_model", seed=1, layers=1)
    add_to_config(tiny_llama(folder / "pard", seed=1, layers=1), spd_type="pard", pard_token=2)
    tiny_llama(folder / "small", vocab=VOCAB)
    tiny_llama(folder / "small_draft", seed=1, layers=1, vocab=VOCAB)
    return folder


def proposer(name: str, models: Path, num_drafts: int = 4) -> Proposer:
    if name == "ngram":
        return NgramProposer(NgramOptions(num_speculative_tokens=num_drafts, prompt_lookup_max=2, prompt_lookup_min=1))
    options: dict[str, Any] = {"path": str(models / name), "num_speculative_tokens": num_drafts}
    if name == "pard":
        return PardProposer(PardOptions(**options))
    return DraftModelProposer(DraftModelOptions(draft_sample_method="probabilistic", **options))


def make(
    target: Path,
    drafter: Proposer,
    kind: Callable[[AdaptiveOptions], AdaptiveScheduler] = AdaptiveScheduler,
    sampler: Any = None,
    run_ahead: bool = False,
    **options: Any,
) -> Engine:
    given = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "block_size": 4, "max_model_len": 128, **options}
    return Engine(
        HfTarget(HfOptions(path=str(target), dtype="float32", prove=False)),
        drafter,
        sampler or StandardSampler(StandardOptions()),
        kind(AdaptiveOptions(**given)),
        CpuBackend(CpuOptions(run_ahead=run_ahead)),
    )


class Varied(AdaptiveScheduler):
    """Every length in turn, each request at another one: what drafters and pages have to bear."""

    def _decide(self) -> dict[str, int]:
        most = self._limits.num_speculative_tokens + 1
        return {one.request_id: (one.num_tokens * 7 // 3 + index) % most for index, one in enumerate(self._running)}


def lengths_of(engine: Engine, prompts: Sequence[Any], sampling: Any) -> tuple[list[Any], set[int]]:
    """Outputs, and how many drafts the requests of a step had."""
    seen: set[int] = set()
    outputs = engine.generate(prompts, sampling, on_step=lambda record: seen.update(record.drafted or (0,)))
    return outputs, seen


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("name", ["ngram", "twin", "draft_model", "pard"])
def test_greedy_output_is_that_of_plain_decoding(llama_folder: Path, models: Path, name: str, run_ahead: bool) -> None:
    """Where steps are prepared for the device too: target and verification are, drafting waits for the host."""
    for kind in (AdaptiveScheduler, Varied):
        engine = make(
            llama_folder, proposer(name, models), kind, run_ahead=run_ahead, verify_costs=LOADED, draft_costs=SERIAL
        )
        outputs = assert_lossless(engine, REPEATS, GREEDY)
        assert name == "ngram" or sum(one.drafted for one in outputs) > 0  # a random model repeats little
        assert_idle(engine)
        if engine.loop is not None:
            assert not engine.loop.whole
            assert engine.loop.num_steps > 10


def test_measured_costs(llama_folder: Path, models: Path) -> None:
    engine = make(llama_folder, proposer("twin", models))
    outputs = assert_lossless(engine, REPEATS, GREEDY)
    assert sum(one.accepted for one in outputs) > 20
    facts = engine.describe()["scheduler"]
    assert facts["verify_costs"].startswith("[[1, ")
    assert "drafts asked for" in facts


def test_given_costs_repeat_a_sampled_run(llama_folder: Path, models: Path) -> None:
    sampling = [SamplingParams(max_tokens=40, temperature=1.0, seed=seed, ignore_eos=True) for seed in range(6)]
    runs = [
        lengths_of(
            make(llama_folder, proposer("twin", models), verify_costs=LOADED, draft_costs=SERIAL), REPEATS, sampling
        )
        for _ in range(2)
    ]
    assert_same(runs[0][0], runs[1][0])
    assert [one.drafted for one in runs[0][0]] == [one.drafted for one in runs[1][0]]
    assert len(runs[0][1]) > 2


def test_a_serial_drafter_makes_no_draft_that_nobody_wants(
    llama_folder: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[int] = []
    step = CpuRound.step
    monkeypatch.setattr(CpuRound, "step", lambda one, index, ids: (passes.append(index), step(one, index, ids))[1])
    engine = make(llama_folder, proposer("draft_model", models), verify_costs=LOADED, draft_costs=SERIAL)
    rounds = drafted = 0

    def count(record: Any) -> None:
        nonlocal rounds, drafted
        rounds += bool(record.drafted)
        drafted += sum(record.drafted)

    engine.generate(REPEATS[:1], GREEDY, on_step=count)
    assert drafted < 4 * rounds  # some rounds were shorter
    assert len(passes) == drafted - rounds  # alone, every pass but a round's first is for a draft that was verified


@pytest.mark.parametrize("name", ["twin", "draft_model", "pard"])
def test_shorter_rounds_leave_the_drafters_pages_right(llama_folder: Path, models: Path, name: str) -> None:
    """What is drafted from a text is what a drafter that sees it for the first time drafts, whatever rounds it had."""
    watched = Watched(proposer(name, models))
    engine = make(llama_folder, watched, Varied, verify_costs=LOADED)
    engine.generate(REPEATS, GREEDY, concurrency=1)  # together the longest would hide what the others leave out
    assert not watched.problems
    rounds = [one for one in watched.asked if one.max_drafts]
    assert len({one.max_drafts for one in rounds}) > 2
    fresh = Watched(proposer(name, models))
    texts = {f"t{index}": one for index, one in enumerate(rounds)}
    make(llama_folder, fresh, verify_costs=((1, 1.0),)).generate(
        [one.tokens[:-1] for one in texts.values()],
        SamplingParams(max_tokens=6, ignore_eos=True),
        request_ids=list(texts),
    )
    first = {one.request_id: one for one in reversed(fresh.asked) if one.max_drafts}
    assert len(first) == len(texts) > 20
    for key, one in texts.items():
        assert first[key].tokens == one.tokens
        assert first[key].drafts[: len(one.drafts)] == one.drafts


# -- the law of what is sampled ------------------------------------------------------------------------------------
class Peeking(AdaptiveScheduler):
    """Cuts before the first draft with an odd id: the length depends on the tokens that it cuts."""

    engine: Engine

    def _grant(self, request: Request, budget: int) -> ScheduledRequest | None:
        drafts = self.engine.buffers.tokens.host[request.slot, request.num_tokens :][: request.num_drafts]
        odd = [index for index, token in enumerate(drafts.tolist()) if token % 2]
        request.num_drafts = odd[0] if odd else request.num_drafts
        return super()._grant(request, budget)


def law_of(kind: type[AdaptiveScheduler], models: Path, costs: Any, sampler: Any = None) -> tuple[LawProof, set[int]]:
    """Three sampled tokens behind up to three drafts, and the lengths that occurred."""
    drafter = proposer("small_draft", models, num_drafts=3)
    engine = make(
        models / "small", drafter, kind, sampler, max_num_seqs=64, max_num_batched_tokens=1024,
        verify_costs=costs, draft_costs=((1, 0.1), (3, 0.2)), forgetting=0.7,
    )  # fmt: skip
    if isinstance(engine.scheduler, Peeking):
        engine.scheduler.engine = engine
    seen: set[int] = set()
    observe = engine.scheduler.observe
    engine.scheduler.observe = lambda record: (seen.update(record.drafted), observe(record))[1]  # type: ignore[method-assign]
    sampling = SamplingParams(temperature=1.5)
    return prove_law(engine, [1, 2, 3], sampling, num_samples=3000, num_tokens=4, first_seed=1, alpha=1e-4), seen


@pytest.mark.parametrize("sampler", [None, BlockSampler(BlockOptions())])
def test_lengths_from_the_past_leave_the_sampled_law_alone(models: Path, sampler: Any) -> None:
    proof, seen = law_of(AdaptiveScheduler, models, ((1, 1.0), (64, 1.5), (1024, 12.0)), sampler)
    assert proof.passed, {name: gate.sentence() for name, gate in proof.gates.items()}
    assert len(seen) > 1
    assert 0 < proof.accepted < proof.drafted


def test_a_length_that_looks_at_the_drafts_is_caught(models: Path) -> None:
    proof, _ = law_of(Peeking, models, ((1, 1.0),))
    assert proof.drafted
    assert not proof.passed
