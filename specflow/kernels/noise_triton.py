"""Keyed randomness by Triton, one launch each: the results of `noise`, up to the last places of a logarithm."""

# mypy: ignore-errors
# Bodies below are Triton's language, which only looks like typed Python.

import torch
import triton
import triton.language as tl

from specflow.kernels.rejection.device_noise import mix32, noise_keys, open_unit, target_gumbel
from specflow.kernels.triton_choice import device_of

_BLOCK = 1024


@triton.jit
def uniform_kernel(seeds, positions, output, count, DOMAIN: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (blocks,): one number per entry."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seed = tl.load(seeds + entry, mask=entry < count, other=0)
    position = tl.load(positions + entry, mask=entry < count, other=0)
    first, second = noise_keys(seed, position, DOMAIN)
    tl.store(output + entry, open_unit(mix32(first ^ mix32(second))), mask=entry < count)


@triton.jit
def gumbel_kernel(
    seeds, positions, output, V, DOMAIN: tl.constexpr, BLOCK: tl.constexpr, FP64: tl.constexpr, FAST: tl.constexpr
):
    """Grid (rows, blocks of V)."""
    row = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first, second = noise_keys(tl.load(seeds + row), tl.load(positions + row), DOMAIN)
    noise = target_gumbel(first, second, token, FP64, FAST)
    tl.store(output + row.to(tl.int64) * V + token, noise, mask=token < V)


def uniform(seeds: torch.Tensor, positions: torch.Tensor, domain: int) -> torch.Tensor:
    """See `noise.uniform`."""
    seeds, positions = seeds.contiguous(), positions.contiguous()
    output = torch.empty(seeds.shape, dtype=torch.float32, device=seeds.device)
    if count := seeds.numel():
        with device_of(seeds):
            uniform_kernel[(-(-count // _BLOCK),)](seeds, positions, output, count, DOMAIN=domain, BLOCK=_BLOCK)
    return output


def gumbel_noise(
    seeds: torch.Tensor, positions: torch.Tensor, domain: int, vocab_size: int, dtype: torch.dtype
) -> torch.Tensor:
    """See `noise.gumbel_noise`; float32 or float64."""
    seeds, positions = seeds.contiguous(), positions.contiguous()
    output = torch.empty((len(seeds), vocab_size), dtype=dtype, device=seeds.device)
    if len(seeds):
        fast = seeds.is_cuda and torch.version.hip is None
        with device_of(seeds):
            gumbel_kernel[(len(seeds), -(-vocab_size // _BLOCK))](
                seeds, positions, output, vocab_size,
                DOMAIN=domain, BLOCK=_BLOCK, FP64=dtype == torch.float64, FAST=fast,
            )  # fmt: skip
    return output
