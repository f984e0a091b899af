"""Writing pages by Triton kernels against the torch reference, compiled where there is a GPU."""

import pytest
import torch

from specflow.kernels import paged_attention as reference
from specflow.kernels.rotary import RopeConfig, rotary_table
from tests.kernels.rejection_cases import DEVICE

pytest.importorskip("triton")

from specflow.kernels import paged_write_triton as kernels

TOKENS, BLOCKS, BLOCK = 5, 6, 8


def pages(heads: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Pages in which every number tells whether it was written to."""
    count = BLOCKS * BLOCK * heads * size
    return (torch.arange(count, device=DEVICE) % 97).to(dtype).view(BLOCKS, BLOCK, heads, size)


def new(heads: int, size: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Heads of some tokens, with numbers that overflowed among them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(TOKENS, heads, size, generator=generator)
    values[0, 0, 0], values[1, -1, 1], values[2, 0, -1] = float("nan"), float("inf"), float("-inf")
    return values.to(DEVICE, dtype)


def slots() -> torch.Tensor:
    return torch.tensor([47, 3, 8, 30, 15], device=DEVICE)


@pytest.mark.parametrize("clean", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "sizes"), [(2, (16, 16)), (3, (24, 80)), (40, (192, 128))], ids=str)
def test_keys_and_values(heads: int, sizes: tuple[int, int], dtype: torch.dtype, clean: bool) -> None:
    """Bit for bit what torch writes, and nothing beside it; more heads than one program takes."""
    keys, values = new(heads, sizes[0], dtype, 0), new(heads, sizes[1], dtype, 1)
    found, expected = ([pages(heads, size, dtype) for size in sizes] for _ in range(2))
    kernels.write_keys_values(*found, slots(), keys, values, clean=clean)
    reference.write_keys_values(*expected, slots(), keys, values, clean=clean)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        assert bool(torch.isfinite(one).all()) == (clean or dtype == torch.float16)


def test_strided_heads_and_pages_side_by_side() -> None:
    """As models hand them over, and as drafters keep them."""
    keys, values = new(4, 16, torch.float32, 0), new(4, 16, torch.float32, 1)
    by_head = keys.transpose(0, 1).contiguous().transpose(0, 1)
    both = pages(8, 16, torch.float32)
    column = torch.stack([slots(), slots() * 0], 1)[:, 0]  # of a table of several tokens per request
    assert not column.is_contiguous()
    kernels.write_keys_values(both[:, :, :4], both[:, :, 4:], column, by_head, values)
    expected = pages(8, 16, torch.float32)
    expected.view(-1, 8, 16).index_copy_(0, slots(), torch.cat([keys, values], 1))
    torch.testing.assert_close(both, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(6, 2, 16), (3, 3, 80), (14, 2, 128)])
def test_rotation_in_the_same_launch(heads: int, kv_heads: int, size: int, dtype: torch.dtype) -> None:
    """Queries turned, keys turned and stored, values stored; torch rounds half precision twice, the kernel once."""
    turned, values = new(heads + kv_heads, size, dtype, 0), new(kv_heads, size, dtype, 1)
    turned.nan_to_num_(0.0, 1.0, -1.0)
    table = rotary_table(RopeConfig(head_dim=size, theta=100.0), 50, DEVICE, dtype)
    rows = table.rows(torch.tensor([0, 7, 8, 49, 20], device=DEVICE))
    found, expected = (pages(2 * kv_heads, size, dtype) for _ in range(2))
    query, same = (
        module.rotate_and_write(stored[:, :, :kv_heads], stored[:, :, kv_heads:], slots(), turned.clone(), values, rows)
        for module, stored in ((kernels, found), (reference, expected))
    )
    near = {torch.float32: 1e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(query, same, rtol=near, atol=near)
    torch.testing.assert_close(found, expected, rtol=near, atol=near, equal_nan=True)
    untouched = torch.ones(BLOCKS * BLOCK, dtype=torch.bool)
    untouched[slots().cpu()] = False
    assert found.flatten(0, 1)[untouched].equal(expected.flatten(0, 1)[untouched])
