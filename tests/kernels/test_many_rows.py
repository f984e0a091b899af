"""Products of some dozens of rows: what can be launched, and on a GPU the results of torch."""

from dataclasses import replace

import pytest
import torch

from specflow.kernels.few_rows import few_rows_linear as reference
from specflow.kernels.many_rows import ManyRowsShape
from specflow.kernels.triton_choice import has_group_products

pytest.importorskip("triton.experimental.gluon")

BASE = ManyRowsShape(panel=32, stages=2)
SHAPES = [
    ManyRowsShape(panel=64, stages=3),
    ManyRowsShape(panel=16, panels=3, block_k=128, stages=2),
    ManyRowsShape(panel=64, panels=3, stages=2, split=2),
    ManyRowsShape(groups=2, panel=64, stages=4, split=4),
    ManyRowsShape(groups=2, panel=128, stages=3),
    ManyRowsShape(groups=2, panel=64, panels=3, stages=2),
]


def some(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, device="cuda", dtype=dtype, generator=generator)


def test_what_fits() -> None:
    """Half precision, at an address the copy engine can read, cut into whole blocks that fill the ring; a tile of
    gates must not hold anything else, and of others only the last may be short."""
    weight = torch.empty(96, 256, dtype=torch.bfloat16)
    assert BASE.fits(weight, gated=False)
    assert BASE.fits(weight, gated=True)
    assert not BASE.fits(weight.float(), gated=False)
    assert not BASE.fits(torch.empty(1 + 96 * 256, dtype=torch.bfloat16)[1:].view(96, 256), gated=False)
    assert not replace(BASE, block_k=96).fits(weight, gated=False)
    assert not replace(BASE, split=3).fits(weight, gated=False)
    assert not replace(BASE, stages=5).fits(weight, gated=False)
    assert replace(BASE, panel=64).fits(weight, gated=False)
    assert not replace(BASE, panel=64).fits(weight, gated=True)


GPU = pytest.mark.skipif(
    not (torch.cuda.is_available() and has_group_products(torch.device("cuda"))), reason="needs a Hopper GPU"
)


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.block_m}x{shape.block_n}/{shape.split}")
@pytest.mark.parametrize("way", ["plain", "bias", "gated"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_agrees_with_torch(way: str, dtype: torch.dtype, shape: ManyRowsShape) -> None:
    """Fewer rows than a tile has, a tile and more; a last tile that is short; more units than processors."""
    gated = way == "gated"
    for rows in (1, 17, 64, 100, 128, 300):
        for columns in (192, 192 * 40) if gated else (200, 8000):
            values, weight = some(rows, 1024, dtype=dtype), some(columns * (1 + gated), 1024, dtype=dtype, seed=1) / 32
            bias = some(columns, dtype=dtype, seed=2) if way == "bias" else None
            found = shape.product(values, weight, bias, gated=gated)
            expected = reference(values.double(), weight.double(), None if bias is None else bias.double(), gated=gated)
            error = (found.double() - expected).abs().max() / expected.abs().max()
            assert error < (1e-2 if dtype == torch.bfloat16 else 2e-3), (rows, columns)


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("shape", SHAPES[:4], ids=lambda shape: f"{shape.block_m}x{shape.block_n}/{shape.split}")
def test_an_early_start_changes_no_bit(shape: ManyRowsShape, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products that follow one another, each on the result of the one before, captured in a graph and not."""
    from specflow.kernels import layer_ops_triton, many_rows_gluon

    weights = [some(4096, 4096, seed=seed) / 64 for seed in range(3)]
    scale, start = torch.ones(4096, device="cuda", dtype=torch.bfloat16), some(48, 4096)

    def run() -> torch.Tensor:
        values = start
        for turn in range(30):
            values = shape.product(values, weights[turn % 3])
            values = layer_ops_triton.add_rms_norm(None, values, scale, 1e-6)[1]
        return values

    found = [run() for _ in range(3)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(3):
        graph.replay()
        found.append(captured.clone())
    for module in (many_rows_gluon, layer_ops_triton):
        monkeypatch.setattr(module, "early_start", lambda _device: {})
    expected = run()
    assert expected.isfinite().all()
    assert all(torch.equal(one, expected) for one in found)
