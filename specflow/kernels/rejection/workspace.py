"""Sizes, launch shapes and static buffers of the pipeline."""

from dataclasses import dataclass

import torch

from specflow.kernels.noise import CHUNK_IDS


def blocks_of(vocab_size: int, block: int) -> int:
    """Blocks that cover the vocabulary."""
    return -(-vocab_size // block)


def power_of_two(value: int) -> int:
    """The least power of two that is not below value, at least 2."""
    return max(2, 1 << (value - 1).bit_length())


@dataclass(frozen=True, kw_only=True)
class LaunchShape:
    """How the kernels are launched; no token depends on it."""

    block: int = 8192  # ids of one program of the kernels that read rows; a power of two, at least two chunks
    stats_warps: int = 8
    masses_warps: int = 8
    finish_warps: int = 4  # one program per request
    evict_first: bool = True  # logits are read once: keep them from pushing other data out of the cache
    overlap: bool = False  # kernels start while the one before drains (NVIDIA from sm_90 on)

    def __post_init__(self) -> None:
        if self.block < 2 * CHUNK_IDS or self.block & (self.block - 1):
            raise ValueError(f"block={self.block} must be a power of two and at least {2 * CHUNK_IDS}")


# Below this many rows there are too few programs to fill a device with long blocks.
_FEW_ROWS = 32


def launch_shape(num_rows: int) -> LaunchShape:
    """A shape measured to be good for this many logits rows; see docs/kernels.md."""
    return LaunchShape(block=4096) if num_rows <= _FEW_ROWS else LaunchShape()


class Workspace:
    """What the stages hand to each other, for one batch size and shape; contents never outlive a call."""

    def __init__(self, batch: int, num_drafts: int, vocab_size: int, shape: LaunchShape, device: torch.device) -> None:
        self.blocks = blocks_of(vocab_size, shape.block)
        self.chunks = self.blocks * (shape.block // CHUNK_IDS)
        rows = (batch, num_drafts + 1)
        self.identity = torch.arange(batch, dtype=torch.int64, device=device)  # draft logits in request order
        sizes = {
            "target_max": (*rows, self.blocks),
            "target_sum": (*rows, self.blocks),
            "target_chunks": (*rows, self.chunks),
            "draft_max": (*rows, self.blocks),
            "draft_sum": (*rows, self.blocks),
            "draft_logit": rows,
            "draft_score": rows,
            "law_max": (batch, self.blocks),
            "law_chunks": (batch, self.chunks),
            "norms": (batch, 2),
        }
        self.tensors = {
            **{name: torch.empty(size, dtype=torch.float32, device=device) for name, size in sizes.items()},
            "target_arg": torch.empty((*rows, self.blocks), dtype=torch.int32, device=device),
            "decision": torch.empty((batch, 3), dtype=torch.int32, device=device),
        }
