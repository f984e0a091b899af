"""One allocation for all small results of a launch."""

from collections.abc import Sequence

import torch


def int_pieces(sizes: Sequence[int], device: torch.device) -> list[torch.Tensor]:
    """One-dimensional int64 tensors of these sizes, in one piece of memory."""
    # Each begins at a multiple of 16 bytes, as Triton's compilations expect of most tensors.
    padded = [size + size % 2 for size in sizes]
    pieces = torch.empty(sum(padded), dtype=torch.int64, device=device).split(padded)
    return [piece[:size] for piece, size in zip(pieces, sizes, strict=True)]
