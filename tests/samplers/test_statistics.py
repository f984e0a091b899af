"""Lossless in law, several verification steps deep, with stated power; and the gate fails everything that is wrong."""

import numpy as np
import pytest
import torch
from scipy import stats

from specflow.core.sampling_params import SamplingParams
from specflow.kernels.noise import COIN, DRAFT, TARGET, fresh_seeds, gumbel_noise, uniform
from specflow.samplers.base import Sampler
from specflow.samplers.block import BlockOptions, BlockSampler
from specflow.samplers.coupled import CoupledOptions, CoupledSampler
from specflow.samplers.standard import StandardOptions, StandardSampler
from specflow.samplers.typical import TypicalOptions, TypicalSampler
from specflow.testing.sabotage import ALWAYS_WRONG, WRONG_WITH_SAMPLED_DRAFTS, ReusedCoins, SharedNoise
from specflow.testing.statistics import (
    POWER,
    chi_square_gate,
    critical_value,
    detectable_total_variation,
    noncentral_survival,
    samples_needed,
    survival,
    total_variation_bound,
    two_sample_gate,
)
from specflow.testing.table_model import TableModel

SAMPLERS: dict[str, Sampler] = {
    "standard": StandardSampler(StandardOptions()),
    "coupled": CoupledSampler(CoupledOptions()),
    "block": BlockSampler(BlockOptions()),
}
DRAFTERS = ("one_hot", "probabilistic")
FILTERS = {"none": {}, "top_k": {"top_k": 2}, "top_p": {"top_p": 0.8}, "min_p": {"min_p": 0.2}}
each_sampler = pytest.mark.parametrize("name", SAMPLERS)
each_drafter = pytest.mark.parametrize("drafter", DRAFTERS)


# -- the gate itself -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("degrees", "at_1e4", "at_1e6"),
    [(1, 15.14, 23.93), (3, 21.11, 30.67), (4, 23.51, 33.38), (24, 58.61, 72.23), (124, 191.28, 213.72)],
)
def test_critical_values(degrees: int, at_1e4: float, at_1e6: float) -> None:
    assert critical_value(degrees, 1e-4) == pytest.approx(at_1e4, abs=0.01)
    assert critical_value(degrees, 1e-6) == pytest.approx(at_1e6, abs=0.01)


@pytest.mark.parametrize(
    ("cells", "samples", "expected"), [(5, 1e5, 0.01185), (5, 1e6, 0.00375), (25, 1e6, 0.00513), (125, 1e6, 0.00822)]
)
def test_total_variation_bound(cells: int, samples: float, expected: float) -> None:
    assert total_variation_bound(cells, samples) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("case", [(3.0, 1), (50.0, 20), (300.0, 250)])
def test_distributions_are_those_of_scipy(case: tuple[float, int]) -> None:
    statistic, degrees = case
    assert survival(statistic, degrees) == pytest.approx(stats.chi2.sf(statistic, degrees), rel=1e-6)
    for shift in (0.0, 5.0, 80.0):
        expected = stats.chi2.sf(statistic, degrees) if not shift else stats.ncx2.sf(statistic, degrees, shift)
        assert noncentral_survival(statistic, degrees, shift) == pytest.approx(expected, rel=1e-5)


def test_one_sample_gate_is_pearsons_test() -> None:
    counts, law = np.array([480, 310, 160, 50]), np.array([0.5, 0.3, 0.15, 0.05])
    expected = stats.chisquare(counts, law * 1000)
    gate = chi_square_gate(counts, law)
    assert (gate.statistic, gate.p_value) == pytest.approx((expected.statistic, expected.pvalue))


def test_two_sample_gate_is_the_test_of_homogeneity() -> None:
    first, second = np.array([480, 310, 160, 50]), np.array([260, 140, 70, 30])
    expected = stats.chi2_contingency(np.stack([first, second]))
    gate = two_sample_gate(first, second)
    assert (gate.statistic, gate.p_value) == pytest.approx((expected.statistic, expected.pvalue))


def test_impossible_outcomes_fail() -> None:
    assert chi_square_gate(np.array([50, 50, 0]), np.array([0.5, 0.5, 0.0])).passed
    assert not chi_square_gate(np.array([5000, 5000, 1]), np.array([0.5, 0.5, 0.0])).passed


def test_rare_outcomes_are_pooled() -> None:
    law = np.array([0.9, *[0.1 / 1000] * 1000])
    counts = np.random.default_rng(0).multinomial(2000, law)
    gate = chi_square_gate(counts, law)
    assert gate.degrees == 1
    assert gate.passed


def test_false_alarms_are_as_rare_as_stated() -> None:
    generator, law = np.random.default_rng(1), np.array([0.4, 0.3, 0.15, 0.1, 0.04, 0.01])
    other = [generator.multinomial(1500, law) for _ in range(500)]
    one = [chi_square_gate(generator.multinomial(1000, law), law, 0.01).passed for _ in range(500)]
    two = [two_sample_gate(generator.multinomial(1000, law), counts, 0.01).passed for counts in other]
    for passed in (one, two):
        assert 0 < passed.count(False) < 15  # 5 expected


