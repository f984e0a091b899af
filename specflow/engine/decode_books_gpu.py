"""The books of a decode step in three launches, by Triton."""

import torch

from specflow.core.draft import Draft, Verdict
from specflow.engine.decode_books import RESULTS, Committed, DecodeBooks, Opened
from specflow.engine.decode_state import DecodeRows
from specflow.kernels import decode_books_triton as kernels
from specflow.kernels.decode_columns import STATE
from specflow.kernels.launch_overlap import early_start
from specflow.kernels.pieces import int_pieces
from specflow.kernels.rejection.workspace import power_of_two
from specflow.kernels.triton_choice import device_of

_BLOCKS = 1024  # entries of a block table that a program copies at a time


class GpuDecodeBooks(DecodeBooks):
    """`DecodeBooks`, launch by launch. Rows of an opened step must be those that are committed and closed."""

    def open(self, batch: int, width: int) -> Opened:
        """See `DecodeBooks.open`."""
        state, tokens, blocks = self.state, self.buffers.tokens.device, self.buffers.blocks.device
        places, most_blocks = batch * (width + 1), blocks.shape[1]
        sizes = [len(STATE) * batch, 1, places, places, places, batch * width, batch * most_blocks, batch]
        parts = int_pieces(sizes, blocks.device)
        row_ints, self._turn_now, positions, slot_mapping, token_ids, draft_ids, block_table, seq_len = parts
        self._row_ints = row_ints.view(-1, batch)
        row_floats = torch.empty((state.floats.shape[0], batch), dtype=torch.float32, device=blocks.device)
        slots, early = state.slots[:batch], early_start(blocks.device)
        with device_of(blocks):
            kernels.open_kernel[(batch,)](
                slots, state.ints, state.floats, state.ints.shape[1], tokens, tokens.shape[1], blocks, most_blocks,
                self.limits.block_size, self._turn, RESULTS, row_ints, row_floats, self._turn_now, positions,
                slot_mapping, token_ids, draft_ids, block_table, seq_len, batch,
                WIDTH=width, PLACES=power_of_two(width + 1), BLOCKS=_BLOCKS, PIECES=-(-most_blocks // _BLOCKS),
                OVERLAP=bool(early), num_warps=4, **early,
            )  # fmt: skip
        table = block_table.view(batch, most_blocks)
        packed = self.pack(
            slots, width, token_ids=token_ids, positions=positions, slot_mapping=slot_mapping, block_table=table,
            seq_len=seq_len,
        )  # fmt: skip
        rows = DecodeRows(slots, *self._row_ints.unbind(0), *row_floats.unbind(0))
        return Opened(rows, packed, draft_ids.view(batch, width))

    def commit(self, rows: DecodeRows, verdict: Verdict) -> Committed:
        """See `DecodeBooks.commit`."""
        batch, width = len(rows.slots), verdict.token_ids.shape[1] - 1
        tokens, ints = self.buffers.tokens.device, self.state.ints
        self._committed = torch.empty((kernels.NUM_COMMITTED, batch), dtype=torch.int64, device=tokens.device)
        early = early_start(tokens.device)
        with device_of(tokens):
            kernels.commit_kernel[(batch,)](
                rows.slots, self._row_ints, batch, verdict.token_ids.contiguous(), verdict.num_emitted,
                verdict.num_accepted, tokens, tokens.shape[1], ints, ints.shape[1], self._committed,
                self.limits.num_speculative_tokens,
                WIDTH=width, PLACES=power_of_two(width + 1), OVERLAP=bool(early), num_warps=1, **early,
            )  # fmt: skip
        return Committed(*self._committed.unbind(0))

    def close(self, rows: DecodeRows, verdict: Verdict, done: Committed, draft: Draft | None) -> None:
        """See `DecodeBooks.close`."""
        batch, width = len(rows.slots), verdict.token_ids.shape[1] - 1
        tokens, ints, most = self.buffers.tokens.device, self.state.ints, width + 1
        ids = counts = done.emitted
        if draft is not None:
            ids, counts, most = draft.token_ids, draft.num_drafts, max(most, draft.token_ids.shape[1])
            ids = ids if ids.stride(1) == 1 else ids.contiguous()
        early = early_start(tokens.device)
        with device_of(tokens):
            kernels.close_kernel[(batch,)](
                rows.slots, self._row_ints, batch, self._committed, verdict.token_ids.contiguous(), ids, ids.stride(0),
                counts, tokens, tokens.shape[1], ints, ints.shape[1], self.limits.vocab_size, self._turn_now,
                self.results, *self.results.shape[1:],
                WIDTH=width, K=0 if draft is None else ids.shape[1], PLACES=power_of_two(most),
                HAS_DRAFTS=draft is not None, OVERLAP=bool(early), num_warps=1, **early,
            )  # fmt: skip
