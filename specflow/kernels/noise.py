"""Keyed randomness: every number is a function of (seed, position, domain[, token]) and of nothing else.

There is no generator state, so a request draws the same numbers alone or in a batch, before or after a pre-emption,
with or without speculation. Domains keep the coin, the draft's noise and the target's noise independent: sharing one
stream between proposal and residual biases the output (vLLM PR 54282).
"""

import torch

COIN, DRAFT, TARGET, TREE, FRESH = 1, 2, 3, 4, 5

_MASK32 = 0xFFFFFFFF
_GOLDEN = 0x9E3779B1
_TWO_POW_MINUS_32 = 2.0**-32


def uniform(seeds: torch.Tensor, positions: torch.Tensor, domain: int) -> torch.Tensor:
    """Float32 uniforms in (0, 1), one per entry; seeds and positions are int64 of the same shape."""
    first, second = _keys(seeds, positions, domain)
    return _open_unit(_mix(first ^ _mix(second)), torch.float32)


def gumbel_noise(
    seeds: torch.Tensor, positions: torch.Tensor, domain: int, vocab_size: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Standard Gumbel noise [B, V] of the given dtype for seeds [B] and positions [B] (int64).

    Written as -log(-log1p(-u)), so that the winning tail comes from u near 0, where a 32-bit uniform keeps its
    resolution in float32: the noise reaches 22.9 instead of 16.6. float64 only refines the logarithms.
    """
    first, second = _keys(seeds, positions, domain)
    tokens = torch.arange(vocab_size, device=seeds.device, dtype=torch.int64)
    hashed = _mix(_mix(((tokens * _GOLDEN) & _MASK32).unsqueeze(0) ^ first.unsqueeze(1)) ^ second.unsqueeze(1))
    return -torch.log(-torch.log1p(-_open_unit(hashed, dtype)))


def gumbel_argmax(logits: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Sample one id per row of logits [B, V]: argmax of logits plus noise, lowest id among equals; int64 [B]."""
    return torch.argmax(logits.to(noise.dtype) + noise, dim=-1)


def fresh_seeds(seeds: torch.Tensor, rounds: torch.Tensor) -> torch.Tensor:
    """Other seeds for every verification step of a request; int64 tensors of one shape -> int64, same shape.

    Needed where a number could be looked at in one step and used again in a later one (block verification).
    """
    first, second = _keys(seeds, rounds, FRESH)
    return (first << 31) ^ second


def _keys(seeds: torch.Tensor, positions: torch.Tensor, domain: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two 32-bit keys per entry, as int64: a token hash uses both, so that streams are not shifts of each other."""
    low, high = seeds & _MASK32, (seeds >> 32) & _MASK32
    first = _mix(low ^ _mix((positions * _GOLDEN + domain) & _MASK32))
    second = _mix(high ^ _mix((first + 0x7F4A7C15 * domain) & _MASK32))
    return first, second


def _mix(value: torch.Tensor) -> torch.Tensor:
    """The 32-bit finaliser of MurmurHash3 on int64 tensors that hold 32-bit values."""
    value = ((value ^ (value >> 16)) * 0x85EBCA6B) & _MASK32
    value = ((value ^ (value >> 13)) * 0xC2B2AE35) & _MASK32
    return value ^ (value >> 16)


def _open_unit(hashed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Map 32-bit integers into (0, 1); the largest values are kept below 1 in float32."""
    unit = (hashed.to(torch.float64) + 0.5) * _TWO_POW_MINUS_32
    return unit.to(dtype).clamp_(max=1 - 2**-24) if dtype == torch.float32 else unit.to(dtype)
