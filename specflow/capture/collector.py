"""Collecting hidden states while an engine runs, without changing it.

The target and the scheduler that the engine gets are wrapped: the first adds taps and keeps what a pass returned, the
second says which request the packed rows belong to and, at commit, how many of them stay. So every position is kept
once, whatever the chunks, the batch, speculation or pre-emption.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from specflow.capture.checks import CaptureError
from specflow.core.batch import PackedBatch, TargetOutput
from specflow.core.layer_numbers import check_layers
from specflow.core.limits import EngineLimits
from specflow.core.request import Request
from specflow.schedulers.base import ScheduledRequest, Scheduler, StepPlan
from specflow.targets.base import Taps, Target, TokenTables

if TYPE_CHECKING:
    from specflow.backends.base import Backend

__all__ = ["Captured", "CapturingScheduler", "CapturingTarget", "Collector"]


@dataclass(frozen=True)
class Captured:
    """The hidden states of one finished request, on the host."""

    request_id: str
    prompt_ids: tuple[int, ...]
    first_position: int  # of row 0 in the request: 0, or the length of the prompt
    token_ids: torch.Tensor  # [T] int64
    hidden_states: torch.Tensor  # [T, L, E], the model's dtype
    last_hidden: torch.Tensor | None = None  # [T, E] after the final norm, where training needs it


class _Rows:
    """A growing host buffer [capacity, L, E] of which the first `count` rows are filled."""

    def __init__(self, first: int) -> None:
        self.first = first  # position of row 0
        self.count = 0
        self._buffer = torch.empty(0)

    @property
    def end(self) -> int:
        """First position that is not there yet."""
        return self.first + self.count

    def append(self, states: torch.Tensor, most: int) -> None:
        """Copy states [n, L, E] behind what is there; `most` rows will be the end of it."""
        needed = self.count + len(states)
        if needed > len(self._buffer):
            capacity = min(max(2 * needed, 64), max(most, needed))
            grown = torch.empty((capacity, *states.shape[1:]), dtype=states.dtype)
            grown[: self.count] = self._buffer[: self.count] if self.count else grown[:0]
            self._buffer = grown
        self._buffer[self.count : needed].copy_(states)
        self.count = needed

    def filled(self, layers: int, hidden_size: int, dtype: torch.dtype) -> torch.Tensor:
        """Everything so far, [count, L, E]."""
        return self._buffer[: self.count] if self.count else torch.empty((0, layers, hidden_size), dtype=dtype)


class Collector:
    """Hidden states of all running requests."""

    def __init__(self, layers: Sequence[int], prompt_tokens: bool, generated_tokens: bool) -> None:
        self.layers = tuple(layers)
        self._prompt, self._generated = prompt_tokens, generated_tokens
        self._rows: dict[str, _Rows] = {}
        self._packed_start: dict[str, int] = {}  # of this step: first packed row of each request
        self._output: TargetOutput | None = None
        self._stacked: torch.Tensor | None = None  # [T, L, E] of this step, made when first wanted

    # -- called by the wrapped parts ---------------------------------------------------------------------------------
    def planned(self, plan: StepPlan) -> None:
        """A step begins; the packed batch follows the order of the plan."""
        self._output = self._stacked = None
        self._packed_start.clear()
        start = 0
        for item in plan.scheduled:
            self._packed_start[item.request.request_id] = start
            start += item.length

    def passed(self, output: TargetOutput) -> None:
        """The target's pass is done."""
        self._output = output

    def committed(self, item: ScheduledRequest, num_accepted: int) -> None:
        """Keep the rows of a request that are new, wanted and not rolled back."""
        request = item.request
        rows = self._rows.setdefault(request.request_id, _Rows(0 if self._prompt else request.prompt_len))
        kept = item.start + item.length - item.num_drafts + num_accepted
        # The newest token is never processed; of an accepted run that a stop rule cut, the rest is not wanted either.
        end = min(kept, request.num_tokens - 1, self._last_position(request))
        if end <= rows.end:
            return
        if item.start > rows.end:
            raise CaptureError(f"request {request.request_id!r}: positions {rows.end} to {item.start} never ran.")
        offset = self._packed_start[request.request_id] - item.start
        rows.append(self._states()[offset + rows.end : offset + end], self._last_position(request) - rows.first)

    def _last_position(self, request: Request) -> int:
        """Positions from here on are not wanted."""
        return request.prompt_len + (request.sampling.max_tokens - 1 if self._generated else 0)

    def _states(self) -> torch.Tensor:
        """All layers of this step side by side, [T, L, E]."""
        if self._stacked is None:
            assert self._output is not None, "a step was committed that no pass came before"
            with torch.inference_mode():
                self._stacked = torch.stack([self._output.hidden[layer] for layer in self.layers], dim=1)
        return self._stacked

    # -- called by the owner -----------------------------------------------------------------------------------------
    def take(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        hidden_size: int,
        dtype: torch.dtype,
    ) -> Captured:
        """The states of a request that has ended. Raises `CaptureError` unless every wanted position is there."""
        rows = self._rows.pop(request_id, _Rows(0 if self._prompt else len(prompt_ids)))
        end = len(prompt_ids) + (max(0, len(output_ids) - 1) if self._generated else 0)
        if rows.end != end:
            raise CaptureError(
                f"request {request_id!r}: hidden states of positions {rows.first} to {end - 1} were asked for, but "
                f"{rows.count} were captured. Please report this with the command you ran."
            )
        ids = torch.tensor([*prompt_ids, *output_ids][rows.first : end], dtype=torch.int64)
        states = rows.filled(len(self.layers), hidden_size, dtype)
        return Captured(request_id, tuple(prompt_ids), rows.first, ids, states)

    def drop(self, request_id: str) -> None:
        """Forget a request that was aborted."""
        self._rows.pop(request_id, None)


