"""`task=bench` on another engine: the same requests, measured there, and compared with our plain decoding.

specflow decodes plainly first. That gives the requests as token ids (a later turn of a conversation contains its
answers) and the answers to compare with. Then the other engine is loaded for plain decoding, and again for drafts.
"""

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specflow.core.sampling_params import SamplingParams, seeded
from specflow.engine.build import assemble
from specflow.engine.engine import Engine
from specflow.engine.losslessness import Difference, find_differences
from specflow.engine.outputs import RequestOutput
from specflow.errors import ConfigError
from specflow.metrics.acceptance import AcceptanceCounts
from specflow.metrics.summary import (
    PLAIN,
    BenchSummary,
    RepeatSummary,
    SeriesSummary,
    summarise,
    summarise_repeat,
    with_speedups,
)
from specflow.metrics.verdict import LosslessVerdict
from specflow.options import build_options
from specflow.peers.base import DecodingEngine, PeerPass, PeerRequest, PeerSession, PeerSetup
from specflow.plugins.component import Kind
from specflow.plugins.registry import Registry
from specflow.samplers.base import Sampler
from specflow.tasks.base import TaskContext
from specflow.tasks.bench_options import BenchOptions
from specflow.tasks.judging import judge
from specflow.tasks.measure import measure, request_row
from specflow.tracking.events import RequestRow, Series
from specflow.workloads.base import Workload
from specflow.workloads.prompt_list import fit_template
from specflow.workloads.turns import answer_sampling

__all__ = ["PeerBench", "bench_elsewhere", "check_elsewhere"]


def check_elsewhere(
    engine: DecodingEngine, config: Mapping[str, Any], registry: Registry, batch_sizes: Sequence[int]
) -> None:
    """Whether another engine can run the benchmark; nothing is loaded. Raises `ConfigError`."""
    problems = []
    rate = (config.get(Kind.WORKLOAD) or {}).get("request_rate")
    if rate is not None:
        problems.append(f"engine={engine.name}: workload.request_rate={rate}: requests arrive all at once there")
    most = registry.get(Kind.SCHEDULER, config[Kind.SCHEDULER]["name"]).check(config[Kind.SCHEDULER]).max_num_seqs
    if max(batch_sizes) > most:
        problems.append(
            f"task.batch_sizes={list(batch_sizes)} asks for more requests at the same time than "
            f"scheduler.max_num_seqs={most} allows. Raise the latter."
        )
    try:
        engine.check(config, registry)
    except ConfigError as error:
        problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))


def bench_elsewhere(engine: DecodingEngine, context: TaskContext, options: BenchOptions) -> BenchSummary:
    """Measure the composition on another engine and compare its answers with our plain decoding."""
    workload: Workload = context.build(Kind.WORKLOAD)
    sampling: SamplingParams = build_options(SamplingParams, context.config.get("sampling") or {}, "sampling")
    sampler: Sampler = context.build(Kind.SAMPLER)
    reference = plain_reference(context, workload, sampling, max(options.batch_sizes))
    method = (context.config.get(Kind.PROPOSER) or {}).get("name")
    warmups = options.warmups(len(reference.requests), reference.device.type != "cpu")
    bench = PeerBench(
        engine, context, reference, method, options.batch_sizes, options.repeats, warmups, sampling.max_tokens
    )
    measured = bench.measure_all()
    if not sampling.greedy:
        reason = f"temperature {sampling.temperature:g}: equal in law, not token by token"
        verdict, agreement = LosslessVerdict("not_applicable", reason=reason), []
    else:
        compared = [one for one in measured if sampler.lossless or one.series.method == PLAIN]
        tokens = sum(len(output.token_ids) for one in compared for output in one.outputs)
        requests = sum(len(one.outputs) for one in compared)  # a later turn contains our answers: prompts are alike
        verdict = judge(bench.differences(compared, sampling), requests, tokens)
        agreement = bench.agreement(compared)
    caveats = [f"{engine.name}: {text}" for text in engine.caveats(context.config, _registry(context))]
    notes = [*([reference.note] if reference.note else []), *agreement, *caveats]
    lossy = not sampler.lossless
    ran = bench.really_ran()
    ran["run"] = {
        "temperature": f"{sampling.temperature:g}",
        "max_tokens": str(sampling.max_tokens),
        "seed": str(context.config.get("seed", 0)),
        "repeats": str(options.repeats),
        "warm-up requests": str(warmups),
        "order": f"{engine.name} was loaded for plain decoding first, then for drafts",
        "compared with": "specflow's plain decoding of the same requests",
    }
    return BenchSummary(
        name=f"{method or PLAIN} on {workload.name}, {engine.name}",
        series=with_speedups(_by_series(measured, lossy)),
        lossless=verdict,
        really_ran=ran,
        workload=workload.describe(),
        lossy=lossy,
        notes=notes,
    )


