"""One round of drafting: which positions its passes feed, and how they are run.

A round first feeds the newest committed tokens of each request again, whatever the last round left in the pages, then
its drafts or masks. How many is the same for every request and round, so shapes never change and nothing branches.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch

from specflow.core.attention import AttentionInputs, QueryGroup
from specflow.core.upload import to_device
from specflow.kernels.paged_attention import plan_groups
from specflow.kernels.rotary import RotaryTable
from specflow.proposers.base import HostView, ProposeContext
from specflow.proposers.cpu_decoder_steps import CpuDecoderSteps
from specflow.proposers.decoder import Decoder, DecoderInputs


@dataclass(frozen=True)
class RoundShape:
    """How many tokens of each request a round feeds."""

    catch_up: int  # committed tokens at its start, the anchor last
    past_anchor: int  # tokens behind the anchor: drafts or masks
    kept: int  # of those, how many have right keys and values if they turn out to be accepted


class DraftRound(ABC):
    """The passes of one round over the R requests of a context."""

    def __init__(self, context: ProposeContext, shape: RoundShape) -> None:
        self._context, self._shape = context, shape

    @property
    def host(self) -> HostView:
        """The requests of the round as the host knows them."""
        return self._context.host

    def catch_up(self) -> torch.Tensor:
        """Feed the newest committed tokens of each request; logits of the anchor, [R, V]."""
        return self.feed(self._committed().flatten(), 0, self._shape.catch_up)

    def step(self, index: int, token_ids: torch.Tensor) -> torch.Tensor:
        """Feed draft number `index` (from 1) of each request, token_ids [R] int64; logits [R, V]."""
        return self.feed(token_ids, self._shape.catch_up + index - 1, 1)

    def all_at_once(self, filler: torch.Tensor) -> torch.Tensor:
        """Feed the newest committed tokens and behind the anchor the token `filler` (int64 [1]), as often as the round
        has room; logits of the anchor and of every filler, [R, past_anchor + 1, V]."""
        committed = self._committed()
        fillers = filler.expand(len(committed), self._shape.past_anchor)
        ids = torch.cat([committed, fillers], 1)
        wanted = self._shape.past_anchor + 1
        return self.feed(ids.flatten(), 0, ids.shape[1], wanted).unflatten(0, (-1, wanted))

    def _committed(self) -> torch.Tensor:
        """The newest committed tokens, [R, catch_up] int64; the first one again where a request has fewer."""
        columns = self.positions(0, self._shape.catch_up)
        return self._context.token_table[self._context.slots.unsqueeze(1), columns]

    @abstractmethod
    def positions(self, offset: int, width: int) -> torch.Tensor:
        """Positions [R, width] int64 from `offset` past the round's first one; none below 0."""

    @abstractmethod
    def feed(self, token_ids: torch.Tensor, offset: int, width: int, wanted: int = 1) -> torch.Tensor:
        """Run `width` tokens of each request, request after request, at `positions`; logits of the last `wanted` of
        each, [R * wanted, V]."""


class TorchRound(DraftRound):
    """On any device, through the plain decoder. Positions, slots and rotary entries are made once for all passes."""

    def __init__(self, context: ProposeContext, shape: RoundShape, decoder: Decoder) -> None:
        """The block table must have columns for every position; those without a block hold 0, the block nobody
        reads. Where a request has fewer tokens than the catch-up feeds, the surplus ones are written there too."""
        super().__init__(context, shape)
        self._decoder = decoder
        offsets = torch.arange(-shape.catch_up, shape.past_anchor, device=context.slots.device)
        places = context.num_tokens.unsqueeze(1) + offsets  # [R, catch_up + past_anchor]
        self._positions = places.clamp(min=0)
        size = decoder.block_size
        blocks = context.block_table.gather(1, self._positions // size)
        slots = torch.add(self._positions % size, blocks, alpha=size)
        self._slots = slots.masked_fill_(places < 0, 0)
        self._rows = decoder.rotary.rows(self._positions.flatten()).unflatten(0, self._positions.shape)

    def positions(self, offset: int, width: int) -> torch.Tensor:
        """See `DraftRound.positions`."""
        return self._positions[:, offset : offset + width]

    def feed(self, token_ids: torch.Tensor, offset: int, width: int, wanted: int = 1) -> torch.Tensor:
        """See `DraftRound.feed`."""
        columns = slice(offset, offset + width)
        # Copied: of a lone column `flatten` would make a view, and kernels take what they are given for contiguous.
        positions, slots = (part[:, columns].contiguous() for part in (self._positions, self._slots))
        longest = self._context.host.num_tokens - self._shape.catch_up + offset + width
        most = max(int(longest.max()), 1)
        group = QueryGroup(0, len(positions), 0, width, most, None, is_bound=self._context.static)
        attention = AttentionInputs(
            positions=positions.flatten(),
            slot_mapping=slots.flatten(),
            block_table=self._context.block_table,
            seq_len=positions[:, -1] + 1,
            groups=(group,),
        )
        hidden = self._decoder.forward(token_ids, DecoderInputs(attention, self._rows[:, columns].flatten(0, 1)))
        return self._decoder.logits(hidden.unflatten(0, (-1, width))[:, width - wanted :].flatten(0, 1))


class CpuRound(DraftRound):
    """On a CPU in float32, through compiled kernels that find slots and rotary entries themselves.

    Surplus tokens of a request shorter than the catch-up are its first token at position 0, written as it is anyway.
    """

    def __init__(self, context: ProposeContext, shape: RoundShape, steps: CpuDecoderSteps) -> None:
        super().__init__(context, shape)
        self._steps = steps
        self._block_table = context.host.block_table
        self._first = context.host.num_tokens - shape.catch_up

    def positions(self, offset: int, width: int) -> torch.Tensor:
        """See `DraftRound.positions`."""
        columns = self._first[:, None] + np.arange(offset, offset + width)
        return torch.from_numpy(np.maximum(columns, 0))

    def feed(self, token_ids: torch.Tensor, offset: int, width: int, wanted: int = 1) -> torch.Tensor:
        """See `DraftRound.feed`."""
        return self._steps.run(token_ids, self._first + offset, self._block_table, wanted)


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
    block_table = to_device(host_blocks, device)
    lengths = last - first
    host_owners = np.repeat(np.arange(len(lengths)), lengths)
    starts = np.cumsum(lengths) - lengths
    owners = to_device(host_owners, device)
    positions = to_device(np.arange(lengths.sum()) - (starts - first)[host_owners], device)
    attention = AttentionInputs(
        positions=positions,
        slot_mapping=block_table[owners, positions // block_size] * block_size + positions % block_size,
        block_table=block_table,
        seq_len=to_device(last, device),
        groups=plan_groups(lengths, last, host_blocks, block_size),
    )
    return DecoderInputs(attention, rotary.rows(positions)), owners
