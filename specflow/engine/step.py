"""One step of the engine: plan, target pass, verification, commit, drafting.

Whoever reads `StepRunner.run` knows the program; the methods under it are its five parts in order.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ParamSpec, TypeVar

import numpy as np
import torch

from specflow.backends.base import Backend
from specflow.core.batch import PackedBatch, TargetOutput
from specflow.core.draft import Verdict, VerifyInputs
from specflow.core.limits import EngineLimits
from specflow.core.request import Request
from specflow.engine.border import read_counts, read_verdict
from specflow.engine.buffers import StepBuffers
from specflow.engine.commit import StepResult, count_round, keep_tokens
from specflow.engine.decode_books import usable_drafts
from specflow.engine.decode_loop import DecodeLoop
from specflow.engine.detokenizer import Detokenizer
from specflow.engine.logprobs import append_logprobs
from specflow.engine.timing import PhaseClock
from specflow.errors import ProposerError, SpecflowError
from specflow.kernels.noise import fresh_seeds
from specflow.proposers.base import Features, HostView, ProposeContext, Proposer
from specflow.samplers.base import Sampler
from specflow.samplers.filters import RowFilters
from specflow.samplers.processors import RequestRows, needs_processing, process_logits
from specflow.schedulers.base import ScheduledRequest, Scheduler, StepPlan
from specflow.targets.base import Target
from specflow.tracking.events import StepRecord

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Outcome:
    """A verified step on the host: per scheduled request how much of it is kept."""

    kept_rows: np.ndarray  # [B] int64: processed positions that stay: the chunk, or anchor plus accepted drafts
    emitted: list[tuple[Request, int]]
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]


class StepRunner:
    """Runs steps over the components; owns the static buffers and nothing of any request."""

    def __init__(
        self,
        target: Target,
        proposer: Proposer | None,
        sampler: Sampler,
        scheduler: Scheduler,
        backend: Backend,
        limits: EngineLimits,
    ) -> None:
        self._target, self._proposer, self._sampler = target, proposer, sampler
        self._scheduler, self._backend, self._limits = scheduler, backend, limits
        self._requirements = proposer.requirements() if proposer else None
        wanted = self._requirements is not None and self._requirements.draft_logits
        keeps_logits = wanted and sampler.needs_draft_logits
        self.buffers = StepBuffers(limits, keeps_logits)
        sampler.warm_up(limits, draft_laws=self.buffers.draft_logits is not None)
        self.detokenizers: dict[str, Detokenizer] = {}  # of requests whose text is needed while they run
        self.incidents: Counter[str] = Counter()  # things that went wrong without changing the output
        self._steps = 0
        self.loop: DecodeLoop | None = None  # decode steps on the device, the host a step behind
        if backend.decode != "eager":
            parts = target, proposer, sampler, scheduler, backend, limits
            self.loop = DecodeLoop(*parts, self.buffers, self.detokenizers, self.incidents)

    @torch.inference_mode()
    def run(self) -> StepResult | None:
        """Run one step; None when nothing could be scheduled."""
        result = self.loop.run() if self.loop is not None else None
        result = result or self._run_one()
        if result is not None:
            self._steps += 1
            result.record = replace(result.record, index=self._steps)
            self._scheduler.observe(result.record)
        return result

    def _run_one(self) -> StepResult | None:
        """A step of any kind from beginning to end."""
        clock = PhaseClock(self._backend)
        plan = self._scheduler.plan()
        self._change_slots(plan)
        if not plan.scheduled:
            return None
        sampling = [item for item in plan.scheduled if item.samples]
        verdict: Verdict | None = None
        if self.loop is not None and self.loop.takes(plan):
            clock.mark("other")
            batch, output, verdict = self.loop.verify(plan)
            clock.mark("target")
        else:
            batch = self.buffers.pack(plan)
            clock.mark("other")
            output = self._target.forward(batch)
            clock.mark("target")
            if sampling:
                verdict = self._verify(sampling, output)
        outcome = self._commit(plan, sampling, verdict, output)
        clock.mark("sample")
        self._propose(plan, batch, output, outcome)
        clock.mark("propose")
        return StepResult(_record(plan, outcome, clock), outcome.emitted)

    @contextmanager
    def tolerant(self, incident: str) -> Iterator[None]:
        """Count what is raised inside as an incident: for clean-up, which must reach every request."""
        try:
            yield
        except Exception:
            self.incidents[incident] += 1

    def _change_slots(self, plan: StepPlan) -> None:
        """Follow the scheduler: requests that lost or got a slot."""
        for request, slot in plan.preempted:
            self.leave(request, slot)
        for request in plan.admitted:
            self.buffers.enter(request)
            if self._proposer and request.speculate:
                self._guarded(self._proposer.start, request.request_id, request.slot, request.prompt_ids)

    def leave(self, request: Request, slot: int) -> None:
        """Tell the proposer that a request has left this slot (-1: it had none)."""
        if self._proposer and request.speculate and slot >= 0:
            self._guarded(self._proposer.finish, request.request_id, slot, request.token_ids)

    def _verify(self, items: Sequence[ScheduledRequest], output: TargetOutput) -> Verdict:
        """Process the logits and let the sampler accept or replace drafts; B = len(items)."""
        requests = [item.request for item in items]
        drafts = np.array([item.num_drafts for item in items], dtype=np.int64)
        logits = output.logits
        raw = self._sampler.applies_temperature
        if any(needs_processing(request, temperature=not raw) for request in requests):
            first = np.concatenate([[0], np.cumsum(drafts + 1)])
            rows = [
                RequestRows(item.request, int(first[index]), item.num_drafts + 1) for index, item in enumerate(items)
            ]
            logits = process_logits(logits.to(torch.float32, copy=True), rows, self.buffers.tokens.device)
            raw = False
        return self._sampler.verify(logits, self._verify_inputs(requests, drafts, scaled=not raw))

    def _verify_inputs(self, requests: Sequence[Request], drafts: np.ndarray, scaled: bool) -> VerifyInputs:
        buffers = self.buffers
        slots = buffers.ints("verify.slots", _array([request.slot for request in requests]))
        num_drafts = buffers.ints("verify.num_drafts", drafts)
        positions = buffers.ints("verify.positions", _array([request.num_tokens for request in requests]))
        width = self._limits.num_speculative_tokens if drafts.any() else 0
        steps = torch.arange(width, device=slots.device)
        ids = buffers.tokens.device[slots.unsqueeze(1), positions.unsqueeze(1) + steps]
        laws = buffers.draft_logits if width else None
        in_place = laws is not None and self._sampler.reads_draft_slots
        return VerifyInputs(
            cu_rows=buffers.ints("verify.cu_rows", np.concatenate([[0], np.cumsum(drafts + 1)])),
            draft_ids=ids.masked_fill(steps >= num_drafts.unsqueeze(1), -1),
            num_drafts=num_drafts,
            positions=positions,
            temperature=buffers.floats(
                "verify.temperature", np.array([request.sampling.temperature for request in requests])
            ),
            seeds=buffers.ints("verify.seeds", _array([request.seed for request in requests])),
            rounds=buffers.ints("verify.rounds", _array([request.steps for request in requests])),
            draft_logits=laws if in_place or laws is None else laws[slots],
            draft_slots=slots if in_place else None,
            all_greedy=all(request.sampling.greedy for request in requests),
            scaled=scaled,
        )

    def _commit(
        self,
        plan: StepPlan,
        sampling: Sequence[ScheduledRequest],
        verdict: Verdict | None,
        output: TargetOutput,
    ) -> Outcome:
        """Write emitted tokens to the token table and to the requests, stop rules applied; roll back the rest."""
        kept = np.array([item.length for item in plan.scheduled], dtype=np.int64)
        emitted: list[tuple[Request, int]] = []
        drafted: list[int] = []
        accepted: list[int] = []
        if verdict is None:
            for item in plan.scheduled:
                self._scheduler.commit(item, 0, 0)
            return Outcome(kept, emitted, (), ())
        self._store_verdict(sampling, verdict)
        tokens, num_emitted, num_accepted = read_verdict(verdict)
        row = index = 0
        for place, item in enumerate(plan.scheduled):
            if not item.samples:
                self._scheduler.commit(item, 0, 0)
                continue
            ids = tokens[index, : num_emitted[index]].tolist()
            emitted.append((item.request, self._append(item, ids, output.logits[row:])))
            if item.num_drafts:
                drafted.append(item.num_drafts)
                accepted.append(int(num_accepted[index]))
                count_round(item, accepted[-1])
            kept[place] = item.length - item.num_drafts + num_accepted[index]
            self._scheduler.commit(item, len(ids), int(num_accepted[index]))
            row += item.num_drafts + 1
            index += 1
        return Outcome(kept, emitted, tuple(drafted), tuple(accepted))

    def _store_verdict(self, sampling: Sequence[ScheduledRequest], verdict: Verdict) -> None:
        slots = self.buffers.ints("commit.slots", _array([item.request.slot for item in sampling]))
        first = self.buffers.ints("commit.first", _array([item.request.num_tokens for item in sampling]))
        self.buffers.store_tokens(slots, first, verdict.token_ids, verdict.num_emitted)

    def _append(self, item: ScheduledRequest, ids: list[int], raw_logits: torch.Tensor) -> int:
        """Append a request's emitted ids up to a stop; returns how many were kept."""
        request = item.request
        count = keep_tokens(request, ids, self._limits, self.buffers, self.detokenizers.get(request.request_id))
        append_logprobs(request, raw_logits, ids[:count])
        return count

    def _propose(self, plan: StepPlan, batch: PackedBatch, output: TargetOutput, outcome: Outcome) -> None:
        """Ask the proposer about the requests that go on, and keep the drafts for the next step."""
        if self._proposer is None:
            return
        alive = [
            index
            for index, item in enumerate(plan.scheduled)
            if item.request.speculate and item.request.finish_reason is None
        ]
        if not alive:
            return
        context = self._context(plan, alive, batch, output, outcome)
        draft = self._guarded(self._proposer.propose, context)
        counts, dropped = usable_drafts(draft, context.max_drafts, self._limits.vocab_size)
        self.buffers.store_tokens(context.slots, context.num_tokens, draft.token_ids, counts)
        self.buffers.store_draft_logits(context.slots, draft)
        num_drafts, num_dropped = read_counts(counts, dropped)
        for index, count in zip(alive, num_drafts.tolist(), strict=True):
            plan.scheduled[index].request.num_drafts = count
        if num_dropped.any():
            self.incidents[f"{self._proposer.name} drafted ids outside the vocabulary"] += int(num_dropped.sum())

    def _context(
        self, plan: StepPlan, alive: list[int], batch: PackedBatch, output: TargetOutput, outcome: Outcome
    ) -> ProposeContext:
        items = [plan.scheduled[index] for index in alive]
        requests = [item.request for item in items]
        samples = np.array([item.samples for item in items])
        most = _array([self._scheduler.max_drafts(request) for request in requests]) * samples
        slots = _array([request.slot for request in requests])
        host = HostView(
            request_ids=[request.request_id for request in requests],
            num_tokens=_array([request.num_tokens for request in requests]),
            prompt_len=_array([request.prompt_len for request in requests]),
            chunk_start=_array([item.start for item in items]),
            chunk_len=outcome.kept_rows[alive],
            wants_drafts=samples & (most > 0),
            max_drafts=most,
            token_table=self.buffers.tokens.host,
            slots=slots,
            block_table=self.buffers.blocks.host[slots],
        )
        device_slots = self.buffers.ints("propose.slots", slots)
        return ProposeContext(
            slots=device_slots,
            num_tokens=self.buffers.ints("propose.num_tokens", host.num_tokens),
            max_drafts=self.buffers.ints("propose.max_drafts", most),
            token_table=self.buffers.tokens.device,
            block_table=self.buffers.blocks.device[device_slots],
            temperature=self.buffers.floats(
                "propose.temperature", np.array([request.sampling.temperature for request in requests])
            ),
            seeds=self._draft_seeds(requests),
            all_greedy=all(request.sampling.greedy for request in requests),
            features=self._features(alive, host, batch, output),
            host=host,
            noise_domain=self._sampler.draft_domain,
            keep_law=self.buffers.draft_logits is not None,
            filters=self._draft_filters(requests),
        )

    def _draft_filters(self, requests: Sequence[Request]) -> RowFilters | None:
        sampling = [request.sampling for request in requests]
        if not any(one.has_filters for one in sampling):
            return None
        return RowFilters(
            top_k=self.buffers.ints("propose.top_k", _array([one.top_k for one in sampling])),
            top_p=self.buffers.floats("propose.top_p", np.array([one.top_p for one in sampling])),
            min_p=self.buffers.floats("propose.min_p", np.array([one.min_p for one in sampling])),
        )

    def _draft_seeds(self, requests: Sequence[Request]) -> torch.Tensor:
        """Seeds the drafts are drawn with, [B] int64: the requests' own, or others for every verification step."""
        seeds = self.buffers.ints("propose.seeds", _array([request.seed for request in requests]))
        if not self._sampler.fresh_draft_noise:
            return seeds
        return fresh_seeds(seeds, self.buffers.ints("propose.rounds", _array([request.steps for request in requests])))

    def _features(self, alive: list[int], host: HostView, batch: PackedBatch, output: TargetOutput) -> Features | None:
        if not output.hidden and output.last_hidden is None:
            return None
        start = (np.cumsum(batch.query_len_host) - batch.query_len_host)[alive]
        return Features(
            start=self.buffers.ints("features.start", start),
            num_valid=self.buffers.ints("features.num_valid", host.chunk_len),
            positions=batch.positions,
            hidden=output.hidden,
            last_hidden=output.last_hidden,
        )

    def _guarded(self, call: Callable[P, R], *arguments: P.args, **options: P.kwargs) -> R:
        """Call into the proposer; what it raises is reported under its name."""
        assert self._proposer is not None
        try:
            return call(*arguments, **options)
        except SpecflowError:
            raise
        except Exception as error:
            raise ProposerError(f"proposer {self._proposer.name!r} raised {type(error).__name__}: {error}") from error


def _array(values: Sequence[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def _record(plan: StepPlan, outcome: Outcome, clock: PhaseClock) -> StepRecord:
    prompt_tokens = sum(max(0, min(item.length, item.request.prompt_len - item.start)) for item in plan.scheduled)
    return StepRecord(
        index=0,  # `run` counts
        num_requests=len(plan.scheduled),
        num_tokens=plan.num_tokens,
        num_prompt_tokens=prompt_tokens,
        num_emitted=sum(count for _, count in outcome.emitted),
        drafted=outcome.drafted,
        accepted=outcome.accepted,
        target_seconds=clock.seconds["target"],
        sample_seconds=clock.seconds["sample"],
        propose_seconds=clock.seconds["propose"],
        total_seconds=clock.total,
    )
