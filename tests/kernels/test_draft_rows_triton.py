"""Rows of a head's passes by Triton against torch; interpreted on a CPU, compiled where there is a GPU."""

import dataclasses

import pytest
import torch

from specflow.kernels import draft_rows as reference
from tests.kernels.rejection_cases import DEVICE

pytest.importorskip("triton")

from specflow.kernels import draft_rows_triton as kernels

PAGE = 4


def tables(requests: int, blocks: int = 12) -> torch.Tensor:
    generator = torch.Generator().manual_seed(requests)
    return 1 + torch.randperm(requests * blocks, generator=generator).view(requests, blocks)


def same(call: str, *arguments: object) -> None:
    on_device = [part.to(DEVICE) if isinstance(part, torch.Tensor) else part for part in arguments]
    found, expected = getattr(kernels, call)(*on_device), getattr(reference, call)(*arguments)
    for part in dataclasses.fields(expected):
        theirs = getattr(expected, part.name)
        assert getattr(found, part.name).tolist() == theirs.tolist(), part.name
        assert getattr(found, part.name).dtype == theirs.dtype


@pytest.mark.parametrize("width", [1, 4, 5])
@pytest.mark.parametrize("requests", [1, 3])
def test_kept_rows(requests: int, width: int) -> None:
    """From one kept row to all of them; a request's rows need not follow those of the one before."""
    start = torch.arange(requests) * (width + 2) + 1
    kept = torch.tensor([width, 1, max(1, width - 1)])[:requests]
    positions = torch.arange(requests * (width + 2) + 1) % (width + 2) + torch.tensor([7])
    same("kept_rows", start, kept, positions, tables(requests), PAGE, width)


@pytest.mark.parametrize("rows", [1, 5, 16])
@pytest.mark.parametrize("requests", [1, 3])
def test_blocks(requests: int, rows: int) -> None:
    slots = torch.tensor([2, 0, 3])[:requests]
    num_tokens = torch.tensor([1, 9, 20])[:requests]
    token_table = torch.arange(4 * 50).view(4, 50)
    same("block_rows", slots, num_tokens, token_table, tables(requests), PAGE, rows, 999)
