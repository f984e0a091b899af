"""What a decode step must know of every request, on the device and by slot: it reads this, works, and writes it."""

from collections.abc import Sequence

import torch

from specflow.core.limits import EngineLimits
from specflow.core.request import Request
from specflow.engine.buffers import HostBuffer
from specflow.kernels.decode_columns import FLOATS, STATE
from specflow.samplers.filters import RowFilters

_UPLOADS = 4  # more than steps in flight: a staging row is free again when its turn comes


class DecodeState:
    """Columns by slot; the last one belongs to padded rows, whose limit of 0 keeps them idle."""

    def __init__(self, limits: EngineLimits, most_rows: int) -> None:
        """most_rows: of one step, padding included."""
        slots = limits.max_num_seqs + 1
        self._ints = HostBuffer((len(STATE), slots), limits.device)
        self._floats = HostBuffer((len(FLOATS), slots), limits.device, torch.float32)
        self._ints.host[STATE.index("num_tokens")] = 1  # nobody stands before position 0
        self._ints.upload(len(STATE))
        self.pad_slot = limits.pad_slot
        self.slots = torch.full((most_rows,), limits.pad_slot, dtype=torch.int64, device=limits.device)
        self._uploads = torch.full((_UPLOADS, most_rows), limits.pad_slot, dtype=torch.int64)
        if limits.device.type == "cuda":
            self._uploads = self._uploads.pin_memory()
        self._turn = 0

    def load(self, requests: Sequence[Request], token_limits: Sequence[int]) -> None:
        """Write what the host knows of these requests; waits for the device."""
        for request, limit in zip(requests, token_limits, strict=True):
            sampling = request.sampling
            self._ints.host[:, request.slot] = (
                request.num_tokens,
                request.num_drafts,
                request.steps,
                request.seed,
                limit,
                request.speculate,
                sampling.top_k,
            )
            self._floats.host[:, request.slot] = (sampling.temperature, sampling.top_p, sampling.min_p)
        self._ints.upload(len(STATE))
        self._floats.upload(len(FLOATS))

    def seat(self, slots: Sequence[int]) -> None:
        """Say which slot each row of the next steps is; the rows behind them are padding. Nothing waits."""
        self._turn = (self._turn + 1) % _UPLOADS
        row = self._uploads[self._turn]
        row.fill_(self.pad_slot)
        row[: len(slots)] = torch.tensor(slots)
        self.slots.copy_(row, non_blocking=True)

    @property
    def ints(self) -> torch.Tensor:
        """Columns by slot on the device, [columns, slots] int64."""
        return self._ints.device

    @property
    def floats(self) -> torch.Tensor:
        """The same for float32: temperature, top_p, min_p."""
        return self._floats.device

    def vacate(self) -> None:
        """Make every row padding, for a step that must touch no request."""
        self.slots.fill_(self.pad_slot)

    def rows(self, batch: int) -> "DecodeRows":
        """The first `batch` rows, gathered."""
        slots = self.slots[:batch]
        ints = self._ints.device[:, slots].unbind(0)
        rows = DecodeRows(slots, *ints, *self._floats.device[:, slots].unbind(0))
        rows.num_drafts = torch.where(rows.active, rows.num_drafts, 0)
        return rows

    def store(self, name: str, slots: torch.Tensor, values: torch.Tensor) -> None:
        """Write one column of a few slots, [B] each, on the device."""
        self._ints.device[STATE.index(name)][slots] = values


class DecodeRows:
    """The columns of B rows, [B] each: int64, the last three float32."""

    def __init__(
        self,
        slots: torch.Tensor,
        num_tokens: torch.Tensor,
        num_drafts: torch.Tensor,
        rounds: torch.Tensor,
        seeds: torch.Tensor,
        limits: torch.Tensor,
        speculates: torch.Tensor,
        top_k: torch.Tensor,
        temperature: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
    ) -> None:
        self.slots, self.num_tokens, self.rounds, self.seeds = slots, num_tokens, rounds, seeds
        self.limits, self.speculates, self.temperature = limits, speculates, temperature
        self.filters = RowFilters(top_k, top_p, min_p)
        self.num_drafts = num_drafts  # 0 where the request is at its limit

    @property
    def active(self) -> torch.Tensor:
        """Which requests are not at their limits, [B] bool."""
        return self.num_tokens < self.limits
