"""Keyed noise: uniform, Gumbel, independent across domains, and a function of its key alone."""

import numpy as np
import pytest
import torch
from scipy import stats

from specflow.kernels.noise import COIN, DRAFT, TARGET, gumbel_argmax, gumbel_noise, uniform

SEEDS = torch.arange(200_000)
POSITION = torch.full_like(SEEDS, 17)


def test_coins_are_uniform() -> None:
    assert stats.kstest(uniform(SEEDS, POSITION, COIN).numpy(), "uniform").pvalue > 1e-4


def test_coins_stay_inside_the_open_interval() -> None:
    coins = uniform(SEEDS, POSITION, COIN)
    assert coins.min() > 0
    assert coins.max() < 1


def test_noise_is_gumbel() -> None:
    noise = gumbel_noise(SEEDS[:20_000], POSITION[:20_000], TARGET, 5)
    assert stats.kstest(noise.numpy().ravel(), "gumbel_r").pvalue > 1e-4
    assert torch.isfinite(noise).all()


@pytest.mark.parametrize("other", [COIN, TARGET])
def test_domains_are_independent(other: int) -> None:
    a, b = uniform(SEEDS, POSITION, DRAFT).numpy(), uniform(SEEDS, POSITION, other).numpy()
    assert abs(np.corrcoef(a, b)[0, 1]) < 4 / len(a) ** 0.5


def test_positions_and_seeds_are_independent() -> None:
    here, next_position = uniform(SEEDS, POSITION, COIN).numpy(), uniform(SEEDS, POSITION + 1, COIN).numpy()
    assert abs(np.corrcoef(here, next_position)[0, 1]) < 4 / len(here) ** 0.5
    assert abs(np.corrcoef(here[:-1], here[1:])[0, 1]) < 4 / len(here) ** 0.5


def test_high_seed_bits_matter() -> None:
    low = uniform(SEEDS[:100], POSITION[:100], COIN)
    high = uniform(SEEDS[:100] + 2**40, POSITION[:100], COIN)
    assert not torch.equal(low, high)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    alone = gumbel_noise(SEEDS[5:6], POSITION[5:6], TARGET, 100)
    batched = gumbel_noise(SEEDS[:10], POSITION[:10], TARGET, 100)
    assert torch.equal(alone[0], batched[5])


def test_a_prefix_of_the_vocabulary_has_the_same_noise() -> None:
    assert torch.equal(
        gumbel_noise(SEEDS[:3], POSITION[:3], DRAFT, 7), gumbel_noise(SEEDS[:3], POSITION[:3], DRAFT, 99)[:, :7]
    )


def test_argmax_follows_the_law() -> None:
    law = torch.tensor([0.5, 0.3, 0.2])
    drawn = gumbel_argmax(law.log().expand(len(SEEDS), -1), gumbel_noise(SEEDS, POSITION, TARGET, 3))
    assert (
        stats.chisquare(
            np.bincount(drawn.numpy()), law.double().numpy() / law.double().sum().item() * len(SEEDS)
        ).pvalue
        > 1e-4
    )


def test_float64_noise_refines_float32() -> None:
    fine = gumbel_noise(SEEDS[:100], POSITION[:100], TARGET, 50, torch.float64)
    assert fine.dtype == torch.float64
    assert torch.allclose(fine.float(), gumbel_noise(SEEDS[:100], POSITION[:100], TARGET, 50), atol=1e-4)
