"""`task=bench`: plain decoding and the proposer on the same prompts in the same run, and the proof that both agree."""

import hashlib
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from specflow.core.sampling_params import SamplingParams
from specflow.engine.build import assemble
from specflow.engine.cost_curve import measure_cost_curve
from specflow.engine.engine import Engine
from specflow.engine.losslessness import Difference, comparable, find_differences
from specflow.engine.prompts import encode_prompt
from specflow.errors import ConfigError
from specflow.metrics.summary import (
    PLAIN,
    BenchSummary,
    SeriesSummary,
    cost_points,
    summarise,
    summarise_repeat,
    with_speedups,
)
from specflow.metrics.verdict import LosslessVerdict
from specflow.options import build_options
from specflow.peers.base import engine_of
from specflow.plugins.component import Kind
from specflow.plugins.registry import Registry
from specflow.tasks.base import Task, TaskContext
from specflow.tasks.baselines import Baseline, feel_pulse
from specflow.tasks.bench_options import BenchOptions
from specflow.tasks.judging import judge
from specflow.tasks.measure import Measurement, measure, rendered, template_warning
from specflow.tasks.peer_bench import bench_elsewhere, check_elsewhere
from specflow.tracking.events import RunFinished, Series
from specflow.workloads.base import Prompt, Workload
from specflow.workloads.prompt_list import fit_template

_MEMORY = {
    "cold": "cold: emptied before every measured pass",
    "keep": "kept: passes may draft from the outputs of earlier ones and of the warm-up",
}


class BenchTask(Task):
    """Measures the composition against plain decoding by the same engine."""

    name = "bench"
    needs = (Kind.TARGET, Kind.PROPOSER, Kind.SAMPLER, Kind.SCHEDULER, Kind.BACKEND, Kind.ENGINE, Kind.WORKLOAD)
    keeps_target = True

    def __init__(self, options: BenchOptions) -> None:
        self.options = options

    def check(self, config: Mapping[str, Any], registry: Registry) -> None:
        """See `Task.check`: another engine says what it cannot do."""
        engine = engine_of(config, registry)
        if engine is not None:
            check_elsewhere(engine, config, registry, self.options.batch_sizes)

    def run(self, context: TaskContext) -> RunFinished:
        """See `Task.run`. A failed requirement ends the run as failed, with all results kept."""
        engine = engine_of(context.config, context.registry)
        if engine is None:
            summary = self._measure(context)
        else:
            summary = bench_elsewhere(engine, context, self.options)
        failure = self._failure(summary)
        return RunFinished("failed" if failure else "finished", failure, summary.to_metrics(), summary)

    def _measure(self, context: TaskContext) -> BenchSummary:
        """On our own engine."""
        workload: Workload = context.build(Kind.WORKLOAD)
        prompts = workload.load()  # before the engine: a missing file should not wait for weights
        sampling: SamplingParams = build_options(SamplingParams, context.config.get("sampling") or {}, "sampling")
        engine = assemble(context.build)
        self._check_batch_sizes(engine)
        has_template = bool(getattr(engine.target.tokenizer, "chat_template", None))
        prompts, note = fit_template(workload, prompts, has_template)
        warning = template_warning(engine.proposer, [prompt.chat for prompt in prompts])
        notes = [text for text in (note, warning) if text]
        bench = _Bench(self.options, engine, workload, prompts, sampling, context, notes)
        measured = bench.measure_all()
        return bench.summary(measured, bench.verdict(measured))

    def _check_batch_sizes(self, engine: Engine) -> None:
        if max(self.options.batch_sizes) > engine.limits.max_num_seqs:
            raise ConfigError(
                f"task.batch_sizes={list(self.options.batch_sizes)} asks for more requests at the same time than "
                f"scheduler.max_num_seqs={engine.limits.max_num_seqs} allows. Raise the latter."
            )

    def _failure(self, summary: BenchSummary) -> str | None:
        """Why the run counts as failed, or None."""
        if self.options.require_lossless and not summary.lossless.passed:
            return summary.lossless.sentence()
        least = self.options.require_acceptance_length
        if least is None:
            return None
        for series in summary.series:
            length = series.acceptance.mean_acceptance_length
            if not series.is_plain and (length is None or length <= least):
                found = "n/a: nothing was drafted" if length is None else f"{length:.2f}"
                return f"task.require_acceptance_length={least} does not hold: {series.label} has {found}."
        if all(series.is_plain for series in summary.series):
            return f"task.require_acceptance_length={least} cannot hold: no proposer ran. Add +proposer=NAME."
        return None


