"""What stands between a layer's products, by Triton against the torch reference; compiled where there is a GPU."""

import pytest
import torch

from specflow.kernels import layer_ops as reference
from specflow.kernels.rotary import RopeConfig, rotary_table
from tests.kernels.rejection_cases import DEVICE

pytest.importorskip("triton")

from specflow.kernels import layer_ops_triton as kernels

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# The last bit of a number near 4.
NEAR = {torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 3.2e-2}


def some(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def near(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=NEAR[found.dtype], atol=NEAR[found.dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(1, 64), (5, 96), (3, 1000)])
def test_add_and_norm(rows: int, columns: int, dtype: torch.dtype) -> None:
    """Sum and its norm, or the norm alone; an axis that is no power of two."""
    delta, residual = some(rows, columns, dtype=dtype), some(rows, columns, dtype=dtype, seed=1)
    weight = some(columns, dtype=dtype, seed=2)
    for part in (delta, None):
        found = kernels.add_rms_norm(part, residual, weight, 1e-3)
        expected = reference.add_rms_norm(part, residual, weight, 1e-3)
        near(found[0], expected[0])  # the interpreter cuts bfloat16 off where a GPU rounds
        near(found[1], expected[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [64, 1000])
def test_embedding_and_its_norm(columns: int, dtype: torch.dtype) -> None:
    """Rows of a table, one of them twice and out of order."""
    table, weight = some(9, columns, dtype=dtype), some(columns, dtype=dtype, seed=1)
    ids = torch.tensor([8, 0, 3, 8], device=DEVICE)
    found, expected = (part.embed_norm(ids, table, weight, 1e-3) for part in (kernels, reference))
    assert torch.equal(found[0], expected[0])
    near(found[1], expected[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (4, 1500)])
def test_gated_silu(rows: int, columns: int, dtype: torch.dtype) -> None:
    """Also for gates at which an exponential overflows."""
    values = some(rows, 2 * columns, dtype=dtype)
    values[0, 0], values[0, 1] = -200.0, 200.0
    found = kernels.gated_silu(values)
    assert torch.isfinite(found).all()
    near(found, reference.gated_silu(values))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_norms_side_by_side(dtype: torch.dtype) -> None:
    values = [some(3, 96, dtype=dtype, seed=seed) for seed in (0, 1)]
    weights = [some(96, dtype=dtype, seed=seed) for seed in (2, 3)]
    near(kernels.pair_norm(*values, *weights, 1e-3), reference.pair_norm(*values, *weights, 1e-3))


def test_keys_and_values_alone_from_rows_that_lie_apart() -> None:
    """No queries; a layer's part of a wider product; nothing but numbers enters the pages."""
    wide = some(3, 4 * 2 * 16, dtype=torch.float32)
    wide[1, 40], wide[2, 60] = float("nan"), float("inf")
    rotary = rotary_table(RopeConfig(head_dim=16, theta=100.0), 50, DEVICE, torch.float32).values
    slots, positions = torch.tensor([3, 11, 30], device=DEVICE), torch.tensor([0, 7, 49], device=DEVICE)
    outcomes = []
    for module in (kernels, reference):
        keys, values = (some(4, 8, 1, 16, dtype=torch.float32, seed=seed) for seed in (5, 6))
        part = wide[:, 32:64]
        query = module.norm_rotate_write(part, keys, values, slots, positions, rotary, None, 1e-6, clean=True)
        assert query.shape == (3, 0, 16)
        outcomes.append((keys, values))
    for found, expected in zip(*outcomes, strict=True):
        near(found, expected)
        assert torch.isfinite(found).all()


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 16), (3, 1, 80), (8, 8, 64)])
def test_norm_rotate_write(heads: int, kv_heads: int, size: int, dtype: torch.dtype, normed: bool) -> None:
    """Queries, keys and values; positions behind the table take its last row; nothing else in the pages changes."""
    qkv = some(5, (heads + 2 * kv_heads) * size, dtype=dtype)
    norms = (some(size, dtype=dtype, seed=3), some(size, dtype=dtype, seed=4)) if normed else None
    rotary = rotary_table(RopeConfig(head_dim=size, theta=100.0), 50, DEVICE, dtype).values
    slots, positions = (torch.tensor(numbers, device=DEVICE) for numbers in ([47, 3, 8, 30, 15], [0, 7, 49, 80, 20]))
    outcomes = []
    for module in (kernels, reference):
        keys, values = (some(6, 8, kv_heads, size, dtype=dtype, seed=seed) for seed in (5, 6))
        query = module.norm_rotate_write(qkv, keys, values, slots, positions, rotary, norms, 1e-6)
        outcomes.append((query, keys, values))
    (query, keys, values), expected = outcomes
    near(query, expected[0])
    near(keys, expected[1])
    assert torch.equal(values, expected[2])
    untouched = torch.ones(48, dtype=torch.bool)
    untouched[slots.cpu()] = False
    before = some(6, 8, kv_heads, size, dtype=dtype, seed=5)
    assert torch.equal(keys.flatten(0, 1)[untouched], before.flatten(0, 1)[untouched])


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("many", [False, True])
def test_keys_and_values_of_all_layers(many: bool, normed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three layers in one launch, of few and of many tokens; pages that share their memory, as a head keeps them."""
    layers, kv_heads, size, tokens = 3, 20, 16, 5
    monkeypatch.setattr(kernels, "_MANY_TOKENS", 4 if many else 5)
    keys_values = some(tokens, layers * 2 * kv_heads * size, dtype=torch.float32)
    keys_values[1, 5] = float("inf")
    norms = some(layers, size, dtype=torch.float32, seed=3) if normed else None
    rotary = rotary_table(RopeConfig(head_dim=size, theta=100.0), 9, DEVICE, torch.float32).values
    slots = torch.tensor([159, 3, 8, 30, 15], device=DEVICE)
    outcomes = []
    for module in (kernels, reference):
        pages = some(layers, 20, 8, 2 * kv_heads, size, dtype=torch.float32, seed=5)
        both = pages[..., :kv_heads, :], pages[..., kv_heads:, :]
        positions = torch.arange(tokens, device=DEVICE)
        module.norm_rotate_write_layers(keys_values, *both, slots, positions, rotary, norms, 1e-6, clean=True)
        outcomes.append(pages)
    near(*outcomes)
    assert torch.isfinite(outcomes[0]).all()


def test_overflow_never_reaches_the_pages() -> None:
    """As `write_keys_values`: in half precision NaN becomes 0 and infinity the largest number."""
    qkv = some(1, 3 * 16, dtype=torch.float16)
    qkv[0, 16], qkv[0, 40] = float("inf"), float("nan")
    rotary = rotary_table(RopeConfig(head_dim=16, theta=100.0), 4, DEVICE, torch.float16).values
    index = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    for module in (kernels, reference):
        keys, values = (torch.zeros(1, 1, 1, 16, device=DEVICE, dtype=torch.float16) for _ in range(2))
        module.norm_rotate_write(qkv, keys, values, index, index, rotary, None, 1e-6)
        assert torch.isfinite(keys).all()
        assert torch.isfinite(values).all()
        assert float(keys.max()) == 65504.0
