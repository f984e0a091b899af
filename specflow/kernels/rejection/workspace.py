"""Sizes, launch shapes and static buffers of the pipeline."""

from dataclasses import dataclass

import torch


def blocks_of(vocab_size: int, block: int) -> int:
    """Blocks that cover the vocabulary."""
    return -(-vocab_size // block)


def power_of_two(value: int) -> int:
    """The least power of two that is not below value, at least 2."""
    return max(2, 1 << (value - 1).bit_length())


@dataclass(frozen=True, kw_only=True)
class LaunchShape:
    """Block sizes (powers of two) and warps of the two stages that read the vocabulary."""

    stats_block: int = 8192
    stats_warps: int = 8
    sample_block: int = 4096  # divides stats_block
    sample_warps: int = 4
    chunk: int = 512  # ids that are searched for a tile's best one; divides both blocks
    small_warps: int = 4  # rejection and insert: one program per request


# Below this many rows there are too few programs to fill a device with long blocks.
_FEW_ROWS = 32


def launch_shape(num_rows: int) -> LaunchShape:
    """A shape measured to be good for this many logits rows; see docs/kernels.md."""
    if num_rows <= _FEW_ROWS:
        return LaunchShape(stats_block=4096, sample_block=1024)
    return LaunchShape()


class Workspace:
    """What the stages hand to each other, for one batch size and shape; contents never outlive a call."""

    def __init__(
        self, batch: int, num_drafts: int, vocab_size: int, shape: LaunchShape, noise: torch.dtype, device: torch.device
    ) -> None:
        self.stats_blocks = blocks_of(vocab_size, shape.stats_block)
        self.sample_blocks = blocks_of(vocab_size, shape.sample_block)
        stats = (batch, num_drafts + 1, self.stats_blocks)
        self.identity = torch.arange(batch, dtype=torch.int64, device=device)  # draft logits in request order
        self.tensors = {
            **{
                name: torch.empty(stats, dtype=torch.float32, device=device)
                for name in ("target_max", "target_sum", "draft_max", "draft_sum")
            },
            "target_arg": torch.empty(stats, dtype=torch.int32, device=device),
            "decision": torch.empty((batch, 3), dtype=torch.int32, device=device),
            "norms": torch.empty((batch, 3), dtype=torch.float32, device=device),
            "best_score": torch.empty((batch, self.sample_blocks), dtype=noise, device=device),
            "best_id": torch.empty((batch, self.sample_blocks), dtype=torch.int32, device=device),
        }
