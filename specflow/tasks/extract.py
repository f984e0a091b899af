"""`task=extract`: the target's hidden states of a workload, one safetensors file per request."""

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specflow.capture.collector import CapturingScheduler, CapturingTarget, Collector
from specflow.capture.manifest import Manifest, hash_ids
from specflow.capture.writer import AsyncWriter
from specflow.core.layer_numbers import CONVENTION
from specflow.core.request import FinishReason
from specflow.core.sampling_params import SamplingParams
from specflow.engine.build import assemble
from specflow.engine.engine import Engine
from specflow.engine.outputs import RequestOutput
from specflow.engine.prompts import encode_prompt
from specflow.errors import ConfigError, PromptError
from specflow.options import build_options
from specflow.plugins.component import Kind
from specflow.tasks.base import Task, TaskContext
from specflow.tasks.extract_report import ExtractProgress, ExtractSummary
from specflow.tasks.measure import rendered, request_row, seeded
from specflow.tracking.events import RunFinished, Series, StepRecord
from specflow.workloads.base import Prompt, Workload
from specflow.workloads.prompt_list import fit_template
from specflow.workloads.rows import absolute


@dataclass(frozen=True, kw_only=True)
class ExtractOptions:
    """Options of `task=extract`. Raises `ConfigError` on construction when nothing would be saved."""

    layers: tuple[int, ...] = ()  # l = residual stream after decoder layer l, -1 = embedding output
    prompt_tokens: bool = True  # save the states of the prompt
    generated_tokens: bool = False  # generate answers and save their states, all but the last token's
    output: str = "runs/hidden_states"  # folder, relative to the launch folder
    resume: bool = True  # go on with what the folder holds
    batch_size: int = 8  # requests in flight
    num_writer_threads: int = 4

    def __post_init__(self) -> None:
        if not self.layers:
            raise ConfigError(
                "task.layers must be set: the decoder layers whose output is saved, from 0 (-1: the embedding output), "
                "for instance 'task.layers=[1,5,9]'."
            )
        if len(set(self.layers)) < len(self.layers) or min(self.layers) < -1:
            raise ConfigError(f"task.layers={list(self.layers)} must be different numbers of -1 or more.")
        if not (self.prompt_tokens or self.generated_tokens):
            raise ConfigError(
                "task.prompt_tokens=false and task.generated_tokens=false save nothing: set one of them to true."
            )
        for key in ("batch_size", "num_writer_threads"):
            if getattr(self, key) < 1:
                raise ConfigError(f"task.{key}={getattr(self, key)} must be 1 or more.")
        if not self.output:
            raise ConfigError("task.output must be a folder: task.output=FOLDER")


class ExtractTask(Task):
    """Runs the workload's prompts through the target and saves what was asked for."""

    name = "extract"
    needs = (Kind.TARGET, Kind.PROPOSER, Kind.SAMPLER, Kind.SCHEDULER, Kind.BACKEND, Kind.WORKLOAD)

    def __init__(self, options: ExtractOptions) -> None:
        self.options = options

    def run(self, context: TaskContext) -> RunFinished:
        """See `Task.run`. What is finished stays, however the run ends; the same command goes on from there."""
        options = self.options
        sampling = self._sampling(context)
        workload: Workload = context.build(Kind.WORKLOAD)
        prompts = workload.load()  # before the engine: a missing file should not wait for weights
        collector = Collector(options.layers, options.prompt_tokens, options.generated_tokens)
        engine = assemble(lambda kind: self._part(context, collector, kind))
        self._check_batch_size(engine)
        requests, notes = _requests(engine, workload, prompts, sampling, int(context.config.get("seed", 0)))
        if not options.generated_tokens and context.config.get("proposer") is not None:
            notes.append("no proposer ran: it has nothing to draft with task.generated_tokens=false")
        manifest = Manifest(absolute(options.output), self._settings(engine, sampling, context), options.resume)
        try:
            pending = _pending(requests, manifest)
            facts = engine.target.facts
            writer = AsyncWriter(manifest, options.layers, facts.checkpoint_hash, options.num_writer_threads)
            run = _Run(options, engine, collector, writer, context)
            seconds, aborted = run.extract(pending)
        finally:
            manifest.close()
        summary = ExtractSummary.of(writer, len(requests) - len(pending), aborted, seconds, manifest.folder, notes)
        summary.print(options.layers)
        return RunFinished("finished", metrics=summary.metrics())

    def _sampling(self, context: TaskContext) -> SamplingParams:
        """The run's own for answers; one token, which ends a request at its last prompt position, without them."""
        if not self.options.generated_tokens:
            return SamplingParams(max_tokens=1)
        given: SamplingParams = build_options(SamplingParams, context.config.get("sampling") or {}, "sampling")
        if given.max_tokens < 2:
            raise ConfigError(
                f"sampling.max_tokens={given.max_tokens} leaves task.generated_tokens=true nothing to save: the last "
                "token of an answer is never processed. Set sampling.max_tokens to 2 or more."
            )
        return given

    def _part(self, context: TaskContext, collector: Collector, kind: Kind) -> Any:
        if kind is Kind.PROPOSER and not self.options.generated_tokens:
            return None
        part = context.build(kind)
        if kind is Kind.TARGET:
            return CapturingTarget(part, collector)
        return CapturingScheduler(part, collector) if kind is Kind.SCHEDULER else part

    def _check_batch_size(self, engine: Engine) -> None:
        if self.options.batch_size > engine.limits.max_num_seqs:
            raise ConfigError(
                f"task.batch_size={self.options.batch_size} is above scheduler.max_num_seqs="
                f"{engine.limits.max_num_seqs}. Lower the first or raise the second."
            )

    def _settings(self, engine: Engine, sampling: SamplingParams, context: TaskContext) -> dict[str, Any]:
        """What every file of a folder has in common."""
        facts, answers = engine.target.facts, self.options.generated_tokens
        return {
            "target": facts.name,
            "target_hash": facts.checkpoint_hash,
            "layers": list(self.options.layers),
            "layer_convention": CONVENTION,
            "hidden_size": facts.hidden_size,
            "dtype": str(facts.dtype).removeprefix("torch."),
            "prompt_tokens": self.options.prompt_tokens,
            "generated_tokens": answers,
            "sampling": dataclasses.asdict(sampling) if answers else None,
            "seed": int(context.config.get("seed", 0)) if answers else None,
        }


