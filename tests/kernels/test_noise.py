"""Keyed noise: uniform, Gumbel, independent across domains, and a function of its key alone."""

import numpy as np
import pytest
import torch
from scipy import stats

from specflow.kernels.noise import (
    CHUNK_IDS,
    COIN,
    DRAFT,
    TARGET,
    chunk_masses,
    gumbel_argmax,
    gumbel_noise,
    two_level_draw,
    uniform,
)
from specflow.testing.statistics import chi_square_gate

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


# -- two levels ----------------------------------------------------------------------------------------------------
def wide_law(vocab_size: int = 1300) -> torch.Tensor:
    """Logits over a vocabulary that no whole number of chunks covers; the second chunk is empty."""
    law = 1.5 * torch.randn(vocab_size, generator=torch.Generator().manual_seed(4))
    law[CHUNK_IDS : 2 * CHUNK_IDS] = float("-inf")
    law[vocab_size - 3 :] += 4
    return law


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_two_levels_follow_the_softmax(dtype: torch.dtype) -> None:
    law = wide_law()
    num = 100_000
    drawn = [
        two_level_draw(law.expand(len(part), -1), part, torch.full_like(part, 17), dtype)
        for part in torch.arange(num).split(5_000)
    ]
    counts = np.bincount(torch.cat(drawn).numpy(), minlength=len(law))
    gate = chi_square_gate(counts, torch.softmax(law.double(), 0).numpy())
    assert gate.passed, gate.sentence()
    assert counts[CHUNK_IDS : 2 * CHUNK_IDS].sum() == 0
    wrong = torch.softmax(law.double(), 0)
    wrong[2 * CHUNK_IDS :] *= 1.1  # the chunk's mass off by a tenth
    assert not chi_square_gate(counts, wrong.numpy()).passed


def test_a_single_chunk_is_drawn_from_directly() -> None:
    law = wide_law(1300)[: CHUNK_IDS - 9].expand(200, -1)
    noise = gumbel_noise(SEEDS[:200], POSITION[:200], TARGET, law.shape[1])
    assert torch.equal(two_level_draw(law, SEEDS[:200], POSITION[:200]), gumbel_argmax(law, noise))


def test_a_draw_depends_on_nothing_but_its_row() -> None:
    """Neither on the neighbours nor on masked ids behind the vocabulary."""
    law = torch.stack([wide_law().roll(7 * row) for row in range(40)])
    together = two_level_draw(law, SEEDS[:40], POSITION[:40])
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    assert torch.equal(two_level_draw(law[order], SEEDS[:40][order], POSITION[:40]), together[order])
    for row in range(40):
        part = slice(row, row + 1)
        assert torch.equal(two_level_draw(law[part], SEEDS[part], POSITION[part]), together[part])
    padded = torch.nn.functional.pad(law, (0, 900), value=float("-inf"))
    assert torch.equal(two_level_draw(padded, SEEDS[:40], POSITION[:40]), together)


def test_rows_without_a_choice() -> None:
    """All masked: the lowest id; infinitely likely ids (the largest finite logit): the lowest of them; one id: it."""
    law = torch.full((3, 2000), float("-inf"))
    law[1, [700, 1500]] = torch.finfo(torch.float32).max
    law[2, 1999] = -3.0
    assert two_level_draw(law, SEEDS[:3], POSITION[:3]).tolist() == [0, 700, 1999]


def test_chunk_masses() -> None:
    law = wide_law().unsqueeze(0)
    expected = torch.stack([part.logsumexp(1) for part in law.split(CHUNK_IDS, 1)], 1)
    assert torch.allclose(chunk_masses(law), expected)
    assert chunk_masses(law)[0, 1] == float("-inf")
    assert chunk_masses(law[:, : 2 * CHUNK_IDS]).shape == (1, 2)
