"""Sampling with speculation by the whole engine: laws, seeds and labels (user cases, section B)."""

import dataclasses
from collections import Counter
from pathlib import Path

import pytest
import torch

from specflow.core.draft import Verdict, VerifyInputs
from specflow.core.limits import EngineLimits
from specflow.core.sampling_params import SamplingParams
from specflow.engine.losslessness import find_differences
from specflow.engine.outputs import RequestOutput
from specflow.errors import ConfigError
from specflow.proposers.base import Proposer
from specflow.proposers.draft_model import DraftModelOptions, DraftModelProposer
from specflow.proposers.ngram import NgramOptions, NgramProposer
from specflow.proposers.pard import PardOptions, PardProposer
from specflow.samplers.base import Sampler
from specflow.samplers.block import BlockOptions, BlockSampler
from specflow.samplers.coupled import CoupledOptions, CoupledSampler
from specflow.samplers.standard import StandardOptions, StandardSampler
from specflow.samplers.synthetic import SyntheticOptions, SyntheticSampler
from specflow.samplers.typical import TypicalOptions, TypicalSampler
from specflow.testing.conformance import assert_idle, assert_same
from specflow.testing.proofs import RandomLengths, exact_law, prove_law
from specflow.testing.proposers import NoiseProposer
from tests.engine.helpers import PROMPTS, make_engine, oracle_engine, plain
from tests.models import tiny_llama

EIGHT = [*PROMPTS, *([prompt[::-1] for prompt in PROMPTS])]
SAMPLERS = {
    "standard": lambda: StandardSampler(StandardOptions()),
    "coupled": lambda: CoupledSampler(CoupledOptions()),
    "block": lambda: BlockSampler(BlockOptions()),
}
METHODS = ["ngram", "greedy", "probabilistic", "pard"]


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller model of the same vocabulary, which agrees with the target now and then."""
    return tiny_llama(tmp_path_factory.mktemp("draft"), seed=1, layers=1)


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a draft model over eight tokens."""
    folder = tmp_path_factory.mktemp("eight")
    small = {"initializer_range": 0.15}
    return (
        tiny_llama(folder / "target", seed=2, vocab=8, layers=2, **small),
        tiny_llama(folder / "draft", seed=3, vocab=8, layers=1, **small),
    )


def coupled() -> CoupledSampler:
    return CoupledSampler(CoupledOptions())


def make_proposer(method: str, folder: Path, num_drafts: int) -> Proposer:
    if method == "ngram":
        return NgramProposer(NgramOptions(num_speculative_tokens=num_drafts, prompt_lookup_min=1, prompt_lookup_max=3))
    options = {"path": str(folder), "num_speculative_tokens": num_drafts, "draft_sample_method": method}
    if method == "pard":
        return PardProposer(PardOptions(**options | {"draft_sample_method": "probabilistic", "mask_token_id": 1}))
    return DraftModelProposer(DraftModelOptions(**options))


def seeded(count: int, **options: object) -> list[SamplingParams]:
    defaults = {"temperature": 1.0, "max_tokens": 16, "ignore_eos": True} | options
    return [SamplingParams(**defaults, seed=100 + index) for index in range(count)]


# -- same seed, same text: sampler=coupled -------------------------------------------------------------------------
OPTIONS = {
    "plain": {},
    "sharp": {"temperature": 0.6},
    "filtered": {"temperature": 0.9, "top_k": 20, "top_p": 0.9},
    "penalised": {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.3, "min_p": 0.02},
}


@pytest.mark.parametrize(
    ("num_drafts", "options"), [(1, "filtered"), (3, "plain"), (3, "filtered"), (3, "penalised"), (7, "sharp")]
)
@pytest.mark.parametrize("method", METHODS)
def test_coupled_output_is_that_of_plain_decoding(
    llama_folder: Path, draft_folder: Path, method: str, num_drafts: int, options: str
) -> None:
    """Batch 1 and 8, all draft lengths: the seed alone decides the text."""
    engine = make_engine(llama_folder, make_proposer(method, draft_folder, num_drafts), coupled())
    sampling = seeded(8, **OPTIONS[options])
    expected = engine.generate(EIGHT, sampling, speculate=False, concurrency=1)
    for concurrency in (1, 8):
        found = engine.generate(EIGHT, sampling, concurrency=concurrency)
        assert_same(_renamed(found, expected), expected)
        assert sum(output.drafted for output in found) > 0
        assert find_differences(engine, expected, found, sampling[0]) == []
    assert_idle(engine)


def _renamed(outputs: list[RequestOutput], like: list[RequestOutput]) -> list[RequestOutput]:
    return [dataclasses.replace(one, request_id=other.request_id) for one, other in zip(outputs, like, strict=True)]


