"""Decode steps without the host in between: the device goes on to the next step while the host reads the last one.

Two steps are queued at most. When the host commits step n (stop rules, text, blocks), step n + 1 runs already; what it
finds for a request that ended in step n is thrown away. Whatever needs the outcome first (a prompt, somebody to admit,
blocks running out, options that only the host applies) takes the ordinary path, after all queued steps are committed.

A proposer that cannot be captured keeps the host in the loop: then only target pass and verification are one graph.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from rich.console import Console
from rich.progress import track

from specflow.backends.base import Backend
from specflow.core.batch import PackedBatch, TargetOutput
from specflow.core.draft import Verdict
from specflow.core.limits import EngineLimits
from specflow.core.request import Request, Status
from specflow.engine.border import Readback
from specflow.engine.buffers import StepBuffers
from specflow.engine.commit import StepResult, count_round, keep_tokens
from specflow.engine.decode_books import RESULTS
from specflow.engine.decode_state import DecodeState
from specflow.engine.decode_step import DecodeStep, Law, Variant, Verified
from specflow.engine.detokenizer import Detokenizer
from specflow.engine.graphs import Calls, Graphs, batch_buckets
from specflow.kernels.decode_columns import COUNTS
from specflow.proposers.base import HostView, Proposer
from specflow.samplers.base import Sampler
from specflow.samplers.processors import masks_or_penalises
from specflow.schedulers.base import ScheduledRequest, Scheduler, StepPlan
from specflow.targets.base import Target
from specflow.tracking.events import StepRecord

R = TypeVar("R")
_DEPTH = 2  # steps queued: the one that the host commits and the one that runs meanwhile


@dataclass(frozen=True)
class _Queued:
    """A step on its way."""

    requests: tuple[Request, ...]
    turn: int  # of its result
    begun: float


class DecodeLoop:
    """The decode steps of one engine. `run` is the loop; `takes` and `verify` serve steps with the host in between."""

    def __init__(
        self,
        target: Target,
        proposer: Proposer | None,
        sampler: Sampler,
        scheduler: Scheduler,
        backend: Backend,
        limits: EngineLimits,
        buffers: StepBuffers,
        detokenizers: Mapping[str, Detokenizer],
        incidents: Counter[str],
    ) -> None:
        self._proposer, self._sampler, self._scheduler, self._limits = proposer, sampler, scheduler, limits
        self._buffers, self._detokenizers, self._incidents = buffers, detokenizers, incidents
        self._buckets = batch_buckets(limits.max_num_seqs)
        self._state = DecodeState(limits, self._buckets[-1])
        self._step = DecodeStep(target, proposer, sampler, buffers, self._state, limits)
        self._readback = Readback(self._step.books.results)
        # Whole steps, and their first halves where the host has to stay in the loop.
        self._whole: Calls[Variant, None] | None = None
        self._halves: Calls[Variant, Verified] | None = None
        self._graphs = backend.decode == "graphs"
        plans = type(scheduler).plan_ahead is not Scheduler.plan_ahead
        drafts = proposer is None or (proposer.requirements().graph_safe and scheduler.plans_drafts_ahead)
        self._inside = plans and drafts  # whether drafting is part of a whole step, else such steps do not speculate
        if plans:
            self._whole = self._calls(self._step.run)
        if not self._inside:
            self._halves = self._calls(self._step.verify)
        self._queue: deque[_Queued] = deque()
        self._seated: tuple[int, ...] | None = None  # slots by row on the device; None: the host's books are newer
        self._turn = 0
        self._last_commit = 0.0
        self.num_steps = 0

    def _calls(self, step: Callable[[Variant], R]) -> Calls[Variant, R]:
        return Graphs(step, self._limits.device) if self._graphs else Calls(step)

    # -- the loop --------------------------------------------------------------------------------------------------
    def run(self) -> StepResult | None:
        """Queue steps as far ahead as may be and commit the oldest; None when the ordinary path has to go on."""
        while self._queue and not any(map(_alive, self._queue[0].requests)):
            self._queue.popleft()
        while self._whole is not None and len(self._queue) < _DEPTH:
            requests = self._next_batch()
            if not requests or not self._launch(requests):
                break
        if not self._queue:
            self._seated = None
            return None
        return self._commit(self._queue.popleft())

    def _next_batch(self) -> tuple[Request, ...]:
        """Requests of the next step; empty when it cannot be queued."""
        ahead = Counter(request.request_id for step in self._queue for request in step.requests)
        planned = self._scheduler.plan_ahead(ahead) or ()
        if not all(map(self._needs_no_host, planned)):
            return ()
        going: list[Request] = []
        for request in planned:
            limit = self._scheduler.token_limit(request)
            if limit is None:
                return ()
            if request.num_tokens + ahead[request.request_id] < limit:  # each step brings one token at least
                going.append(request)
        return tuple(going)

    def _needs_no_host(self, request: Request) -> bool:
        return request.sampling.logprobs is None and not masks_or_penalises(request)

    def _launch(self, requests: tuple[Request, ...]) -> bool:
        """Queue a step; False when the host has to stay in the loop, or when it cannot be captured."""
        begun = time.perf_counter()
        speculates = self._proposer is not None and any(request.speculate for request in requests)
        if speculates and not self._inside:
            return False
        variant = self._variant(requests, self._limits.num_speculative_tokens if speculates else 0, speculates)
        if self._whole is None or not self._prepared(self._whole, variant):
            return False
        if self._seated is None:
            self._load(requests)
            self._step.books.begin(self._turn)
        self._seat(requests)
        for request in requests:
            self._buffers.write_blocks(request)
        self._whole.run(variant)
        self._readback.send(self._turn)
        self._queue.append(_Queued(requests, self._turn, begun))
        self._turn = (self._turn + 1) % RESULTS
        return True

    def _variant(self, requests: Sequence[Request], width: int, drafts: bool) -> Variant:
        law: Law = "greedy"
        if any(request.sampling.has_filters for request in requests):
            law = "filtered"
        elif not all(request.sampling.greedy for request in requests):
            law = "sampled"
        return Variant(next(size for size in self._buckets if size >= len(requests)), width, law, drafts)

    def _load(self, requests: Sequence[Request]) -> None:
        # Without a limit of its own a request is never idle: the host asks after every step.
        most = self._limits.table_width
        self._state.load(requests, [self._scheduler.token_limit(request) or most for request in requests])
        self._seated = ()

    def _seat(self, requests: Sequence[Request]) -> None:
        slots = tuple(request.slot for request in requests)
        if slots != self._seated:
            self._state.seat(slots)
            self._seated = slots

    def _commit(self, step: _Queued) -> StepResult:
        """Account for a step's outcome. Requests that ended meanwhile are passed over."""
        result = self._readback.receive(step.turn)
        items: list[ScheduledRequest] = []
        outcome: list[tuple[Request, int]] = []
        rows = [row for row, request in enumerate(step.requests) if _alive(request)]
        for row in rows:
            request = step.requests[row]
            emitted, accepted, drafted, next_drafts, dropped = (int(count) for count in result[row, :COUNTS])
            item = ScheduledRequest(request, request.num_tokens - 1, 1 + drafted, drafted, samples=True)
            ids = result[row, COUNTS : COUNTS + emitted].tolist()
            detokenizer = self._detokenizers.get(request.request_id)
            outcome.append((request, keep_tokens(request, ids, self._limits, self._buffers, detokenizer)))
            count_round(item, accepted)
            self._scheduler.commit(item, emitted, accepted)
            request.num_drafts = next_drafts
            items.append(item)
            if dropped:
                assert self._proposer is not None
                self._incidents[f"{self._proposer.name} drafted ids outside the vocabulary"] += dropped
        accepted_counts = result[rows, 1]
        self._tell_proposer(items, accepted_counts)
        self.num_steps += 1
        return StepResult(self._record(step, items, accepted_counts, outcome), outcome)

    def _tell_proposer(self, items: Sequence[ScheduledRequest], accepted: np.ndarray) -> None:
        going = [
            place
            for place, item in enumerate(items)
            if item.request.speculate and item.request.finish_reason is None and self._proposer is not None
        ]
        if not going:
            return
        assert self._proposer is not None
        requests = [items[place].request for place in going]
        most = np.array([self._scheduler.max_drafts(request) for request in requests], dtype=np.int64)
        slots = np.array([request.slot for request in requests], dtype=np.int64)
        self._proposer.replayed(
            HostView(
                request_ids=[request.request_id for request in requests],
                num_tokens=np.array([request.num_tokens for request in requests], dtype=np.int64),
                prompt_len=np.array([request.prompt_len for request in requests], dtype=np.int64),
                chunk_start=np.array([items[place].start for place in going], dtype=np.int64),
                chunk_len=1 + accepted[going],
                wants_drafts=most > 0,
                max_drafts=most,
                token_table=self._buffers.tokens.host,
                slots=slots,
                block_table=self._buffers.blocks.host[slots],
            )
        )

    def _record(
        self,
        step: _Queued,
        items: Sequence[ScheduledRequest],
        accepted: np.ndarray,
        outcome: Sequence[tuple[Request, int]],
    ) -> StepRecord:
        now = time.perf_counter()
        seconds = now - max(step.begun, self._last_commit)
        self._last_commit = now
        drafted = [place for place, item in enumerate(items) if item.num_drafts]
        return StepRecord(
            index=0,  # the engine counts
            num_requests=len(items),
            num_tokens=sum(item.length for item in items),
            num_prompt_tokens=0,
            num_emitted=sum(count for _, count in outcome),
            drafted=tuple(items[place].num_drafts for place in drafted),
            accepted=tuple(int(accepted[place]) for place in drafted),
            target_seconds=0.0,
            sample_seconds=0.0,
            propose_seconds=0.0,
            total_seconds=seconds,
            undivided_seconds=seconds,
        )

    # -- with the host in between ----------------------------------------------------------------------------------
    def takes(self, plan: StepPlan) -> bool:
        """Whether target pass and verification of a planned step can be one graph."""
        if self._halves is None or any(
            not item.samples or item.start != item.request.num_tokens - 1 or not self._needs_no_host(item.request)
            for item in plan.scheduled
        ):
            return False
        return self._prepared(self._halves, self._half(plan))

    def verify(self, plan: StepPlan) -> tuple[PackedBatch, TargetOutput, Verdict]:
        """The first half of a step that `takes` has agreed to; rows in the order of the plan."""
        requests = [item.request for item in plan.scheduled]
        assert self._halves is not None
        self._load(requests)
        self._seat(requests)
        for request in requests:
            self._buffers.write_blocks(request)
        done = self._halves.run(self._half(plan))
        self._seated = None
        self.num_steps += 1
        real, verdict = len(requests), done.verdict
        return (
            done.batch,
            done.output,
            Verdict(verdict.token_ids[:real], verdict.num_emitted[:real], verdict.num_accepted[:real]),
        )

    def _half(self, plan: StepPlan) -> Variant:
        drafted = any(item.num_drafts for item in plan.scheduled)
        width = self._limits.num_speculative_tokens if drafted else 0
        return self._variant([item.request for item in plan.scheduled], width, drafts=False)

    # -- capture ---------------------------------------------------------------------------------------------------
    def variants(self) -> list[tuple[bool, Variant]]:
        """Steps that requests without filters ask for, and whether they are whole ones; the largest first, since
        smaller graphs find room in its memory."""
        most, kinds = self._limits.num_speculative_tokens, []  # whole, width, drafts
        if self._halves is not None:
            kinds += [(False, most, False), (False, 0, False)] if most else [(False, 0, False)]
        if self._whole is not None:
            kinds += [(True, most, True)] if most and self._inside else []
            kinds += [(True, 0, False)]
        laws: tuple[Law, ...] = ("greedy", "sampled")
        return [
            (whole, Variant(size, width, law, drafts))
            for size in reversed(self._buckets)
            for whole, width, drafts in kinds
            for law in laws
        ]

    @property
    def whole(self) -> bool:
        """Whether steps run as one piece, drafting included."""
        return self._whole is not None and self._inside

    def warm_up(self) -> None:
        """Capture what requests without filters ask for, with progress on a terminal."""
        console = Console(stderr=True)
        quiet = not console.is_terminal
        every, words = self.variants(), "capturing decode steps"
        for whole, variant in track(every, words, console=console, transient=True, disable=quiet):
            calls = self._whole if whole else self._halves
            # After a failure there may be other graphs, or none, and they are captured when they are needed.
            if calls is None or not self._prepared(calls, variant):
                return

    def _prepared(self, calls: Calls[Variant, Any], variant: Variant) -> bool:
        """Make a variant ready, on rows that are all padding; what cannot be captured is given up, by name."""
        if calls.ready(variant):
            return True
        self._readback.settle()  # the runs of a capture leave results of their own
        self._state.vacate()
        try:
            calls.prepare(variant)
        except Exception as error:  # of a model's or a proposer's own code, or CUDA's: whatever it is, steps still run
            self._give_up(variant, error)
            return False
        finally:
            self._step.books.begin(self._turn)
            if self._seated:
                self._state.seat(self._seated)
        return True

    def _give_up(self, variant: Variant, error: Exception) -> None:
        cause = str(error).strip().split("\n")[0] or type(error).__name__
        if variant.drafts:
            assert self._proposer is not None
            self._inside, self._halves = False, self._calls(self._step.verify)
            self._incidents[f"{self._proposer.name} was not captured and drafts outside of the graphs ({cause})"] += 1
        else:
            self._whole = self._halves = None
            self._incidents[f"decode steps were not captured and run operation by operation ({cause})"] += 1

    def describe(self) -> str:
        """How decode steps run."""
        if self._whole is None and self._halves is None:
            return "operation by operation"
        inside = "target, verification and drafting" if self._proposer else "target and sampling"
        ahead = "the host one step behind"
        if not self.whole:
            inside, ahead = "target and verification", "drafting in between"
        how = "CUDA graphs" if self._graphs else "run ahead without graphs"
        return f"{how} of {inside}, {ahead} ({self.num_steps} steps; batches padded to {_list(self._buckets)})"


def _alive(request: Request) -> bool:
    return request.finish_reason is None and request.status is Status.RUNNING


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