class CapturingTarget(Target):
    """A target with more taps than the engine asks for; everything else is the inner target's."""

    def __init__(self, inner: Target, collector: Collector) -> None:
        self._inner, self._collector = inner, collector
        self._asked: tuple[int, ...] = ()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def load(self, backend: "Backend") -> None:
        """See `Target.load`. Refuses layers that the target does not have."""
        self._inner.load(backend)
        check_layers(self._collector.layers, self._inner.facts.num_layers, "task.layers")

    def attach(self, limits: EngineLimits, taps: Taps) -> None:
        """See `Target.attach`."""
        self._asked = taps.layers
        layers = tuple(dict.fromkeys([*taps.layers, *self._collector.layers]))
        self._inner.attach(limits, Taps(layers=layers, last_hidden=taps.last_hidden))

    def forward(self, batch: PackedBatch) -> TargetOutput:
        """See `Target.forward`; the engine sees the taps it asked for."""
        output = self._inner.forward(batch)
        self._collector.passed(output)
        return TargetOutput(output.logits, {layer: output.hidden[layer] for layer in self._asked}, output.last_hidden)

    def token_tables(self) -> TokenTables:
        """See `Target.token_tables`."""
        return self._inner.token_tables()

    def describe(self) -> dict[str, str]:
        """See `Target.describe`."""
        return self._inner.describe()


class CapturingScheduler(Scheduler):
    """A scheduler that tells the collector of every plan and every commit."""

    def __init__(self, inner: Scheduler, collector: Collector) -> None:
        self._inner, self._collector = inner, collector
        self.options = inner.options

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def configure(self, limits: EngineLimits) -> None:
        """See `Scheduler.configure`."""
        self._inner.configure(limits)

    def add(self, request: Request) -> None:
        """See `Scheduler.add`."""
        self._inner.add(request)

    def plan(self) -> StepPlan:
        """See `Scheduler.plan`."""
        plan = self._inner.plan()
        self._collector.planned(plan)
        return plan

    def commit(self, item: ScheduledRequest, num_emitted: int, num_accepted: int) -> None:
        """See `Scheduler.commit`."""
        self._collector.committed(item, num_accepted)
        self._inner.commit(item, num_emitted, num_accepted)

    def release(self, request: Request) -> None:
        """See `Scheduler.release`."""
        self._inner.release(request)

    @property
    def has_work(self) -> bool:
        """See `Scheduler.has_work`."""
        return self._inner.has_work

    def max_drafts(self, request: Request) -> int:
        """See `Scheduler.max_drafts`."""
        return self._inner.max_drafts(request)

    def check_idle(self) -> Sequence[str]:
        """See `Scheduler.check_idle`."""
        return self._inner.check_idle()

    def describe(self) -> dict[str, str]:
        """See `Scheduler.describe`."""
        return self._inner.describe()
