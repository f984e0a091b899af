"""The engine: requests in, tokens out, with or without speculation.

engine = Engine.from_config({"proposer": {"name": "ngram"}})
outputs = engine.generate(["def fibonacci(n):"], SamplingParams(max_tokens=64))
for chunk in engine.stream(["import "], SamplingParams(max_tokens=64)): print(chunk.text, end="")
"""

import itertools
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from specflow.backends.base import Backend
from specflow.core.limits import EngineLimits
from specflow.core.request import FinishReason, Request, Status
from specflow.core.sampling_params import SamplingParams
from specflow.engine.buffers import StepBuffers
from specflow.engine.decode_loop import DecodeLoop
from specflow.engine.detokenizer import Detokenizer, detokenize
from specflow.engine.outputs import Chunk, RequestOutput
from specflow.engine.prompts import PromptLike, bad_word_ids, encode_prompt
from specflow.engine.sizing import fix_limits
from specflow.engine.step import StepRunner
from specflow.errors import PromptError
from specflow.proposers.base import Proposer
from specflow.samplers.base import Sampler
from specflow.schedulers.base import Scheduler
from specflow.targets.base import Taps, Target
from specflow.tracking.events import StepRecord

Samplings = SamplingParams | Sequence[SamplingParams]


class Engine:
    """Continuous batching over one target, with at most one proposer. Not thread-safe."""

    def __init__(
        self, target: Target, proposer: Proposer | None, sampler: Sampler, scheduler: Scheduler, backend: Backend
    ) -> None:
        """Load the weights, fix all sizes, attach the parts to each other. Everything is checked by then.

        The components come from their factories and have not loaded anything yet.
        """
        self.target, self.proposer, self.sampler = target, proposer, sampler
        self.scheduler, self.backend = scheduler, backend
        sampler.check_num_drafts(getattr(proposer, "num_speculative_tokens", 0))
        backend.setup()
        target.load(backend)
        if proposer:
            proposer.load(target, backend)
        self.limits: EngineLimits = fix_limits(scheduler.options, target.facts, proposer, backend)
        scheduler.configure(self.limits)
        sampler.configure(self.limits)
        target.attach(self.limits, proposer.requirements().taps if proposer else Taps())
        if proposer:
            proposer.attach(target, self.limits)
        self._runner = StepRunner(target, proposer, sampler, scheduler, backend, self.limits)
        self._calibrate()
        if self.loop is not None:
            self.loop.warm_up()  # last: a graph keeps whatever it is captured with
        self._requests: dict[str, Request] = {}
        self._numbers = itertools.count()

    def _calibrate(self) -> None:
        """Tell those who want to know what passes of the target cost."""
        drafts = self.proposer is not None and self.proposer.requirements().pass_costs
        if not drafts and not self.scheduler.wants_pass_costs:
            return
        from specflow.engine.verification_cost import measure_verification

        costs = measure_verification(self)
        if self.proposer is not None and drafts:
            self.proposer.calibrate(costs)
        if self.scheduler.wants_pass_costs:
            self.scheduler.calibrate(costs)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Engine":
        """Build from a composition: the same groups and keys as on the command line, missing groups at defaults."""
        from specflow.engine.build import build_engine

        return build_engine(config)

    def generate(
        self,
        prompts: Sequence[PromptLike],
        sampling: Samplings,
        *,
        speculate: bool = True,
        concurrency: int | None = None,
        arrivals: Sequence[float] | None = None,
        request_ids: Sequence[str] | None = None,
        on_chunk: Callable[[Chunk], None] | None = None,
        on_step: Callable[[StepRecord], None] | None = None,
        on_finish: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Run all prompts to their end; outputs stand in the order of the prompts.

        speculate=False decodes plainly with the same engine. concurrency limits the requests in flight; arrivals are
        seconds after the call at which each prompt comes in. Raises `PromptError` before anything runs.
        """
        requests = self._make_requests(prompts, sampling, speculate, request_ids)
        streams = self._open_streams(requests) if on_chunk is not None else {}
        outputs: dict[str, RequestOutput] = {}
        for record, finished, grown in self._drive(requests, concurrency, arrivals):
            if on_step is not None and record is not None:
                on_step(record)
            if on_chunk is not None:
                for chunk in self._chunks(streams, finished, grown):
                    on_chunk(chunk)
            for request in finished:
                outputs[request.request_id] = RequestOutput.of(request, time.perf_counter())
                if on_finish is not None:
                    on_finish(outputs[request.request_id])
        return [outputs[request.request_id] for request in requests]

    def stream(self, prompts: Sequence[PromptLike], sampling: Samplings, *, speculate: bool = True) -> Iterator[Chunk]:
        """Yield new tokens and text as they come; closing the iterator aborts what still runs."""
        requests = self._make_requests(prompts, sampling, speculate, None)
        streams = self._open_streams(requests)
        for _, finished, grown in self._drive(requests, None, None):
            yield from self._chunks(streams, finished, grown)

    def abort(self, request_id: str) -> None:
        """Stop one running or waiting request; its output so far is kept with finish reason `abort`."""
        request = self._requests.get(request_id)
        if request is not None and request.finish_reason is None:
            request.finish_reason = FinishReason.ABORT

    @property
    def buffers(self) -> StepBuffers:
        """The static buffers, for measurements while the engine is idle."""
        return self._runner.buffers

    @property
    def loop(self) -> DecodeLoop | None:
        """The decode steps that run on the device ahead of the host; None where the host runs every operation."""
        return self._runner.loop

    @property
    def incidents(self) -> Mapping[str, int]:
        """Things that went wrong without changing the output, with their counts; shown in the report."""
        return dict(self._runner.incidents)

    def describe(self) -> dict[str, dict[str, str]]:
        """What really ran, part by part."""
        parts: dict[str, Any] = {
            "target": self.target,
            "proposer": self.proposer,
            "sampler": self.sampler,
            "scheduler": self.scheduler,
            "backend": self.backend,
        }
        found = {name: dict(part.describe()) for name, part in parts.items() if part is not None}
        if self.proposer is not None:
            found["proposer"] = {"method": self.proposer.name, **found["proposer"]}
        if self.loop is not None:
            found["backend"] |= {"decode steps": self.loop.describe()}
        if self.incidents:
            found["incidents"] = {name: str(count) for name, count in self.incidents.items()}
        return found

    def _make_requests(
        self, prompts: Sequence[PromptLike], sampling: Samplings, speculate: bool, ids: Sequence[str] | None
    ) -> list[Request]:
        each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
        if len(each) != len(prompts):
            raise PromptError(
                f"{len(prompts)} prompts were given with {len(each)} sampling options: give one for all or one each."
            )
        names = list(ids) if ids is not None else [f"request-{next(self._numbers)}" for _ in prompts]
        return [
            self.make_request(name, prompt, options, speculate)
            for name, prompt, options in zip(names, prompts, each, strict=True)
        ]

    def make_request(self, name: str, prompt: PromptLike, sampling: SamplingParams, speculate: bool) -> Request:
        """A request with everything resolved (token ids, seed, stop and bad-word ids), not yet handed over."""
        facts, tokenizer = self.target.facts, self.target.tokenizer
        try:
            prompt_ids = encode_prompt(tokenizer, prompt, facts.vocab_size)
        except PromptError as error:
            raise PromptError(f"request {name!r}: {error}") from None
        stop_ids = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(facts.eos_token_ids))
        return Request(
            request_id=name,
            prompt_ids=prompt_ids,
            sampling=sampling,
            seed=sampling.seed if sampling.seed is not None else secrets.randbits(62),
            stop_ids=frozenset(token_id for token_id in stop_ids if token_id < facts.vocab_size),
            bad_word_ids=bad_word_ids(tokenizer, sampling.bad_words),
            speculate=speculate and self.proposer is not None,
        )

    def _drive(
        self, requests: Sequence[Request], concurrency: int | None, arrivals: Sequence[float] | None
    ) -> Iterator[tuple[StepRecord | None, list[Request], list[Request]]]:
        """Feed requests and step until all have ended; yields the step, who ended and who grew.

        Whatever happens, nothing of these requests is left behind in the scheduler or the proposer.
        """
        due = deque(zip(arrivals or [0.0] * len(requests), requests, strict=True))
        begun = time.perf_counter()
        in_flight: set[str] = set()
        try:
            while due or in_flight:
                ended = self._admit_due(due, begun, in_flight, concurrency)
                ended += self._end_all(in_flight)  # aborted since the last step
                result = self._runner.run() if self.scheduler.has_work else None
                grown = self._stamp(result.emitted) if result else []
                ended += self._end_all(in_flight)
                yield (result.record if result else None), ended, grown
                if result is None and due and not in_flight:
                    time.sleep(max(0.0, due[0][0] - (time.perf_counter() - begun)))
        finally:
            self._abandon(requests)

    def _admit_due(
        self, due: deque[tuple[float, Request]], begun: float, in_flight: set[str], concurrency: int | None
    ) -> list[Request]:
        """Hand over the requests whose time has come; returns those that end without running (max_tokens=0)."""
        ended = []
        while due and due[0][0] <= time.perf_counter() - begun and len(in_flight) < (concurrency or len(in_flight) + 1):
            arrival, request = due.popleft()
            request.arrival = begun + arrival if arrival else time.perf_counter()
            if request.sampling.max_tokens == 0:
                request.finish_reason, request.text, request.status = FinishReason.LENGTH, "", Status.FINISHED
                ended.append(request)
                continue
            self.scheduler.add(request)
            if request.sampling.stop and request.request_id not in self._runner.detokenizers:
                self._runner.detokenizers[request.request_id] = Detokenizer(self.target.tokenizer)
            self._requests[request.request_id] = request
            in_flight.add(request.request_id)
        return ended

    def _end_all(self, in_flight: set[str]) -> list[Request]:
        """End the requests in flight that have a finish reason."""
        ended = [self._requests[name] for name in in_flight if self._requests[name].finish_reason is not None]
        in_flight -= {request.request_id for request in ended}
        return [self._end(request) for request in ended]

    @staticmethod
    def _stamp(emitted: Sequence[tuple[Request, int]]) -> list[Request]:
        now = time.perf_counter()
        for request, count in emitted:
            request.token_times.extend([now] * count)
        return [request for request, _ in emitted]

    def _end(self, request: Request) -> Request:
        """Give back a request's slot and blocks and complete its text."""
        slot = request.slot
        self.scheduler.release(request)
        self._runner.leave(request, slot)
        detokenizer = self._runner.detokenizers.get(request.request_id)
        if detokenizer is None:
            request.text = detokenize(self.target.tokenizer, request.output_ids)
        else:
            detokenizer.finish()
            request.text = detokenizer.text
        del self._requests[request.request_id]
        return request

    def _open_streams(self, requests: Sequence[Request]) -> dict[str, list[int]]:
        """Index of the prompt and number of tokens sent, by request; text is kept up to date from now on."""
        for request in requests:
            self._runner.detokenizers[request.request_id] = Detokenizer(self.target.tokenizer)
        return {request.request_id: [index, 0] for index, request in enumerate(requests)}

    def _chunks(
        self, streams: dict[str, list[int]], finished: Sequence[Request], grown: Sequence[Request]
    ) -> Iterator[Chunk]:
        """What a step added to the open streams."""
        for request in [*(one for one in grown if one not in finished), *finished]:
            index, sent = streams[request.request_id]
            detokenizer = self._runner.detokenizers[request.request_id]
            longest = max((len(stop) for stop in request.sampling.stop), default=1)
            text = detokenizer.release(0 if request.finish_reason else longest - 1)
            new_ids = tuple(request.output_ids[sent:])
            streams[request.request_id][1] = len(request.output_ids)
            if new_ids or text or request.finish_reason:
                yield Chunk(index, request.request_id, new_ids, text, request.finish_reason)

    def _abandon(self, requests: Sequence[Request]) -> None:
        """Leave no trace of requests that did not end by themselves."""
        for request in requests:
            if request.request_id in self._requests:
                request.finish_reason = request.finish_reason or FinishReason.ABORT
                with self._runner.tolerant("proposer raised while a request was given back"):
                    self._end(request)
                self._requests.pop(request.request_id, None)
            self._runner.detokenizers.pop(request.request_id, None)