@dataclass(frozen=True)
class _Request:
    """A prompt, ready for the engine."""

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams


def _requests(
    engine: Engine, workload: Workload, prompts: Sequence[Prompt], sampling: SamplingParams, seed: int
) -> tuple[list[_Request], list[str]]:
    """Every prompt's first turn as token ids, with its own seed, and notes. Raises `PromptError` for one too long."""
    tokenizer, limits = engine.target.tokenizer, engine.limits
    prompts, note = fit_template(workload, prompts, bool(getattr(tokenizer, "chat_template", None)))
    later = sum(len(prompt.turns) - 1 for prompt in prompts)
    notes = [note] if note else []
    if later:
        notes.append(f"first turns only: {later} later turns, which follow the target's own answers, are left out")
    requests = []
    for index, prompt in enumerate(prompts):
        try:
            ids = encode_prompt(tokenizer, rendered(prompt), limits.vocab_size)
        except PromptError as error:
            raise PromptError(f"request {prompt.id!r}: {error}") from None
        requests.append(_Request(prompt.id, ids, seeded(sampling, seed, index)))
    too_long = [one for one in requests if len(one.prompt_ids) > limits.max_model_len]
    if too_long:
        worst = max(too_long, key=lambda one: len(one.prompt_ids))
        raise PromptError(
            f"{len(too_long)} of {len(requests)} prompts are longer than the context limit scheduler.max_model_len="
            f"{limits.max_model_len}; the longest is {worst.request_id!r} with {len(worst.prompt_ids)} tokens. Raise "
            "scheduler.max_model_len (at most what the target supports) or take them out of the workload."
        )
    return requests, notes


def _pending(requests: Sequence[_Request], manifest: Manifest) -> list[_Request]:
    """Requests without a file. Raises `ConfigError` when an id stands for another prompt than before."""
    pending = []
    for request in requests:
        entry = manifest.entries.get(request.request_id)
        if entry is None:
            pending.append(request)
        elif entry.prompt_sha256 != hash_ids(request.prompt_ids):
            raise ConfigError(
                f"task.output={manifest.folder}: request {request.request_id!r} was saved with another prompt "
                "than the workload has now. Choose another folder with task.output=FOLDER, or use the same workload."
            )
    return pending


@dataclass
class _Run:
    """One extraction in progress."""

    options: ExtractOptions
    engine: Engine
    collector: Collector
    writer: AsyncWriter
    context: TaskContext

    def extract(self, requests: Sequence[_Request]) -> tuple[float, int]:
        """Run and save the requests; returns the seconds it took and how many were aborted."""
        begun, aborted = time.perf_counter(), 0
        hooks, engine = self.context.hooks, self.engine
        method = engine.proposer.name if engine.proposer else "plain"
        series = Series(f"extract, {method}", method, self.options.batch_size, len(requests))

        def on_step(record: StepRecord) -> None:
            progress.step(record.num_prompt_tokens + record.num_emitted)
            hooks.specflow_step_finished(record=record)

        def on_finish(output: RequestOutput) -> None:
            nonlocal aborted
            aborted += output.finish_reason is FinishReason.ABORT
            self._save(output)
            progress.finish()
            hooks.specflow_request_finished(row=request_row(output, series))

        with ExtractProgress(len(requests)) as progress, self.writer:
            engine.generate(
                [request.prompt_ids for request in requests],
                [request.sampling for request in requests],
                concurrency=self.options.batch_size,
                request_ids=[request.request_id for request in requests],
                on_step=on_step,
                on_finish=on_finish,
            )
        return time.perf_counter() - begun, aborted

    def _save(self, output: RequestOutput) -> None:
        """Hand a finished request to the writer. An aborted one is left out and redone by the next run."""
        if output.finish_reason is FinishReason.ABORT:
            self.collector.drop(output.request_id)
            return
        facts = self.engine.target.facts
        captured = self.collector.take(
            output.request_id, output.prompt_ids, output.token_ids, facts.hidden_size, facts.dtype
        )
        self.writer.submit(captured)