def _by_series(measured: Sequence["PeerSeries"], lossy: bool) -> list[SeriesSummary]:
    groups: dict[tuple[int, str], list[RepeatSummary]] = {}
    for one in sorted(measured, key=lambda one: one.series.batch_size):
        groups.setdefault((one.series.batch_size, one.series.method), []).append(one.summary)
    return [summarise(group, lossy=lossy and method != PLAIN) for (_, method), group in groups.items()]


class _NobodyListens:
    """Hooks for a run that is no result."""

    def __getattr__(self, name: str) -> Any:
        return lambda **_: None


@dataclass(frozen=True)
class Reference:
    """specflow's own plain decoding of all requests."""

    requests: Sequence[PeerRequest]
    outputs: Sequence[RequestOutput]
    really_ran: Mapping[str, Mapping[str, str]]
    device: Any
    note: str | None  # about the prompts' rendering


def plain_reference(context: TaskContext, workload: Workload, sampling: SamplingParams, concurrency: int) -> Reference:
    """Decode plainly with our own engine, and give its memory back."""
    loaded = workload.load()  # before the engine: a missing file should not wait for weights
    engine = own_engine(context)
    has_template = bool(getattr(engine.target.tokenizer, "chat_template", None))
    prompts, note = fit_template(workload, loaded, has_template)
    seed = int(context.config.get("seed", 0))
    series = Series(f"{PLAIN}, reference", PLAIN, min(concurrency, engine.limits.max_num_seqs), len(prompts))
    outputs = measure(engine, prompts, sampling, series, _NobodyListens(), seed=seed).outputs
    turns = range(max(len(prompt.turns) for prompt in prompts))
    order = [(turn, index) for turn in turns for index, prompt in enumerate(prompts) if turn < len(prompt.turns)]
    requests = [
        PeerRequest(
            output.request_id,
            output.prompt_ids,
            seeded(answer_sampling(prompts[index], sampling), seed, index + turn * len(prompts)),
        )
        for (turn, index), output in zip(order, outputs, strict=True)
    ]
    found = Reference(requests, outputs, engine.describe(), engine.backend.device, note)
    del engine
    _free_memory()
    return found


def own_engine(context: TaskContext) -> Engine:
    """specflow's engine of the composition, without its proposer."""
    return assemble(lambda kind: None if kind is Kind.PROPOSER else context.build(kind))


def _free_memory() -> None:
    gc.collect()
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@dataclass
class PeerSeries:
    """One pass of the other engine."""

    series: Series
    summary: RepeatSummary
    outputs: Sequence[RequestOutput]