def test_coupled_equals_the_plain_decoding_of_an_engine_without_a_proposer(
    llama_folder: Path, draft_folder: Path
) -> None:
    sampling = seeded(4)
    expected = plain(llama_folder, PROMPTS, sampling, sampler=coupled())
    engine = make_engine(llama_folder, make_proposer("probabilistic", draft_folder, 4), coupled())
    assert_same(_renamed(engine.generate(PROMPTS, sampling), expected), expected)


def test_coupled_keeps_no_draft_logits(llama_folder: Path, draft_folder: Path) -> None:
    for sampler, kept in ((CoupledSampler(CoupledOptions()), False), (StandardSampler(StandardOptions()), True)):
        proposer = make_proposer("probabilistic", draft_folder, 3)
        engine = make_engine(llama_folder, proposer, sampler)
        engine.generate(PROMPTS, seeded(4))
        assert (engine.buffers.draft_logits is not None) == kept
        assert (proposer._sampler._store is not None) == kept


def test_coupled_drafts_of_the_target_itself_are_all_accepted(llama_folder: Path) -> None:
    engine = make_engine(llama_folder, make_proposer("probabilistic", llama_folder, 3), coupled())
    outputs = engine.generate(PROMPTS, seeded(4))
    assert sum(output.accepted for output in outputs) == sum(output.drafted for output in outputs)


def test_a_seed_difference_is_shown_with_the_gap_of_the_perturbed_logits(llama_folder: Path) -> None:
    engine = make_engine(llama_folder, NoiseProposer(2, 384), coupled())
    sampling = seeded(1)[0]
    outputs = engine.generate(PROMPTS[:1], sampling, speculate=False)
    wrong = dataclasses.replace(outputs[0], token_ids=(*outputs[0].token_ids[:5], 1, 1))
    (difference,) = find_differences(engine, outputs, [wrong], sampling)
    assert difference.position == 5
    assert difference.gap is not None
    assert difference.gap > difference.tolerance
    assert not difference.is_tie


# -- laws ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", SAMPLERS)
def test_first_tokens_follow_the_target(eight: tuple[Path, Path], name: str, method: str) -> None:
    """C12: three tokens by engine and models of eight tokens; a bias of 0.2 in their joint law is caught."""
    engine = make_engine(eight[0], make_proposer(method, eight[1], 2), SAMPLERS[name](), max_num_seqs=64)
    prompt = [3, 4, 3, 4, 5, 3, 4, 6, 3, 4]
    options = SamplingParams(temperature=1.0)
    proof = prove_law(engine, prompt, options, num_samples=1000, num_tokens=3, first_seed=0, alpha=1e-3)
    assert proof.drafted > 100
    assert proof.detectable < 0.2
    assert proof.passed, {name: gate.sentence() for name, gate in proof.gates.items()}


def test_the_stored_law_is_decided_by_how_drafts_are_drawn(llama_folder: Path, draft_folder: Path) -> None:
    """C12: greedy drafts with a soft law cannot be configured, and nothing stores one."""
    names = {field.name for field in dataclasses.fields(DraftModelOptions)}
    assert not {name for name in names if "prob" in name or "logits" in name}
    engine = make_engine(llama_folder, make_proposer("greedy", draft_folder, 3))
    engine.generate(PROMPTS, seeded(4))
    assert engine.buffers.draft_logits is None


@pytest.mark.parametrize("name", SAMPLERS)
def test_temperature_and_filters_reach_the_verification(eight: tuple[Path, Path], name: str) -> None:
    """C14: the warped law, not the one at temperature 1."""
    sampling = SamplingParams(temperature=0.3, top_p=0.8, top_k=5)
    engine = make_engine(eight[0], make_proposer("probabilistic", eight[0], 3), SAMPLERS[name](), max_num_seqs=64)
    proof = prove_law(engine, [3, 4, 5], sampling, num_samples=800, num_tokens=2, first_seed=7, alpha=1e-3)
    assert proof.passed
    assert proof.impossible == 0
    law = exact_law(engine, [3, 4, 5], dataclasses.replace(sampling, max_tokens=2), 2, 0.0)
    assert abs(sum(law.values()) - 1) < 1e-6
    assert proof.accepted == proof.drafted  # the drafter is the target and draws from the warped law as well
    assert len(law) <= 25


@pytest.mark.parametrize("name", SAMPLERS)
def test_top_k_one_is_greedy_at_any_temperature(llama_folder: Path, draft_folder: Path, name: str) -> None:
    """C14."""
    engine = make_engine(llama_folder, make_proposer("probabilistic", draft_folder, 3), SAMPLERS[name]())
    greedy = SamplingParams(max_tokens=30, ignore_eos=True)
    expected = engine.generate(PROMPTS, greedy, speculate=False)
    found = engine.generate(PROMPTS, dataclasses.replace(greedy, temperature=2.0, top_k=1))
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]