@pytest.mark.parametrize("shift", [(0, 1), (1, 0), (0, 4), (3, 0)])
def test_power_is_at_least_what_is_stated(shift: tuple[int, int]) -> None:
    """The stated sample size catches the bias whatever cells it moves mass between."""
    law = np.array([0.3, 0.25, 0.2, 0.15, 0.1])
    bias = 0.05
    size = samples_needed(4, bias)
    assert detectable_total_variation(4, size) == pytest.approx(bias, rel=1e-3)
    biased = law.copy()
    biased[list(shift)] += (bias, -bias)
    generator = np.random.default_rng(2)
    caught = [not chi_square_gate(generator.multinomial(size, biased), law).passed for _ in range(300)]
    assert np.mean(caught) >= POWER - 0.02


# -- right samplers pass -------------------------------------------------------------------------------------------
@each_sampler
@each_drafter
@pytest.mark.parametrize(
    ("temperature", "filters"),
    [
        pytest.param(0.5, "none", marks=pytest.mark.slow),
        (1.0, "none"),
        pytest.param(1.5, "none", marks=pytest.mark.slow),
        (1.0, "top_k"),
        pytest.param(0.7, "top_p", marks=pytest.mark.slow),
        (1.5, "top_p"),
        pytest.param(1.5, "min_p", marks=pytest.mark.slow),
    ],
)
def test_joint_law(name: str, drafter: str, temperature: float, filters: str) -> None:
    """Four tokens, V=4, up to three drafts per step: 256 outcomes; a bias of 0.05 in total variation is caught."""
    model = TableModel.random(4, seed=3, sampling=SamplingParams(temperature=temperature, **FILTERS[filters]))
    gate = model.gate(
        SAMPLERS[name], num_samples=18_000, num_tokens=4, num_drafts=3, drafter=drafter, first_seed=10_000
    )
    assert gate.detectable < 0.05
    assert gate.passed, gate.sentence()


SIZES = [
    pytest.param(2, 8, 5, marks=pytest.mark.slow),
    pytest.param(3, 5, 1, marks=pytest.mark.slow),
    (3, 5, 2),
    (5, 3, 7),
    (16, 2, 1),
]


@each_sampler
@each_drafter
@pytest.mark.parametrize(("vocab", "num_tokens", "num_drafts"), SIZES)
def test_vocabulary_and_drafts(name: str, drafter: str, vocab: int, num_tokens: int, num_drafts: int) -> None:
    """Vocabulary 2 to 16, one to seven drafts, and draft lengths that change from step to step."""
    model = TableModel.random(vocab, seed=vocab)
    for ragged in (False, True):
        gate = model.gate(
            SAMPLERS[name], num_samples=16_000, num_tokens=num_tokens, num_drafts=num_drafts, drafter=drafter,
            ragged=ragged,
        )  # fmt: skip
        assert gate.detectable < 0.06
        assert gate.passed, gate.sentence()


@pytest.mark.parametrize(
    "sampler",
    [
        StandardSampler(StandardOptions(use_fp64_gumbel=True)),
        CoupledSampler(CoupledOptions(use_fp64_gumbel=True)),
        BlockSampler(BlockOptions(use_fp64_gumbel=True)),
    ],
    ids=lambda sampler: sampler.name,
)
def test_float64_noise(sampler: Sampler) -> None:
    gate = TableModel.random(4, seed=3).gate(
        sampler, num_samples=18_000, num_tokens=4, num_drafts=3, drafter="probabilistic"
    )
    assert gate.passed, gate.sentence()


@each_sampler
@pytest.mark.parametrize("distance", [0.0, 0.05, 4.0])
def test_drafters_near_and_far(name: str, distance: float) -> None:
    """The target itself, a near copy, and one that disagrees nearly everywhere."""
    model = TableModel.random(4, seed=5, distance=distance)
    options = {"num_samples": 16_000, "num_tokens": 4, "num_drafts": 3, "drafter": "probabilistic"}
    run = model.run(SAMPLERS[name], **options)
    assert chi_square_gate(run.counts, model.law(4)).passed
    if distance == 0.0:
        assert run.acceptance_rate > 0.9999
    assert run.acceptance_rate > 0.85 or distance == 4.0


@each_sampler
def test_disjoint_support(name: str) -> None:
    """The drafter never says what the target can say: nothing is accepted, the law stays."""
    base = TableModel.random(6, seed=1)
    low = torch.arange(6) < 3
    model = TableModel(
        base.target.masked_fill(~low, float("-inf")), base.draft.masked_fill(low, float("-inf")), base.sampling
    )
    run = model.run(SAMPLERS[name], num_samples=8_000, num_tokens=3, num_drafts=2, drafter="probabilistic")
    assert run.accepted == 0
    assert chi_square_gate(run.counts, model.law(3)).passed