@dataclass
class PeerBench:
    """A benchmark of another engine in progress."""

    engine: DecodingEngine
    context: TaskContext
    reference: Reference
    method: str | None  # the proposer's name; None: plain decoding only
    batch_sizes: Sequence[int]
    repeats: int
    warmup_requests: int
    max_tokens: int
    facts: dict[str, Mapping[str, str]] = field(default_factory=dict)  # of each loaded engine, by method

    def measure_all(self) -> list[PeerSeries]:
        """Every method at every batch size; the engine is loaded once per method."""
        found: list[PeerSeries] = []
        for method in [PLAIN, *([self.method] if self.method else [])]:
            context = self.context
            setup = PeerSetup(
                context.config, _registry(context), method != PLAIN, self.reference.device, context.output_dir
            )
            with self.engine.open(setup) as session:
                for batch_size in self.batch_sizes:
                    if self.warmup_requests:
                        self._measure(session, method, batch_size, 0, warmup=True)
                    found += [self._measure(session, method, batch_size, one) for one in range(self.repeats)]
                self.facts[method] = session.describe()
            _free_memory()
        return found

    def _measure(
        self, session: PeerSession, method: str, batch_size: int, repeat: int, warmup: bool = False
    ) -> PeerSeries:
        requests = self.reference.requests[: self.warmup_requests] if warmup else self.reference.requests
        series = Series(
            name=f"{method}, batch {batch_size}", method=method, batch_size=batch_size, num_requests=len(requests),
            warmup=warmup, repeat=repeat, num_repeats=self.repeats, max_tokens=self.max_tokens,
        )  # fmt: skip
        hooks, rows = self.context.hooks, []
        hooks.specflow_series_started(series=series)

        def on_finish(output: RequestOutput) -> None:
            rows.append(request_row(output, series))
            hooks.specflow_request_finished(row=rows[-1])

        done = session.run(requests, batch_size, on_finish)
        return PeerSeries(series, _summarised(series, rows, done), done.outputs)

    def differences(self, measured: Sequence[PeerSeries], sampling: SamplingParams) -> list[Difference]:
        """First differences from our plain decoding, of plain decoding there and of drafts alike.

        Our engine is loaded again for it, and only where something differs: it says how close a tie was.
        """
        expected = self.reference.outputs
        unequal = [
            (before, after)
            for one in measured
            for before, after in zip(expected, one.outputs, strict=True)
            if before.token_ids != after.token_ids
        ]
        if not unequal:
            return []
        engine = own_engine(self.context)
        return find_differences(engine, [pair[0] for pair in unequal], [pair[1] for pair in unequal], sampling)

    def agreement(self, measured: Sequence[PeerSeries]) -> list[str]:
        """For each method how many of its answers are not those of our plain decoding, in a sentence."""
        found = []
        for method in dict.fromkeys(one.series.method for one in measured):
            passes = [one.outputs for one in measured if one.series.method == method]
            pairs = [pair for outputs in passes for pair in zip(self.reference.outputs, outputs, strict=True)]
            differing = sum(before.token_ids != after.token_ids for before, after in pairs)
            found.append(
                f"{self.engine.name} {method}: {len(pairs) - differing} of {len(pairs)} answers equal specflow's plain "
                "decoding token for token"
            )
        return found

    def really_ran(self) -> dict[str, dict[str, str]]:
        """What ran there; device and checkpoint are those of the composition."""
        own = self.reference.really_ran
        target = {key: own["target"][key] for key in ("target", "parameters", "weights") if key in own["target"]}
        drafts = dict(self.facts[self.method]) if self.method else {}
        engine = {"engine": self.engine.name, **self.facts[PLAIN]}
        ran = {"engine": engine, "target": target, "backend": dict(own["backend"])}
        if drafts:
            changed = {key: value for key, value in drafts.items() if engine.get(key) != value}
            ran["proposer"] = {"method": str(self.method), **{k: v for k, v in changed.items() if k != "method"}}
        return ran


def _registry(context: TaskContext) -> Any:
    assert context.registry is not None
    return context.registry


def _summarised(series: Series, rows: Sequence[RequestRow], done: PeerPass) -> RepeatSummary:
    """Like a repeat of ours; the other engine does not say where the time of its steps goes."""
    summary = summarise_repeat(series, rows, (), done.wall_seconds, done.peak_memory_bytes)
    counts = AcceptanceCounts() if series.method == PLAIN else done.acceptance
    return replace(summary, acceptance=counts)