# -- seeds ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_seed_holds_beside_unseeded_neighbours(
    llama_folder: Path, draft_folder: Path, name: str, method: str
) -> None:
    """C15: alone, as row 0 and as row 3 of four: one text. The unseeded rows differ from run to run."""
    engine = make_engine(llama_folder, make_proposer(method, draft_folder, 3), SAMPLERS[name]())
    free = SamplingParams(temperature=1.0, max_tokens=14, ignore_eos=True)
    fixed, prompt = dataclasses.replace(free, seed=7), PROMPTS[3]
    alone = engine.generate([prompt], fixed)[0].token_ids
    others = []
    for row in (0, 3, 3):
        prompts, sampling = [*PROMPTS[:3]], [free] * 3
        prompts.insert(row, prompt)
        sampling.insert(row, fixed)
        outputs = engine.generate(prompts, sampling)
        assert outputs.pop(row).token_ids == alone
        others.append(tuple(output.token_ids for output in outputs))
    assert len(set(others)) == len(others)


@pytest.mark.parametrize("name", SAMPLERS)
def test_preemption_does_not_change_the_text(llama_folder: Path, draft_folder: Path, name: str) -> None:
    """Numbers are keyed, so a request that is computed again draws the same ones."""
    sampling = seeded(4, max_tokens=30)
    proposers = [make_proposer("greedy", draft_folder, 3) for _ in range(2)]
    roomy = make_engine(llama_folder, proposers[0], SAMPLERS[name](), max_model_len=64)
    tight = make_engine(llama_folder, proposers[1], SAMPLERS[name](), max_model_len=64, num_kv_blocks=24)
    expected, found = roomy.generate(PROMPTS, sampling), tight.generate(PROMPTS, sampling)
    assert tight.scheduler.describe()["preemptions"] != "0"
    if name == "coupled":  # plain decoding's tokens, whatever was drafted before and after
        assert [output.token_ids for output in found] == [output.token_ids for output in expected]
    assert_idle(tight)


def test_penalties_do_not_fade(llama_folder: Path) -> None:
    """C77: after 60 outputs a token of the first steps is still penalised, with speculation as without."""
    sampling = SamplingParams(max_tokens=70, ignore_eos=True, presence_penalty=2.0, frequency_penalty=2.0)
    engine, names = oracle_engine(llama_folder, PROMPTS[:2], 4)
    found = engine.generate(PROMPTS[:2], sampling, request_ids=names)
    assert_same(found, engine.generate(PROMPTS[:2], sampling, speculate=False, request_ids=names))
    free = plain(llama_folder, PROMPTS[:2], dataclasses.replace(sampling, presence_penalty=0.0, frequency_penalty=0.0))
    for with_penalty, without in zip(found, free, strict=True):
        assert max(Counter(with_penalty.token_ids).values()) <= max(Counter(without.token_ids).values())


# -- options of requests, at temperature above 0 (section C) -------------------------------------------------------
@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3}, {"frequency_penalty": 0.5}, {"presence_penalty": 0.5}, {"logit_bias": {5: -100.0}},
        {"min_tokens": 9, "stop_token_ids": list(range(0, 384, 3))}, {"min_p": 0.1}, {"stop": ["e"]}, {"logprobs": 2},
    ],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
def test_options_at_temperature(llama_folder: Path, draft_folder: Path, options: dict) -> None:
    """C18, C21, C22, C25, C27: seed-coupled output shows that every option works row by row when sampling too."""
    engine = make_engine(llama_folder, make_proposer("probabilistic", draft_folder, 5), coupled())
    sampling = seeded(4, **options)
    names = [f"r{index}" for index in range(4)]
    expected = engine.generate(PROMPTS, sampling, speculate=False, request_ids=names)
    found = engine.generate(PROMPTS, sampling, request_ids=names)
    assert_same(found, expected)
    for one, other in zip(found, expected, strict=True):
        chosen = [entry.chosen for entry in other.logprobs]
        assert [entry.chosen for entry in one.logprobs] == pytest.approx(chosen, abs=1e-4)
        assert len(chosen) == (len(one.token_ids) if options.get("logprobs") else 0)


# -- lossy samplers ------------------------------------------------------------------------------------------------
def test_lossy_samplers_say_so() -> None:
    """C17."""
    lossy: list[Sampler] = [
        SyntheticSampler(SyntheticOptions(synthetic_acceptance_length=2.0)), TypicalSampler(TypicalOptions())
    ]  # fmt: skip
    for sampler in lossy:
        assert not sampler.lossless
        assert not sampler.seed_exact
        assert sampler.describe()["lossless"] == "no"


