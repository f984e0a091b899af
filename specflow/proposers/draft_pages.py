"""A draft model's own keys and values under the target's block numbers, kept in step with the committed tokens."""

import numpy as np

from specflow.checkpoints.decoder import DecoderWeights
from specflow.core.limits import EngineLimits
from specflow.core.upload import to_device
from specflow.proposers.base import HostView, ProposeContext
from specflow.proposers.cpu_decoder_steps import CpuDecoderSteps
from specflow.proposers.decoder import Decoder
from specflow.proposers.draft_round import CpuRound, DraftRound, RoundShape, TorchRound, chunk_inputs
from specflow.proposers.some_requests import drafts_wanted


class DraftPages:
    """The decoder with its pages, and the books on which positions of them are right.

    Rejected drafts are simply overwritten: every round begins by feeding the newest committed tokens again, as many as
    `RoundShape.catch_up`. What lies before those and is not right yet is fed by `follow`.
    """

    def __init__(self, weights: DecoderWeights, limits: EngineLimits, shape: RoundShape) -> None:
        """Allocate pages and the rotary table; on a CPU in float32 compile the fused steps."""
        self.decoder = Decoder(
            weights,
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            num_positions=limits.table_width,
            kernels=limits.paged_kernels,
        )
        fused = CpuDecoderSteps.serves(self.decoder)
        self.steps = CpuDecoderSteps(self.decoder, limits.table_width) if fused else None
        self._shape = shape
        # Committed positions of each slot whose keys and values are right, drafts counted as if accepted.
        self._covered = np.zeros(limits.max_num_seqs + 1, dtype=np.int64)

    def forget(self, slot: int) -> None:
        """Nothing of the slot's last owner counts any more."""
        self._covered[slot] = 0

    def follow(self, context: ProposeContext) -> None:
        """Feed the committed tokens that a round's catch-up does not reach: prompts, resumed requests and rounds
        without drafts. Requests that want drafts must then get their round.

        Nothing in a static context: the round before reaches as far as its catch-up, see `replayed`."""
        if context.static:
            return
        host = context.host
        ends = np.where(host.wants_drafts, host.num_tokens - self._shape.catch_up, host.chunk_start + host.chunk_len)
        covered = np.minimum(self._covered[host.slots], host.num_tokens - 1)
        rows = np.flatnonzero(covered < ends)
        if len(rows):
            picked = to_device(rows, context.slots.device)
            decoder = self.decoder
            inputs, owners = chunk_inputs(
                covered[rows], ends[rows], host.block_table[rows], decoder.rotary, decoder.block_size, picked.device
            )
            ids = context.token_table[context.slots[picked][owners], inputs.attention.positions]
            decoder.forward(ids, inputs)
        # A method that drafts one by one stops at what is wanted, and feeds all drafts but the last.
        fed = drafts_wanted(host, self._shape.past_anchor + 1) - 1
        drafted = host.num_tokens + min(self._shape.kept, fed)
        self._covered[host.slots] = np.where(host.wants_drafts, drafted, np.maximum(covered, ends))

    def replayed(self, host: HostView) -> None:
        """A round has run in a static context. It began where a round, or the prompt, had ended."""
        self._covered[host.slots] = host.num_tokens + self._shape.kept

    def round(self, context: ProposeContext) -> DraftRound:
        """The passes of one round over the requests of a context."""
        if self.steps is not None and not context.static:
            return CpuRound(context, self._shape, self.steps)
        return TorchRound(context, self._shape, self.decoder)
