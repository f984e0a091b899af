"""Products of a few rows by Triton against the torch reference; compiled where there is a GPU."""

from dataclasses import replace

import pytest
import torch

from specflow.kernels import few_rows as reference
from tests.kernels.rejection_cases import DEVICE

pytest.importorskip("triton")

from specflow.kernels import few_rows_gluon, layer_ops_triton
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
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # streams read weights before the launch in front, which made them here, has ended
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
    [{"block_n": 32}, {"block_k": 16}, {"stages": 1}, {"warps": 4}, {"next_early": True}],
    ids=str,
)
def test_launch_shapes_change_rounding_only(change: dict[str, int]) -> None:
    check(4, 96, 64, torch.float32, replace(BASE, **change), way="gated")


@pytest.mark.parametrize("shape", [{"block_n": 48}, {"block_k": 64}, {}], ids=["rows", "columns", "dtype"])
def test_what_cannot_be_streamed_is_refused(shape: dict[str, int]) -> None:
    """Before anything is launched."""
    stream = replace(FewRowsShape(block_n=16, block_k=16, stream=True), **shape)
    dtype = torch.bfloat16 if shape else torch.float32
    with pytest.raises(AssertionError, match="cannot be streamed"):
        check(2, 80, 64, dtype, stream)


STREAMS = [
    FewRowsShape(block_n=16, block_k=256, warps=1, stages=8, stream=True),
    FewRowsShape(block_n=32, block_k=128, warps=2, stages=3, stream=True),
    FewRowsShape(block_n=64, block_k=64, warps=4, stages=1, next_early=True, stream=True),
]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shape", STREAMS, ids=lambda shape: str(shape.block_n))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", ["plain", "bias", "gated"])
def test_streams(way: str, dtype: torch.dtype, shape: FewRowsShape) -> None:
    """One row and more of them; as many steps as the ring holds, and more; values at an odd address."""
    for rows in (1, 2, 8, 9, 16):
        for depth in (256, 1024, 2304):
            check(rows, depth, 192, dtype, shape, way)
    weight = some(64, 512, dtype=dtype, seed=1)
    values = some(1 + 512, dtype=dtype)[1:].view(1, 512)
    found = kernels.few_rows_linear(values, weight, shape=shape)
    assert torch.equal(found, kernels.few_rows_linear(values.clone(), weight, shape=shape))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("way", ["plain", "gated"])
@pytest.mark.parametrize("rows", [1, 8, 16])
def test_at_full_size(rows: int, way: str, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a target of width 4096 runs it: products and norms that begin early give the bits of those that do not."""
    shape = FewRowsShape(stream=stream, warps=1 if stream else 2)
    check(rows, 4096, 1024, torch.bfloat16, shape, way)
    gated = way == "gated"
    weights = [some(4096 * (1 + gated), 4096, dtype=torch.bfloat16, seed=seed) * 4096**-0.5 for seed in range(3)]
    scale = torch.ones(4096, device=DEVICE, dtype=torch.bfloat16)
    torch.cuda.synchronize()

    def run() -> torch.Tensor:
        values = some(rows, 4096, dtype=torch.bfloat16)
        for turn in range(30):
            values = kernels.few_rows_linear(values, weights[turn % 3], gated=gated, shape=shape)
            values = layer_ops_triton.add_rms_norm(None, values, scale, 1e-6)[1]
        return values

    found = [run() for _ in range(5)]
    for module in (kernels, few_rows_gluon, layer_ops_triton):
        monkeypatch.setattr(module, "early_start", lambda _device: {})
    expected = run()
    assert expected.isfinite().all()
    assert all(torch.equal(one, expected) for one in found)


def test_more_rows_than_served_are_refused() -> None:
    weight = some(16, 16, dtype=torch.float32)
    with pytest.raises(AssertionError, match="more rows"):
        kernels.few_rows_linear(some(65, 16, dtype=torch.float32), weight)
