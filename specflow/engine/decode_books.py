"""The books of a decode step: what it reads of the device's tables at its beginning, and writes there at its end.

Every shape follows from the number of rows and the width, nothing is read on the host, and all state is written in
place. Rows whose request has reached its limit, and padding, are idle: they stand at position 0, write to block 0 and
change nothing. This is plain torch; `decode_books_gpu` does the same in three launches.
"""

from dataclasses import dataclass

import numpy as np
import torch

from specflow.core.attention import AttentionInputs, QueryGroup
from specflow.core.batch import PackedBatch
from specflow.core.draft import Draft, Verdict
from specflow.core.limits import EngineLimits
from specflow.engine.buffers import StepBuffers
from specflow.engine.decode_state import DecodeRows, DecodeState
from specflow.kernels.decode_columns import COUNTS
from specflow.kernels.triton_choice import triton_available

RESULTS = 4  # results kept on the device: more than steps in flight


@dataclass(frozen=True)
class Opened:
    """A step's rows, what the target gets, and the drafts that it verifies."""

    rows: DecodeRows
    batch: PackedBatch
    draft_ids: torch.Tensor  # [B, width] int64, -1 where there is none


@dataclass(frozen=True)
class Committed:
    """Numbers of each row behind the verification, [B] int64 each."""

    emitted: torch.Tensor
    accepted: torch.Tensor
    num_tokens: torch.Tensor
    rounds: torch.Tensor
    max_drafts: torch.Tensor  # that could be verified next


class DecodeBooks:
    """The tables of one engine, and a ring of results that the host reads: [RESULTS, rows, COUNTS + K + 1] int64."""

    def __init__(self, buffers: StepBuffers, state: DecodeState, limits: EngineLimits) -> None:
        self.buffers, self.state, self.limits = buffers, state, limits
        columns = COUNTS + limits.num_speculative_tokens + 1
        self.results = torch.zeros((RESULTS, len(state.slots), columns), dtype=torch.int64, device=limits.device)
        self._turn = torch.zeros(1, dtype=torch.int64, device=limits.device)
        self._fixed: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def begin(self, turn: int) -> None:
        """The next step writes result number `turn`, the ones after it the following ones in a ring."""
        self._turn.fill_(turn)

    def open(self, batch: int, width: int) -> Opened:
        """One token and `width` drafts of each row, packed [B * (width + 1)]; changes nothing.

        Places without a draft repeat the first position and write to block 0.
        """
        rows = self.state.rows(batch)
        steps, size = self.constants(batch, width)[0], self.limits.block_size
        first = torch.where(rows.active, rows.num_tokens - 1, 0).unsqueeze(1)
        real = steps <= rows.num_drafts.unsqueeze(1)
        positions = torch.where(real, first + steps, first)
        block_table = self.buffers.blocks.device[rows.slots]
        places = positions % size
        slots = torch.add(places, block_table.gather(1, positions // size), alpha=size)
        token_ids = self.buffers.tokens.device[rows.slots.unsqueeze(1), positions]
        packed = self.pack(
            rows.slots,
            width,
            token_ids=token_ids.flatten(),
            positions=positions.flatten(),
            slot_mapping=torch.where(real & rows.active.unsqueeze(1), slots, places).flatten(),
            block_table=block_table,
            seq_len=first.squeeze(1) + rows.num_drafts + 1,
        )
        missing = steps[1:] > rows.num_drafts.unsqueeze(1)
        return Opened(rows, packed, token_ids[:, 1:].masked_fill(missing, -1))

    def commit(self, rows: DecodeRows, verdict: Verdict) -> Committed:
        """Store what a verification emitted."""
        emitted = torch.where(rows.active, verdict.num_emitted, 0)
        self.buffers.store_tokens(rows.slots, rows.num_tokens, verdict.token_ids, emitted)
        num_tokens, rounds = rows.num_tokens + emitted, rows.rounds + rows.active
        self.state.store("num_tokens", rows.slots, num_tokens)
        self.state.store("rounds", rows.slots, rounds)
        room = (rows.limits - 1 - num_tokens).clamp(0, self.limits.num_speculative_tokens) * rows.speculates
        return Committed(emitted, torch.where(rows.active, verdict.num_accepted, 0), num_tokens, rounds, room)

    def close(self, rows: DecodeRows, verdict: Verdict, done: Committed, draft: Draft | None) -> None:
        """Keep the drafts behind the committed tokens, if there were any to make, and write the result."""
        counts = dropped = torch.zeros_like(done.emitted)
        if draft is not None:
            counts, dropped = usable_drafts(draft, done.max_drafts, self.limits.vocab_size)
            self.buffers.store_tokens(rows.slots, done.num_tokens, draft.token_ids, counts)
            self.state.store("num_drafts", rows.slots, counts)
        columns = torch.stack([done.emitted, done.accepted, rows.num_drafts, counts, dropped], 1)
        result = torch.cat([columns, verdict.token_ids], 1)
        self.results[:, : len(result), : result.shape[1]].index_copy_(0, self._turn, result.unsqueeze(0))
        self._turn.add_(1).remainder_(RESULTS)

    def pack(
        self,
        slots: torch.Tensor,
        width: int,
        *,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        block_table: torch.Tensor,
        seq_len: torch.Tensor,
    ) -> PackedBatch:
        """What the target gets, of the parts that differ from step to step."""
        batch = len(slots)
        _, starts, every = self.constants(batch, width)
        attention = AttentionInputs(
            positions=positions,
            slot_mapping=slot_mapping,
            block_table=block_table,
            seq_len=seq_len,
            groups=(QueryGroup(0, batch, 0, width + 1, self.limits.max_model_len, None, is_bound=True),),
            query_start=starts,
        )
        return PackedBatch(
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            query_start=starts,
            logit_rows=every,
            attention=attention,
            query_len_host=np.full(batch, width + 1, dtype=np.int64),
        )

    def constants(self, batch: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """0 … width, the first packed token of each row [B+1], and all packed tokens; made once, outside any graph."""
        key = batch, width + 1
        if key not in self._fixed:
            device = self.limits.device
            starts = torch.arange(key[0] + 1, device=device) * key[1]
            self._fixed[key] = (
                torch.arange(key[1], device=device),
                starts,
                torch.arange(key[0] * key[1], device=device),
            )
        return self._fixed[key]


def usable_drafts(draft: Draft, max_drafts: torch.Tensor, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Drafts that may be verified and drafts dropped for their ids, both [B] int64; max_drafts [B] int64."""
    wanted = torch.minimum(draft.num_drafts, max_drafts)
    in_vocabulary = (draft.token_ids >= 0) & (draft.token_ids < vocab_size)
    counts = torch.minimum(wanted, in_vocabulary.to(torch.int64).cumprod(1).sum(1))
    return counts, wanted - counts


def decode_books(buffers: StepBuffers, state: DecodeState, limits: EngineLimits) -> DecodeBooks:
    """The books as the device keeps them fastest."""
    if limits.device.type == "cuda" and triton_available():
        from specflow.engine.decode_books_gpu import GpuDecodeBooks

        return GpuDecodeBooks(buffers, state, limits)
    return DecodeBooks(buffers, state, limits)
