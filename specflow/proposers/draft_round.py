"""Where the tokens of one round of autoregressive drafting go: made once, used by all its steps.

A round first feeds the last two committed tokens of each request, then one draft at a time. Two tokens cover both a
partly accepted round, whose last kept draft is already in the pages (writing it again changes nothing), and a fully
accepted one, whose last draft was never fed; so every round has the same shapes and no branch.
"""

import numpy as np
import torch

from specflow.kernels.paged_attention import AttentionInputs, QueryGroup, plan_groups
from specflow.kernels.rotary import RotaryTable
from specflow.proposers.decoder import DecoderInputs

CATCH_UP = 2  # committed tokens fed at the start of a round


class DraftRound:
    """Positions, page slots and rotary entries of R requests for the catch-up and the K-1 steps after it."""

    def __init__(
        self,
        num_tokens: torch.Tensor,
        block_table: torch.Tensor,
        host_num_tokens: np.ndarray,
        rotary: RotaryTable,
        block_size: int,
        num_drafts: int,
    ) -> None:
        """num_tokens [R] int64 (host twin beside it), block_table [R, max_blocks] int64, K = num_drafts.

        Positions run to num_tokens + K - 2, and the block table must have a column for each; columns without a block
        hold 0, the block nobody reads.
        """
        self._block_table, self._seq_len = block_table, num_tokens
        self._host_num_tokens = host_num_tokens
        offsets = torch.arange(-CATCH_UP, num_drafts - 1, device=num_tokens.device).unsqueeze(1)
        self.positions = (num_tokens + offsets).clamp_(min=0)  # [K+1, R]
        blocks = block_table.t().gather(0, self.positions // block_size)
        self._slots = torch.add(self.positions % block_size, blocks, alpha=block_size)  # [K+1, R]
        self._rows = rotary.rows(self.positions.flatten()).unflatten(0, self.positions.shape)
        self._first_keys = _first_keys(block_table, host_num_tokens + num_drafts - 1, block_size)

    def catch_up(self) -> DecoderInputs:
        """The last two committed tokens of each request, request after request."""
        return self._inputs(slice(0, CATCH_UP), 0)

    def step(self, index: int) -> DecoderInputs:
        """Draft number `index` (from 1) of each request is fed."""
        return self._inputs(slice(CATCH_UP + index - 1, CATCH_UP + index), index)

    def _inputs(self, rows: slice, extra: int) -> DecoderInputs:
        width = rows.stop - rows.start
        positions = self.positions[rows].t().flatten()
        attention = AttentionInputs(
            positions=positions,
            slot_mapping=self._slots[rows].t().flatten(),
            block_table=self._block_table,
            seq_len=self._seq_len + extra,
            groups=self._groups(width, extra),
        )
        return DecoderInputs(attention, self._rows[rows].transpose(0, 1).flatten(0, 1))

    def _groups(self, width: int, extra: int) -> tuple[QueryGroup, ...]:
        lengths = self._host_num_tokens + extra
        if self._first_keys is None:
            return (QueryGroup(0, len(lengths), 0, width, int(lengths.max()), None),)
        return tuple(
            QueryGroup(row, 1, row * width, width, length, first)
            for row, (length, first) in enumerate(zip(lengths.tolist(), self._first_keys, strict=True))
        )


def _first_keys(block_table: torch.Tensor, lengths: np.ndarray, block_size: int) -> list[int] | None:
    """First page slot of each request, if all have their blocks in a row; None otherwise and off the CPU.

    On a CPU one request after the other, read in place, is faster than a gathered batch.
    """
    if block_table.device.type != "cpu":
        return None
    table = block_table.numpy()
    counts = -(-lengths // block_size)
    steps = np.arange(1, table.shape[1])
    in_a_row = (np.diff(table, axis=1) == 1) | (steps >= counts[:, None])
    return (table[:, 0] * block_size).tolist() if in_a_row.all() else None


def chunk_inputs(
    first: np.ndarray,
    last: np.ndarray,
    host_blocks: np.ndarray,
    rotary: RotaryTable,
    block_size: int,
    device: torch.device,
) -> tuple[DecoderInputs, torch.Tensor]:
    """Inputs for positions first[r] … last[r]-1 of R requests, and the owner of each token, [T] int64.

    first, last [R] and host_blocks [R, max_blocks] are int64 on the host.
    """
    block_table = torch.from_numpy(host_blocks).to(device)
    lengths = last - first
    host_owners = np.repeat(np.arange(len(lengths)), lengths)
    starts = np.cumsum(lengths) - lengths
    owners = torch.from_numpy(host_owners).to(device)
    positions = torch.from_numpy(np.arange(lengths.sum()) - (starts - first)[host_owners]).to(device)
    attention = AttentionInputs(
        positions=positions,
        slot_mapping=block_table[owners, positions // block_size] * block_size + positions % block_size,
        block_table=block_table,
        seq_len=torch.from_numpy(last).to(device),
        groups=plan_groups(lengths, last, host_blocks, block_size),
    )
    return DecoderInputs(attention, rotary.rows(positions)), owners
