"""`task=bench`: plain decoding and the proposer on the same prompts in the same run, and the proof that both agree."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from specflow.core.sampling_params import SamplingParams
from specflow.engine.build import assemble
from specflow.engine.cost_curve import measure_cost_curve
from specflow.engine.engine import Engine
from specflow.engine.losslessness import Difference, find_differences
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
from specflow.plugins.component import Kind
from specflow.tasks.base import Task, TaskContext
from specflow.tasks.measure import Measurement, measure, rendered, template_warning
from specflow.tracking.events import RunFinished, Series
from specflow.workloads.base import Prompt, Workload
from specflow.workloads.prompt_list import fit_template

_MEMORY = {
    "cold": "cold: emptied before every measured pass",
    "keep": "kept: passes may draft from the outputs of earlier ones and of the warm-up",
}


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Options of `task=bench`."""

    batch_sizes: tuple[int, ...] = (1, 8)  # requests in flight, one comparison each
    repeats: int = 3  # passes over the workload per method and batch size, interleaved; medians are reported
    warmup_requests: int = 1  # prompts run before each batch size, not counted
    proposer_memory: Literal["cold", "keep"] = "cold"  # what it learns: within a pass (cold), from earlier ones too
    cost_curve: bool = True  # measure what verifying 1 to 16 tokens costs
    require_lossless: bool = True  # fail the run when the output differs from plain decoding
    require_acceptance_length: float | None = None  # fail the run at or below this mean acceptance length

    def __post_init__(self) -> None:
        if not self.batch_sizes or min(self.batch_sizes) < 1 or len(set(self.batch_sizes)) < len(self.batch_sizes):
            raise ConfigError(f"task.batch_sizes={list(self.batch_sizes)} must be different numbers of 1 or more.")
        if self.repeats < 1:
            raise ConfigError(f"task.repeats={self.repeats} must be 1 or more.")
        if self.warmup_requests < 0:
            raise ConfigError(f"task.warmup_requests={self.warmup_requests} must be 0 or more.")
        if self.require_acceptance_length is not None and self.require_acceptance_length < 1:
            raise ConfigError(
                f"task.require_acceptance_length={self.require_acceptance_length} must be 1 or more: "
                "a verification step always emits one token."
            )


class BenchTask(Task):
    """Measures the composition against plain decoding by the same engine."""

    name = "bench"
    needs = (Kind.TARGET, Kind.PROPOSER, Kind.SAMPLER, Kind.SCHEDULER, Kind.BACKEND, Kind.WORKLOAD)

    def __init__(self, options: BenchOptions) -> None:
        self.options = options

    def run(self, context: TaskContext) -> RunFinished:
        """See `Task.run`. A failed requirement ends the run as failed, with all results kept."""
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
        verdict = bench.verdict(measured)
        summary = bench.summary(measured, verdict)
        failure = self._failure(summary)
        return RunFinished("failed" if failure else "finished", failure, summary.to_metrics(), summary)

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

    @property
    def methods(self) -> list[str]:
        """Plain decoding first, then the proposer if there is one."""
        return [PLAIN] + ([self.engine.proposer.name] if self.engine.proposer else [])

    def measure_all(self) -> list[Measurement]:
        """Every method at every batch size; methods take turns, so that a drift of the machine touches both."""
        measured = []
        for batch_size in self.options.batch_sizes:
            if self.options.warmup_requests:
                for method in self.methods:
                    self._measure(method, batch_size, 0, warmup=True)
            for repeat in range(self.options.repeats):
                for method in self.methods:
                    if method != PLAIN and self.options.proposer_memory == "cold":
                        self._forget()
                    measured.append(self._measure(method, batch_size, repeat))
        return measured

    def _forget(self) -> None:
        """A pass must not draft from the answers that an earlier pass, or the warm-up, gave to the same prompts."""
        assert self.engine.proposer is not None
        self.engine.proposer.reset()

    def _measure(self, method: str, batch_size: int, repeat: int, warmup: bool = False) -> Measurement:
        prompts = self.prompts[: self.options.warmup_requests] if warmup else self.prompts
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
        requests = tokens = 0
        for one in measured:
            if one.series.method != PLAIN:
                expected = plain[one.series.batch_size, one.series.repeat].outputs
                differences += find_differences(self.engine, expected, one.outputs, self.sampling)
                requests += len(one.outputs)
                tokens += sum(len(output.token_ids) for output in one.outputs)
        return judge(differences, requests, tokens)

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
            notes=[*self.notes, *_notes(self.engine)],
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
            "warm-up requests": str(self.options.warmup_requests),
        }
        if self.engine.proposer is not None:
            facts["proposer memory"] = _MEMORY[self.options.proposer_memory]
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


def judge(differences: Sequence[Difference], requests: int, tokens: int) -> LosslessVerdict:
    """Equal, equal up to ties, or different; a fault is shown before a tie."""
    if not differences:
        return LosslessVerdict("verified", requests, tokens)
    faults = [difference for difference in differences if not difference.is_tie]
    shown = (faults or differences)[0]
    detail = {
        "request": shown.request_id,
        "position": shown.position,
        "expected": shown.plain_token,
        "actual": shown.speculative_token,
        "gap": shown.gap,
    }
    reason = f"a gap up to {shown.tolerance:.3g} counts as a tie"
    status = "failed" if faults else "verified_up_to_ties"
    return LosslessVerdict(status, requests, tokens, detail, reason, len(differences))  # type: ignore[arg-type]


def _notes(engine: Engine) -> list[str]:
    return [f"{name}: {count} times" for name, count in engine.incidents.items()]


def _short_hash(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]
