"""Sizes that are fixed once, before the first step, and never change afterwards."""

from dataclasses import dataclass
from typing import Literal

import torch

PagedKernelsName = Literal["torch", "triton"]


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """Everything a component needs to allocate its static buffers."""

    max_num_seqs: int  # requests that run at the same time
    max_model_len: int  # tokens of prompt and output together (the first output token may exceed it by one)
    max_num_batched_tokens: int  # packed tokens of one step
    block_size: int  # tokens of one KV block
    num_blocks: int  # KV blocks, block 0 included, which is never allocated: padded rows write there
    num_speculative_tokens: int  # K, the most drafts a request gets per step; 0 without a proposer
    lookahead_tokens: int  # KV positions past the committed tokens that a request's blocks must cover
    vocab_size: int  # V, columns of the target's logits
    device: torch.device
    dtype: torch.dtype  # of the target's activations and KV pages
    paged_kernels: PagedKernelsName = "torch"  # what reads and writes KV pages, a proposer's own as well

    @property
    def table_width(self) -> int:
        """Columns of the token table: the longest request, one step's drafts and the bonus token."""
        return self.max_model_len + self.num_speculative_tokens + 2

    @property
    def max_blocks_per_seq(self) -> int:
        """Columns of the block table."""
        return -(-(self.table_width + self.lookahead_tokens) // self.block_size)

    @property
    def pad_slot(self) -> int:
        """Request slot of padded rows; real requests have slots 0 … max_num_seqs-1."""
        return self.max_num_seqs
