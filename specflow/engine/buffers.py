"""Device state that outlives a step, and the one function that makes a step's tensors.

All sizes are fixed at the start and later writes are in place, so that a device graph can be captured over them.
"""

import numpy as np
import torch

from specflow.core.attention import AttentionInputs
from specflow.core.batch import PackedBatch
from specflow.core.draft import Draft
from specflow.core.limits import EngineLimits
from specflow.core.request import Request
from specflow.kernels.paged_attention import plan_groups
from specflow.schedulers.base import StepPlan


class HostBuffer:
    """A static device tensor with a host twin; on a CPU they are the same memory."""

    def __init__(self, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.int64) -> None:
        pinned = device.type == "cuda"
        self._staging = torch.zeros(shape, dtype=dtype, pin_memory=pinned)
        self.host: np.ndarray = self._staging.numpy()
        self.device = self._staging if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)
        self._same = self.device is self._staging

    def fill(self, values: np.ndarray) -> torch.Tensor:
        """Write values to the front of a one-dimensional buffer; returns that part on the device."""
        count = len(values)
        self.host[:count] = values
        return self.upload(count)

    def upload(self, count: int) -> torch.Tensor:
        """Copy the first `count` entries to the device; waits, since the host twin is written again within the step."""
        if not self._same:
            self.device[:count].copy_(self._staging[:count])
        return self.device[:count]

    def upload_row(self, row: int, wait: bool = True) -> None:
        """Copy one row of a two-dimensional buffer to the device; wait=False: later writes to it may arrive as well."""
        if not self._same:
            self.device[row].copy_(self._staging[row], non_blocking=not wait)


class StepBuffers:
    """Tables indexed by request slot, and the packed inputs of the current step."""

    def __init__(self, limits: EngineLimits, keeps_draft_logits: bool) -> None:
        self.limits = limits
        device, slots, drafts = limits.device, limits.max_num_seqs + 1, limits.num_speculative_tokens
        # Committed tokens of each slot, its drafts behind them; the last row belongs to padding.
        self.tokens = HostBuffer((slots, limits.table_width), device)
        self.blocks = HostBuffer((slots, limits.max_blocks_per_seq), device)
        self._num_blocks_written = np.zeros(slots, dtype=np.int64)
        self.draft_logits: torch.Tensor | None = None
        if keeps_draft_logits and drafts:
            shape = (slots, drafts, limits.vocab_size)
            self.draft_logits = torch.full(shape, float("-inf"), dtype=torch.float32, device=device)
        most = limits.max_num_batched_tokens
        self._positions, self._slot_mapping = HostBuffer((most,), device), HostBuffer((most,), device)
        self._owners, self._logit_rows = HostBuffer((most,), device), HostBuffer((most,), device)
        self._slots, self._seq_len = HostBuffer((slots,), device), HostBuffer((slots,), device)
        self._query_start = HostBuffer((slots + 1,), device)
        self._named: dict[str, HostBuffer] = {}

    def enter(self, request: Request) -> None:
        """A request got its slot: write its committed tokens there and forget the last owner's blocks."""
        row = self.tokens.host[request.slot]
        row[: request.prompt_len] = request.prompt_ids
        row[request.prompt_len : request.num_tokens] = request.output_ids
        self.tokens.upload_row(request.slot)
        self.blocks.host[request.slot] = 0
        self._num_blocks_written[request.slot] = 0

    def pack(self, plan: StepPlan) -> PackedBatch:
        """Make all device tensors of a step from the scheduler's integers."""
        items = plan.scheduled
        lengths = np.array([item.length for item in items], dtype=np.int64)
        starts = np.array([item.start for item in items], dtype=np.int64)
        slots = np.array([item.request.slot for item in items], dtype=np.int64)
        for item in items:
            self.write_blocks(item.request)
        ends = np.cumsum(lengths)
        owners = np.repeat(np.arange(len(items)), lengths)
        positions = np.arange(ends[-1]) - np.repeat(ends - lengths - starts, lengths)
        block_table = self.blocks.host[slots]
        size = self.limits.block_size
        mapping = block_table[owners, positions // size] * size + positions % size
        rows = [
            np.arange(end - item.num_drafts - 1, end) for item, end in zip(items, ends, strict=True) if item.samples
        ]
        device_slots = self._slots.fill(slots)
        device_positions = self._positions.fill(positions)
        seq_len = starts + lengths
        query_start = self._query_start.fill(np.concatenate([[0], ends]))
        attention = AttentionInputs(
            positions=device_positions,
            slot_mapping=self._slot_mapping.fill(mapping),
            block_table=self.blocks.device[device_slots],
            seq_len=self._seq_len.fill(seq_len),
            groups=plan_groups(lengths, seq_len, block_table, size),
            query_start=query_start,
        )
        return PackedBatch(
            token_ids=self.tokens.device[device_slots[self._owners.fill(owners)], device_positions],
            positions=device_positions,
            slots=device_slots,
            query_start=query_start,
            logit_rows=self._logit_rows.fill(np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64)),
            attention=attention,
            query_len_host=lengths,
        )

    def write_blocks(self, request: Request) -> None:
        """Bring the block table up to date with what the scheduler gave the request; nothing waits.

        Blocks are only ever added while a request has its slot, so it does no harm if a copy on its way takes along
        what is added meanwhile.
        """
        known = self._num_blocks_written[request.slot]
        if known < len(request.blocks):
            self.blocks.host[request.slot, known : len(request.blocks)] = request.blocks[known:]
            self._num_blocks_written[request.slot] = len(request.blocks)
            self.blocks.upload_row(request.slot, wait=False)

    def ints(self, name: str, values: np.ndarray) -> torch.Tensor:
        """A small per-request device array ([B] or [B+1] int64) with a buffer of its own.

        A name is used once per step: what a component was handed stays as it is until the next step.
        """
        return self._small(name, values, torch.int64)

    def floats(self, name: str, values: np.ndarray) -> torch.Tensor:
        """The same for float32 values."""
        return self._small(name, values, torch.float32)

    def _small(self, name: str, values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        if name not in self._named:
            self._named[name] = HostBuffer((self.limits.max_num_seqs + 2,), self.limits.device, dtype)
        return self._named[name].fill(values)

    def store_tokens(self, slots: torch.Tensor, first: torch.Tensor, ids: torch.Tensor, count: torch.Tensor) -> None:
        """Write the first count[b] of ids [B, J] to columns first[b] … of the token table, on the device.

        Serves committed tokens and drafts alike. Entries past the count go to the padding row.
        """
        steps = torch.arange(ids.shape[1], device=ids.device)
        valid = steps < count.unsqueeze(1)
        rows = torch.where(valid, slots.unsqueeze(1), self.limits.pad_slot)
        columns = torch.where(valid, first.unsqueeze(1) + steps, 0)
        self.tokens.device[rows, columns] = torch.where(valid, ids, 0)

    def store_draft_logits(self, slots: torch.Tensor, draft: Draft) -> None:
        """Keep the law the drafts were sampled from until they are verified."""
        if self.draft_logits is not None and draft.logits is not None:
            self.draft_logits[slots] = draft.logits
