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

    block: int = 4096  # ids of one program of the kernels that read rows; a power of two, at least two chunks
    stats_warps: int = 2  # each takes a part of the block by itself
    masses_warps: int = 4
    judge_warps: int = 4  # of launches that only judge, one program per request: rejection, and the last if all greedy
    finish_warps: int = 8  # of the last launch where tokens are drawn, one program per request
    evict_first: bool = True  # logits are read once: keep them from pushing other data out of the cache
    overlap: bool = True  # kernels start while the one before drains, where the device can (NVIDIA from sm_90 on)

    def __post_init__(self) -> None:
        if self.block < 2 * CHUNK_IDS or self.block & (self.block - 1):
            raise ValueError(f"block={self.block} must be a power of two and at least {2 * CHUNK_IDS}")

    @property
    def part(self) -> int:
        """Ids of one warp of the block statistics, which are one maximum and one sum for each part."""
        return max(CHUNK_IDS, self.block // self.stats_warps)

    @property
    def law_part(self) -> int:
        """Ids of one warp of the masses."""
        return max(CHUNK_IDS, self.block // self.masses_warps)


# Below this many rows there are too few programs to fill a device with long parts.
_FEW_ROWS = 32


def launch_shape(num_rows: int) -> LaunchShape:
    """A shape measured to be good for this many logits rows; see docs/kernels.md."""
    return LaunchShape(stats_warps=4) if num_rows <= _FEW_ROWS else LaunchShape()


def can_overlap(device: torch.device) -> bool:
    """True where a kernel can wait inside for the one before: NVIDIA from compute capability 9.0 on."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


class Workspace:
    """What the stages hand to each other, for one batch size and shape; contents never outlive a call."""

    def __init__(self, batch: int, num_drafts: int, vocab_size: int, shape: LaunchShape, device: torch.device) -> None:
        blocks = blocks_of(vocab_size, shape.block)
        self.parts, self.law_parts = blocks * (shape.block // shape.part), blocks * (shape.block // shape.law_part)
        self.chunks = blocks * (shape.block // CHUNK_IDS)
        rows = (batch, num_drafts + 1)
        self.identity = torch.arange(batch, dtype=torch.int64, device=device)  # draft logits in request order
        sizes = {
            "target_max": (*rows, self.parts),
            "target_sum": (*rows, self.parts),
            "target_chunks": (*rows, self.chunks),
            "draft_max": (*rows, self.parts),
            "draft_sum": (*rows, self.parts),
            "draft_logit": rows,
            "draft_score": rows,
            "draft_rest": rows,
            "law_max": (batch, self.law_parts),
            "law_chunks": (batch, self.chunks),
            "norms": (batch, 2),
        }
        self.tensors = {
            **{name: torch.empty(size, dtype=torch.float32, device=device) for name, size in sizes.items()},
            "target_arg": torch.empty((*rows, self.parts), dtype=torch.int32, device=device),
            "decision": torch.empty((batch, 3), dtype=torch.int32, device=device),
        }
