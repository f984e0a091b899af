"""Products of a few rows by Triton against the torch reference; compiled where there is a GPU."""

from dataclasses import replace

import pytest
import torch

from specflow.kernels import few_rows as reference
from tests.kernels.rejection_cases import DEVICE

pytest.importorskip("triton")

from specflow.kernels import few_rows_triton as kernels
from specflow.kernels.few_rows_triton import FewRowsShape

# The interpreter cuts bfloat16 off where a GPU rounds, at each of several roundings.
NEAR = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 5e-2}
BASE = FewRowsShape(block_n=16, block_k=32)


def some(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def check(
    rows: int, depth: int, columns: int, dtype: torch.dtype, shape: FewRowsShape = BASE, way: str = "plain"
) -> None:
    """Relative to the largest number, for sums of many products cancel."""
    gated = way == "gated"
    values = some(rows, depth, dtype=dtype)
    weight = some(columns * (1 + gated), depth, dtype=dtype, seed=1) * depth**-0.5
    bias = some(columns, dtype=dtype, seed=2) if way == "bias" else None
    found = kernels.few_rows_linear(values, weight, bias, gated=gated, shape=shape)
    expected = reference.few_rows_linear(values, weight, bias, gated=gated)
    assert found.shape == expected.shape == (rows, columns)
    difference = (found.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert float(difference) < NEAR[dtype]


@pytest.mark.parametrize("dtype", list(NEAR), ids=str)
@pytest.mark.parametrize("way", ["plain", "bias", "gated"])
@pytest.mark.parametrize("sizes", [(3, 80, 56), (1, 64, 48)], ids=str)
def test_ways(sizes: tuple[int, int, int], way: str, dtype: torch.dtype) -> None:
    """What is done with the product; sizes that blocks divide and that none divides."""
    check(*sizes, dtype, way=way)


@pytest.mark.parametrize("rows", [2, 8, 9, 33, 64])
def test_rows(rows: int) -> None:
    """As many as the kernel serves."""
    check(rows, 64, 32, torch.float32)


@pytest.mark.parametrize(
    "change",
    [{"block_n": 32}, {"block_k": 16}, {"stages": 1}, {"warps": 4}, {"ahead": 16}, {"next_early": True}],
    ids=str,
)
def test_launch_shapes_change_rounding_only(change: dict[str, int]) -> None:
    check(4, 96, 64, torch.float32, replace(BASE, **change), way="gated")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("ahead", [0, 16])
@pytest.mark.parametrize("way", ["plain", "gated"])
@pytest.mark.parametrize("rows", [1, 8, 16])
def test_at_full_size(rows: int, way: str, ahead: int) -> None:
    """As a target of width 4096 runs it, asking ahead or not; the same bits each time."""
    shape = FewRowsShape(ahead=ahead)
    check(rows, 4096, 1024, torch.bfloat16, shape, way)
    values, weight = some(rows, 4096, dtype=torch.bfloat16), some(2048, 4096, dtype=torch.bfloat16)
    first, *others = (kernels.few_rows_linear(values, weight, gated=way == "gated", shape=shape) for _ in range(20))
    assert all(torch.equal(first, other) for other in others)


def test_more_rows_than_served_are_refused() -> None:
    weight = some(16, 16, dtype=torch.float32)
    with pytest.raises(AssertionError, match="more rows"):
        kernels.few_rows_linear(some(65, 16, dtype=torch.float32), weight)
