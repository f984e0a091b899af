"""What attention needs to know of a step: where keys and values go, and which of them each query token sees."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class QueryGroup:
    """Adjacent requests with equally many query tokens."""

    first_request: int
    num_requests: int  # b
    first_token: int
    query_len: int  # Q
    max_seq_len: int  # most key positions any of them sees, host knowledge
    first_key: int | None  # b == 1 and blocks in a row: first slot of the request's pages, read as a view
    # max_seq_len is a bound that outlives the step, for a captured graph: how long a sequence is, the device knows.
    is_bound: bool = False
    # What layers share, by kind: masks, blocks to read. A group therefore belongs to one set of positions and blocks.
    cache: dict[Hashable, torch.Tensor] = field(default_factory=dict)

    @property
    def tokens(self) -> slice:
        """The group's packed tokens."""
        return slice(self.first_token, self.first_token + self.num_requests * self.query_len)


@dataclass(frozen=True)
class AttentionInputs:
    """Where keys and values go, and which of them each query token sees."""

    positions: torch.Tensor  # [T] int64
    slot_mapping: torch.Tensor  # [T] int64: block * block_size + offset; padded tokens write into block 0
    block_table: torch.Tensor  # [B, max_blocks] int64
    seq_len: torch.Tensor  # [B] int64: key positions that exist after this step's writes
    groups: Sequence[QueryGroup]
    # [B+1] int64: first token of each request, T at the end. None: known from the groups alone.
    query_start: torch.Tensor | None = None