# -- acceptance ----------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_acceptance_of_the_samplers() -> None:
    """One-hot: one law for all. Probabilistic: block above standard, coupled below it and above (1-TV)/(1+TV)."""
    model = TableModel.random(5, seed=7)
    rates = {
        drafter: {
            name: model.run(
                SAMPLERS[name], num_samples=20_000, num_tokens=8, num_drafts=3, drafter=drafter
            ).acceptance_rate
            for name in ("standard", "coupled", "block")
        }
        for drafter in DRAFTERS
    }
    one_hot, sampled = rates["one_hot"], rates["probabilistic"]
    assert max(one_hot.values()) - min(one_hot.values()) < 0.01
    assert sampled["block"] > sampled["standard"] + 0.01
    assert sampled["standard"] > sampled["coupled"] > sampled["standard"] - 0.1


# -- wrong samplers fail -------------------------------------------------------------------------------------------
WRONG = [(kind, "probabilistic") for kind in ALWAYS_WRONG]
WRONG += [pytest.param(kind, "one_hot", marks=pytest.mark.slow) for kind in ALWAYS_WRONG]
WRONG += [(kind, "probabilistic") for kind in WRONG_WITH_SAMPLED_DRAFTS]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (10**6, 2 * 10**6))])
@pytest.mark.parametrize(("kind", "drafter"), WRONG, ids=lambda value: getattr(value, "name", value))
def test_the_gate_fails_what_is_wrong(kind: type, drafter: str, seed: int) -> None:
    """The shared noise is the smallest of these biases (total variation 0.03)."""
    model = TableModel.random(4, seed=1)
    gate = model.gate(kind(), num_samples=30_000, num_tokens=4, num_drafts=3, drafter=drafter, first_seed=seed)
    assert not gate.passed, gate.sentence()


def test_the_gate_fails_a_lossy_sampler() -> None:
    gate = TableModel.random(4, seed=1).gate(
        TypicalSampler(TypicalOptions()), num_samples=5_000, num_tokens=3, num_drafts=2, drafter="one_hot"
    )
    assert not gate.passed


@pytest.mark.parametrize("name", ["standard", "coupled", "block"])
def test_the_gate_passes_what_is_right_at_99_of_100_seeds(name: str) -> None:
    """User case C76."""
    model = TableModel.random(3, seed=2)
    options = {"num_samples": 2_000, "num_tokens": 3, "num_drafts": 2, "drafter": "probabilistic"}
    passed = [model.gate(SAMPLERS[name], first_seed=10_000 * seed, **options).passed for seed in range(100)]
    assert passed.count(True) >= 99


@each_drafter
def test_reused_coins_show_only_after_the_first_step(drafter: str) -> None:
    """A test of one step cannot see why block verification needs fresh numbers: the first two tokens are right."""
    model = TableModel.random(4, seed=1)
    options = {"num_samples": 30_000, "num_drafts": 3, "drafter": drafter}
    assert model.gate(ReusedCoins(), num_tokens=1, **options).passed
    assert not model.gate(ReusedCoins(), num_tokens=4, **options).passed


@pytest.mark.slow
@pytest.mark.parametrize("fresh_drafts", [False, True])
def test_block_needs_fresh_draft_noise_too(fresh_drafts: bool) -> None:
    """Coins fresh in every step but the drafter's noise keyed by position alone is still biased."""

    class HalfFresh(BlockSampler):
        fresh_draft_noise = fresh_drafts

    gate = TableModel.random(2, seed=1).gate(
        HalfFresh(BlockOptions()), num_samples=200_000, num_tokens=6, num_drafts=3, drafter="probabilistic"
    )
    assert gate.passed == fresh_drafts, gate.sentence()


def test_shared_noise_is_harmless_without_sampled_drafts() -> None:
    gate = TableModel.random(4, seed=1).gate(
        SharedNoise(), num_samples=16_000, num_tokens=4, num_drafts=3, drafter="one_hot"
    )
    assert gate.passed


# -- independence of the streams -----------------------------------------------------------------------------------
def test_streams_are_uncorrelated() -> None:
    seeds = torch.arange(100_000)
    places = torch.full_like(seeds, 12)
    coin = uniform(seeds, places, COIN)
    draft, target = (gumbel_noise(seeds, places, domain, 2) for domain in (DRAFT, TARGET))
    fresh = uniform(fresh_seeds(seeds, places), places, COIN)
    columns = [coin, fresh, draft[:, 0], draft[:, 1], target[:, 0], target[:, 1]]
    correlation = np.corrcoef(torch.stack(columns).numpy()) - np.eye(len(columns))
    assert np.abs(correlation).max() < 4 / len(seeds) ** 0.5


def test_fresh_seeds_differ_by_round_and_by_seed() -> None:
    seeds = torch.arange(1000).repeat(50) + 2**40
    rounds = torch.arange(50).repeat_interleave(1000)
    assert len(fresh_seeds(seeds, rounds).unique()) == 50_000
    assert torch.equal(fresh_seeds(seeds, rounds), fresh_seeds(seeds, rounds))
