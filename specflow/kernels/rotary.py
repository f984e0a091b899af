"""Rotary position embedding (Su et al. 2021): tables made once, applied by two fused operations.

Half-split layout: element i of a head is rotated together with element i + D/2, as Hugging Face checkpoints expect.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch

RopeKind = Literal["default", "linear", "llama3"]


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Frequencies of a rotary embedding; the factors count only for the kinds that scale."""

    head_dim: int  # D
    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3: wavelengths above original_max_positions / this are stretched by factor
    high_freq_factor: float = 4.0  # llama3: wavelengths below original_max_positions / this are kept
    original_max_positions: int = 8192


@dataclass(frozen=True)
class RotaryTable:
    """cos and sin of every position, side by side so that one lookup reads both."""

    values: torch.Tensor  # [P, 2, 1, D]: cos, then sin with its first half negated

    def rows(self, positions: torch.Tensor) -> torch.Tensor:
        """Entries of positions [T] int64, [T, 2, 1, D], for `rotate`."""
        return self.values.index_select(0, positions)


def rotary_table(rope: RopeConfig, num_positions: int, device: torch.device, dtype: torch.dtype) -> RotaryTable:
    """Table of positions 0 … num_positions-1, computed in float32 and stored in dtype."""
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(rope))
    cos, sin = angles.cos(), angles.sin()
    values = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], 1)
    return RotaryTable(values.unsqueeze(2).to(device=device, dtype=dtype))


def inverse_frequencies(rope: RopeConfig) -> torch.Tensor:
    """Radians per position of each pair, [D/2] float32."""
    exponents = torch.arange(0, rope.head_dim, 2, dtype=torch.int64).float() / rope.head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _stretch_long_waves(frequencies, rope)
    return frequencies


def _stretch_long_waves(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Llama 3.1: long waves are stretched by `factor`, short ones kept, those between interpolated."""
    turns = rope.original_max_positions * frequencies / (2 * math.pi)
    kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / rope.factor


def rotate(heads: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rotate heads [T, H, D] by table rows [T, 2, 1, D]; a new tensor of the same shape."""
    half = heads.shape[-1] // 2
    return torch.addcmul(heads * rows[:, 0], heads.roll(half, -1), rows[:, 1])
