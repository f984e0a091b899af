"""One round of autoregressive drafting: which positions its passes feed, and how they are run.

A round first feeds the last two committed tokens of each request, then one draft at a time. Two tokens cover both a
partly accepted round, whose last kept draft is already in the pages (writing it again changes nothing), and a fully
accepted one, whose last draft was never fed; so every round has the same shapes and no branch.
"""

from abc import ABC, abstractmethod

import numpy as np
import torch

from specflow.core.attention import AttentionInputs, QueryGroup
from specflow.kernels.paged_attention import plan_groups
from specflow.kernels.rotary import RotaryTable
from specflow.proposers.base import ProposeContext
from specflow.proposers.cpu_decoder_steps import CpuDecoderSteps
from specflow.proposers.decoder import Decoder, DecoderInputs

CATCH_UP = 2  # committed tokens fed at the start of a round


class DraftRound(ABC):
    """The passes of one round over the R requests of a context."""

    def __init__(self, context: ProposeContext) -> None:
        self._context = context

    def catch_up(self) -> torch.Tensor:
        """Feed the last two committed tokens of each request; logits of the newest, [R, V]."""
        context = self._context
        columns = self.positions(0, CATCH_UP)
        ids = context.token_table[context.slots.unsqueeze(1), columns].flatten()
        return self.feed(ids, 0, CATCH_UP)

    def step(self, index: int, token_ids: torch.Tensor) -> torch.Tensor:
        """Feed draft number `index` (from 1) of each request, token_ids [R] int64; logits [R, V]."""
        return self.feed(token_ids, CATCH_UP + index - 1, 1)

    @abstractmethod
    def positions(self, offset: int, width: int) -> torch.Tensor:
        """Positions [R, width] int64 from `offset` past the second last committed token; none below 0."""

    @abstractmethod
    def feed(self, token_ids: torch.Tensor, offset: int, width: int) -> torch.Tensor:
        """Run `width` tokens of each request, request after request, at `positions`; logits of the last, [R, V]."""


class TorchRound(DraftRound):
    """On any device, through the plain decoder. Positions, slots and rotary entries are made once for all passes."""

    def __init__(self, context: ProposeContext, decoder: Decoder, num_drafts: int) -> None:
        """Positions run to num_tokens + K - 2, for which the block table must have columns; those without a block
        hold 0, the block nobody reads."""
        super().__init__(context)
        self._decoder = decoder
        offsets = torch.arange(-CATCH_UP, num_drafts - 1, device=context.slots.device)
        self._positions = (context.num_tokens.unsqueeze(1) + offsets).clamp_(min=0)  # [R, K+1]
        size = decoder.block_size
        blocks = context.block_table.gather(1, self._positions // size)
        self._slots = torch.add(self._positions % size, blocks, alpha=size)  # [R, K+1]
        self._rows = decoder.rotary.rows(self._positions.flatten()).unflatten(0, self._positions.shape)

    def positions(self, offset: int, width: int) -> torch.Tensor:
        """See `DraftRound.positions`."""
        return self._positions[:, offset : offset + width]

    def feed(self, token_ids: torch.Tensor, offset: int, width: int) -> torch.Tensor:
        """See `DraftRound.feed`."""
        columns = slice(offset, offset + width)
        positions = self._positions[:, columns]
        longest = self._context.host.num_tokens - CATCH_UP + offset + width
        group = QueryGroup(0, len(positions), 0, width, max(int(longest.max()), 1), None)
        attention = AttentionInputs(
            positions=positions.flatten(),
            slot_mapping=self._slots[:, columns].flatten(),
            block_table=self._context.block_table,
            seq_len=positions[:, -1] + 1,
            groups=(group,),
        )
        hidden = self._decoder.forward(token_ids, DecoderInputs(attention, self._rows[:, columns].flatten(0, 1)))
        return self._decoder.logits(hidden[width - 1 :: width])


class CpuRound(DraftRound):
    """On a CPU in float32, through compiled kernels that find slots and rotary entries themselves."""

    def __init__(self, context: ProposeContext, steps: CpuDecoderSteps) -> None:
        super().__init__(context)
        self._steps = steps
        self._block_table = context.host.block_table
        self._first = context.host.num_tokens - CATCH_UP

    def positions(self, offset: int, width: int) -> torch.Tensor:
        """See `DraftRound.positions`."""
        columns = self._first[:, None] + np.arange(offset, offset + width)
        return torch.from_numpy(np.maximum(columns, 0))

    def feed(self, token_ids: torch.Tensor, offset: int, width: int) -> torch.Tensor:
        """See `DraftRound.feed`."""
        return self._steps.run(token_ids, self._first + offset, self._block_table)


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