@dataclass(frozen=True)
class _Bench:
    """One benchmark in progress: everything its parts share."""

    options: BenchOptions
    engine: Engine
    workload: Workload
    prompts: Sequence[Prompt]
    sampling: SamplingParams
    context: TaskContext
    notes: Sequence[str]
    reused: dict[int, Baseline] = field(default_factory=dict)  # by batch size: measured by another job of the sweep
    drifted: list[str] = field(default_factory=list)  # warnings about them

    @property
    def methods(self) -> list[str]:
        """Plain decoding first, then the proposer if there is one."""
        return [PLAIN] + ([self.engine.proposer.name] if self.engine.proposer else [])

    @property
    def warmups(self) -> int:
        """Prompts run before each batch size, not counted."""
        return self.options.warmups(len(self.prompts), self.engine.limits.device.type != "cpu")

    def measure_all(self) -> list[Measurement]:
        """Every method at every batch size; methods take turns, so that a drift of the machine touches both."""
        measured: list[Measurement] = []
        for batch_size in self.options.batch_sizes:
            drafted: list[Measurement] = []
            with self._baseline(batch_size) as (plain, methods):
                if self.warmups:
                    for method in methods:
                        self._measure(method, batch_size, 0, warmup=True)
                for repeat in range(self.options.repeats):
                    for method in methods:
                        if method != PLAIN and self.options.proposer_memory == "cold":
                            self._forget()
                        (plain if method == PLAIN else drafted).append(self._measure(method, batch_size, repeat))
            measured += [*plain, *drafted]
        return measured

    @contextmanager
    def _baseline(self, batch_size: int) -> Iterator[tuple[list[Measurement], list[str]]]:
        """Plain decoding's measurements, and the methods that are still to be measured.

        In a sweep the list holds what another job measured while the machine was as fast as it is now; an empty one is
        to be filled, and is then kept for the others.
        """
        if self.context.baselines is None:
            yield [], self.methods
            return
        with self.context.baselines.claim(self._baseline_key(batch_size)) as claim:
            found, before = claim.load(), feel_pulse(self.engine)
            if found is not None and found.still_holds(before):
                self.reused[batch_size] = found
                yield list(found.measurements), self.methods[1:]
                self._watch_drift(batch_size, found)
                return
            plain: list[Measurement] = []
            yield plain, self.methods
            claim.save(plain, before)

    def _watch_drift(self, batch_size: int, found: Baseline) -> None:
        """A machine that changed its speed while the proposer was measured is said beside the numbers."""
        after = feel_pulse(self.engine)
        if not found.still_holds(after) and after is not None and found.pulse is not None:
            self.drifted.append(
                f"batch {batch_size}: the speed-up is not to be trusted: a target pass takes {after / found.pulse:.2f} "
                f"times as long as when {found.job} measured plain decoding"
            )

    def _baseline_key(self, batch_size: int) -> dict[str, Any]:
        """Everything that plain decoding's speed and output depend on."""
        groups = (Kind.TARGET, Kind.SAMPLER, Kind.SCHEDULER, Kind.BACKEND, Kind.WORKLOAD)
        config = {str(group): self.context.config.get(group) for group in (*groups, "engine", "seed")}
        return {
            **config,
            "sampling": asdict(self.sampling),
            "batch_size": batch_size,
            "repeats": self.options.repeats,
            "warmup_requests": self.warmups,
            "workload data": self.workload.describe(),
            "machine": [platform.node(), self.engine.backend.describe()],
        }

    def _forget(self) -> None:
        """A pass must not draft from the answers that an earlier pass, or the warm-up, gave to the same prompts."""
        assert self.engine.proposer is not None
        self.engine.proposer.reset()

    def _measure(self, method: str, batch_size: int, repeat: int, warmup: bool = False) -> Measurement:
        prompts = self.prompts[: self.warmups] if warmup else self.prompts
        series = Series(
            name=f"{method}, batch {batch_size}",
            method=method,
            batch_size=batch_size,
            num_requests=sum(len(prompt.turns) for prompt in prompts),
            warmup=warmup,
            repeat=repeat,
            num_repeats=self.options.repeats,
            max_tokens=self.sampling.max_tokens,
        )
        seed = int(self.context.config.get("seed", 0))
        rate = None if warmup else self.workload.request_rate
        return measure(self.engine, prompts, self.sampling, series, self.context.hooks, seed=seed, request_rate=rate)

    def verdict(self, measured: Sequence[Measurement]) -> LosslessVerdict:
        """Compare every speculative output with plain decoding's at the same batch size and repeat."""
        if self.engine.proposer is None:
            return LosslessVerdict("not_applicable", reason="plain decoding only: no proposer ran")
        if not self.engine.sampler.lossless:
            return LosslessVerdict("not_applicable", reason=f"sampler {self.engine.sampler.name!r} is lossy by design")
        if not (self.sampling.greedy or self.engine.sampler.seed_exact):
            reason = f"temperature {self.sampling.temperature:g}: equal in law, not token by token"
            return LosslessVerdict("not_applicable", reason=reason)
        plain = {(one.series.batch_size, one.series.repeat): one for one in measured if one.series.method == PLAIN}
        differences: list[Difference] = []
        requests = tokens = left_out = 0
        for one in measured:
            if one.series.method != PLAIN:
                expected = plain[one.series.batch_size, one.series.repeat].outputs
                differences += find_differences(self.engine, expected, one.outputs, self.sampling)
                alike = comparable(expected, one.outputs)
                requests, tokens = requests + alike[0], tokens + alike[1]
                left_out += len(one.outputs) - alike[0]
        return judge(differences, requests, tokens, left_out)

    def summary(self, measured: Sequence[Measurement], verdict: LosslessVerdict) -> BenchSummary:
        """Put everything together."""
        lossy = not self.engine.sampler.lossless
        curve = measure_cost_curve(self.engine) if self.options.cost_curve else []
        really_ran = self.engine.describe()
        really_ran["run"] = self._run_facts()
        return BenchSummary(
            name=f"{self.methods[-1]} on {self.workload.name}",
            series=with_speedups(_summarise(measured, lossy)),
            lossless=verdict,
            really_ran=really_ran,
            cost_curve=cost_points(curve),
            workload=self.workload.describe(),
            lossy=lossy,
            notes=[*self.notes, *self.drifted, *_notes(self.engine)],
        )

    def _run_facts(self) -> dict[str, str]:
        """What a later run needs to know to be the same."""
        tokenizer = self.engine.target.tokenizer
        first = encode_prompt(tokenizer, rendered(self.prompts[0]), self.engine.limits.vocab_size)
        facts = {
            "first prompt ids": _short_hash(first),
            "temperature": f"{self.sampling.temperature:g}",
            "max_tokens": str(self.sampling.max_tokens),
            "seed": str(self.context.config.get("seed", 0)),
            "repeats": str(self.options.repeats),
            "warm-up requests": str(self.warmups),
        }
        if self.engine.proposer is not None:
            facts["proposer memory"] = _MEMORY[self.options.proposer_memory]
        if self.reused:
            found = {f"measured by {one.job} at {one.measured}" for one in self.reused.values()}
            facts["plain decoding"] = ", ".join(sorted(found))
        if self.drifted:
            facts["drift"] = "; ".join(self.drifted)
        if self.prompts[0].chat:
            facts["chat template"] = _short_hash(getattr(tokenizer, "chat_template", None))
        return facts


def _summarise(measured: Sequence[Measurement], lossy: bool) -> list[SeriesSummary]:
    groups: dict[tuple[int, str], list[Measurement]] = {}
    for one in measured:
        groups.setdefault((one.series.batch_size, one.series.method), []).append(one)
    return [
        summarise(
            [summarise_repeat(m.series, m.rows, m.steps, m.wall_seconds, m.peak_memory_bytes) for m in group],
            lossy=lossy and method != PLAIN,
        )
        for (_, method), group in groups.items()
    ]


def _notes(engine: Engine) -> list[str]:
    return [f"{name}: {count} times" for name, count in engine.incidents.items()]


def _short_hash(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]
