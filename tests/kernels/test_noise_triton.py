"""Keyed randomness by Triton against torch on a CPU; compiled where there is a GPU."""

import pytest
import torch

from specflow.kernels import noise
from tests.kernels.rejection_cases import DEVICE

pytest.importorskip("triton")

from specflow.kernels import noise_triton

SEEDS = torch.tensor([0, 1, -5, 2**61 + 12345, 7])
POSITIONS = torch.tensor([0, 3, 2**20, 9, 100_000])


@pytest.mark.parametrize("domain", [noise.COIN, noise.DRAFT])
def test_the_same_uniforms(domain: int) -> None:
    """Rounded once from float32 here and once from float64 there: one unit in the last place at most."""
    seeds = SEEDS.unsqueeze(1).expand(5, 700)
    positions = POSITIONS.unsqueeze(1) + torch.arange(700)
    expected = noise.uniform(seeds, positions, domain)
    found = noise_triton.uniform(seeds.to(DEVICE), positions.to(DEVICE), domain).cpu()
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=1.2e-7, atol=0)
    assert (found == expected).float().mean() > 0.9
    assert found.max() < 1


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 3e-6), (torch.float64, 1e-12)])
def test_the_same_gumbel_noise(dtype: torch.dtype, near: float) -> None:
    expected = noise.gumbel_noise(SEEDS, POSITIONS, noise.TARGET, 2500, dtype)
    found = noise_triton.gumbel_noise(SEEDS.to(DEVICE), POSITIONS.to(DEVICE), noise.TARGET, 2500, dtype).cpu()
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=near, atol=near)


def test_nothing_for_nobody() -> None:
    nobody = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    assert noise_triton.uniform(nobody, nobody, 1).shape == (0,)
    assert noise_triton.gumbel_noise(nobody, nobody, 1, 9, torch.float32).shape == (0, 9)