def test_synthetic_length_is_realised(llama_folder: Path) -> None:
    sampler = SyntheticSampler(SyntheticOptions(synthetic_acceptance_length=2.5))
    engine = make_engine(llama_folder, NoiseProposer(3, 384), sampler)
    outputs = engine.generate(EIGHT, SamplingParams(max_tokens=60, ignore_eos=True))
    rounds, accepted = sum(one.rounds for one in outputs), sum(one.accepted for one in outputs)
    assert abs(1 + accepted / rounds - 2.5) < 0.2
    assert engine.describe()["sampler"]["configured acceptance length"] == "2.5"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"synthetic_acceptance_rates": (0.8, 0.5)}, "2 entries.*3 tokens"),
        ({"synthetic_acceptance_length": 4.5}, r"\[1, 4\]"),
    ],
)
def test_synthetic_options_are_checked_before_weights_are_read(tmp_path: Path, options: dict, message: str) -> None:
    """The folder does not even exist."""
    with pytest.raises(ConfigError, match=message):
        make_engine(tmp_path / "nothing", NoiseProposer(3, 384), SyntheticSampler(SyntheticOptions(**options)))


def test_plain_decoding_is_untouched_by_a_lossy_sampler(llama_folder: Path) -> None:
    sampling = SamplingParams(max_tokens=20, ignore_eos=True)
    expected = plain(llama_folder, PROMPTS, sampling)
    sampler = SyntheticSampler(SyntheticOptions(synthetic_acceptance_length=4.0))
    engine = make_engine(llama_folder, NoiseProposer(3, 384), sampler)
    found = engine.generate(PROMPTS, sampling, speculate=False)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert [one.token_ids for one in engine.generate(PROMPTS, sampling)] != [one.token_ids for one in expected]


# -- helpers of the proofs -----------------------------------------------------------------------------------------
def test_random_lengths_change_lengths_and_nothing_else(llama_folder: Path, draft_folder: Path) -> None:
    proposer = RandomLengths(make_proposer("greedy", draft_folder, 4))
    engine = make_engine(llama_folder, proposer, coupled())
    full = engine.generate(EIGHT, seeded(8))
    proposer.active = True
    cut = engine.generate(EIGHT, seeded(8))
    assert [one.token_ids for one in cut] == [one.token_ids for one in full]
    assert sum(one.drafted for one in cut) < sum(one.drafted for one in full)


def test_nan_logits_never_leave_the_vocabulary() -> None:
    for make in SAMPLERS.values():
        rows = torch.full((3, 8), float("nan"))
        from tests.samplers.helpers import make_inputs

        tokens = make().verify(rows, make_inputs(torch.tensor([[1, 2]]))).token_ids
        assert ((tokens >= -1) & (tokens < 8)).all()


# -- a sampler that divides by the temperature itself --------------------------------------------------------------
class Divides(StandardSampler):
    """What the Triton kernels do with raw logits, in torch; counts what it is given."""

    def configure(self, limits: EngineLimits) -> None:
        super().configure(limits)
        self.applies_temperature = True
        self.seen: Counter[bool] = Counter()

    def verify(self, logits: torch.Tensor, inputs: VerifyInputs) -> Verdict:
        self.seen[inputs.scaled] += 1
        if not inputs.scaled:
            heat = torch.where(inputs.temperature == 0, 1.0, inputs.temperature)
            logits = logits / heat.repeat_interleave(inputs.cu_rows.diff()).unsqueeze(1)
        return super().verify(logits, inputs)


@pytest.mark.parametrize(("options", "scaled"), [({}, False), ({"top_k": 30}, True), ({"presence_penalty": 0.4}, True)])
def test_logits_are_raw_only_where_temperature_is_all_there_is(
    llama_folder: Path, options: dict[str, float], scaled: bool
) -> None:
    """One request with another option makes the whole step processed; the tokens are the same either way."""
    sampling = [
        *seeded(2, temperature=0.7),
        *seeded(1, temperature=0.0),
        *seeded(1, temperature=1.3, max_tokens=16, **options),
    ]
    sampler = Divides(StandardOptions())
    found = make_engine(llama_folder, NoiseProposer(3, 384), sampler).generate(PROMPTS, sampling)
    expected = make_engine(llama_folder, NoiseProposer(3, 384)).generate(PROMPTS, sampling)
    assert_same(_renamed(found, expected), expected)
    assert sampler.seen[scaled] > 5
    assert not sampler.seen[True] or scaled
