"""`task=verify`: proof that a composition does not change the target's output, with the power the proof had.

Greedy: the composed engine answers every prompt token for token as plain decoding does, for every batch size, with full
drafts and with drafts cut to random lengths. Same seed: the same for sampled answers, where the sampler promises it.
Sampled: many answers of the composed engine to one prompt follow the exact law of the target. Sampler: on a small table
in place of the models, where samples cost next to nothing, it keeps the joint law over several verification steps.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console

from specflow.core.sampling_params import SamplingParams
from specflow.engine.engine import Engine
from specflow.errors import ConfigError
from specflow.options import build_options
from specflow.plugins.component import Kind
from specflow.tasks.base import Task, TaskContext
from specflow.tasks.measure import rendered
from specflow.testing.proofs import Equality, LawProof, RandomLengths, echoing_prompt, prove_equal, prove_law
from specflow.testing.statistics import POWER, Gate
from specflow.testing.table_model import TableModel
from specflow.tracking.events import RunFinished
from specflow.workloads.base import Prompt, Workload

_TABLE_TOKENS = 4  # vocabulary of the table, and length of an answer: 256 outcomes


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Options of `task=verify`. Raises `ConfigError` when a value is out of range."""

    batch_sizes: tuple[int, ...] = (1, 8)  # requests in flight in the token comparison
    prompts: int = 8  # prompts compared token by token
    max_tokens: int = 48  # output tokens of each
    samples: int = 3000  # sampled answers per tested prompt
    sampled_prompts: int = 1  # prompts tested against the exact law
    sampled_tokens: int = 5  # tokens of each sampled answer
    table_samples: int = 20_000  # samples of the sampler alone
    top_k: int = 3  # sample among this many tokens
    temperature: float = 1.0  # of the sampled answers when the sampling options are greedy
    alpha: float = 1e-4  # chance that a composition without fault fails
    allow_lossy: bool = False  # a sampler that is lossy by design is no error

    def __post_init__(self) -> None:
        for key in ("prompts", "max_tokens", "sampled_prompts", "sampled_tokens"):
            if getattr(self, key) < 1:
                raise ConfigError(f"task.{key}={getattr(self, key)} must be 1 or more.")
        for key in ("samples", "table_samples"):
            if getattr(self, key) < 100:
                raise ConfigError(f"task.{key}={getattr(self, key)} must be 100 or more: fewer could show nothing.")
        if self.top_k < 2:
            raise ConfigError(f"task.top_k={self.top_k} must be 2 or more: with one token there is nothing to sample.")
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            raise ConfigError(f"task.batch_sizes={list(self.batch_sizes)} must be numbers of 1 or more.")
        if not 0 < self.alpha < 0.1 or self.temperature <= 0:
            raise ConfigError("task.alpha must be in (0, 0.1) and task.temperature above 0.")


@dataclass(frozen=True)
class VerifySummary:
    """Everything that was proven, and how far."""

    name: str
    equalities: tuple[Equality, ...] = ()
    laws: tuple[LawProof, ...] = ()
    tables: Mapping[str, Gate] = field(default_factory=dict)
    lossy: bool = False

    @property
    def failure(self) -> str | None:
        """Why the composition counts as not lossless, or None."""
        for equality in self.equalities:
            if not equality.passed:
                fault = equality.faults[0]
                return (
                    f"{equality.what}: {len(equality.faults)} of {equality.requests} outputs differ from plain "
                    f"decoding; first at output token {fault.position}: plain {fault.plain_token}, "
                    f"here {fault.speculative_token}"
                )
        for law in self.laws:
            failed = [f"{name}: {gate.sentence()}" for name, gate in law.gates.items() if not gate.passed]
            if failed:
                return f"sampled answers do not follow the target's law. {failed[0]}"
        failed = [f"{name}: {gate.sentence()}" for name, gate in self.tables.items() if not gate.passed]
        if failed:
            return f"the sampler does not keep the law of a table. {failed[0]}"
        if self.inconclusive:
            return "inconclusive: the proposer drafted nothing on these prompts, so nothing was verified"
        return None

    @property
    def inconclusive(self) -> bool:
        """True when a part of the proof saw no draft at all."""
        return not any(law.drafted for law in self.laws) or not any(one.drafted for one in self.equalities)

    @property
    def verdict(self) -> str:
        """The verdict in a word or two."""
        if self.failure is None:
            return "lossless"
        return "NOT PROVEN" if self.failure.startswith("inconclusive") else "NOT LOSSLESS"

    def to_metrics(self) -> dict[str, float]:
        """Numbers for the tracker."""
        metrics = {"verify.compared_tokens": float(sum(one.tokens for one in self.equalities))}
        if self.laws:
            metrics["verify.samples"] = float(sum(law.num_samples for law in self.laws))
            metrics["verify.detectable_total_variation"] = max(law.detectable for law in self.laws)
            metrics["verify.least_p_value"] = min(gate.p_value for law in self.laws for gate in law.gates.values())
        return metrics


class VerifyTask(Task):
    """Proves the composition lossless or shows that it is not."""

    name = "verify"
    needs = (Kind.TARGET, Kind.PROPOSER, Kind.SAMPLER, Kind.SCHEDULER, Kind.BACKEND, Kind.WORKLOAD)

    def __init__(self, options: VerifyOptions) -> None:
        self.options = options

    def run(self, context: TaskContext) -> RunFinished:
        """See `Task.run`. The run has failed unless everything is proven."""
        inner, sampler = context.build(Kind.PROPOSER), context.build(Kind.SAMPLER)
        if inner is None:
            raise ConfigError("task=verify has nothing to verify: plain decoding is the reference. Add +proposer=NAME.")
        title = f"{inner.name} with sampler {sampler.name}"
        if not sampler.lossless:
            return self._lossy(title)
        workload: Workload = context.build(Kind.WORKLOAD)
        prompts = workload.load()[: self.options.prompts]
        sampling: SamplingParams = build_options(SamplingParams, context.config.get("sampling") or {}, "sampling")
        proposer = RandomLengths(inner)
        engine = Engine(
            context.build(Kind.TARGET), proposer, sampler, context.build(Kind.SCHEDULER), context.build(Kind.BACKEND)
        )
        seed = int(context.config.get("seed", 0)) * 1_000_003
        proof = _Proof(self.options, engine, proposer, prompts, sampling, seed, Console())
        summary = VerifySummary(title, (*proof.greedy(), *proof.seeded()), proof.sampled(), proof.tables())
        failure = summary.failure
        proof.console.print(f"verdict: {title}: {summary.verdict}", highlight=False)
        reason = f"{title}: {failure}" if failure else None
        return RunFinished("failed" if failure else "finished", reason, summary.to_metrics(), summary)

    def _lossy(self, title: str) -> RunFinished:
        text = f"{title}: not lossless by design, so there is nothing to prove"
        Console().print(f"verdict: {text}", highlight=False)
        allowed = self.options.allow_lossy
        hint = "" if allowed else " (task.allow_lossy=true accepts that)"
        summary = VerifySummary(title, lossy=True)
        return RunFinished("finished" if allowed else "failed", None if allowed else text + hint, {}, summary)


@dataclass(frozen=True)
class _Proof:
    """One verification in progress."""

    options: VerifyOptions
    engine: Engine
    proposer: RandomLengths
    prompts: Sequence[Prompt]
    sampling: SamplingParams
    seed: int
    console: Console

    @property
    def sampled_options(self) -> SamplingParams:
        """The user's options, at a temperature above 0 and with few enough outcomes."""
        temperature = self.sampling.temperature or self.options.temperature
        return dataclasses.replace(self.sampling, temperature=temperature, top_k=self.options.top_k, logprobs=None)

    def tables(self) -> dict[str, Gate]:
        """The sampler alone against exact joint laws; every draft length from none to all occurs."""
        found = {}
        for drafter in ("one_hot", "probabilistic"):
            name = f"sampler, {drafter.replace('_', '-')} drafts"
            found[name] = TableModel.random(_TABLE_TOKENS, seed=1).gate(
                self.engine.sampler, alpha=self.options.alpha, num_samples=self.options.table_samples,
                num_tokens=_TABLE_TOKENS, num_drafts=self.engine.limits.num_speculative_tokens, drafter=drafter,
                first_seed=self.seed, device=self.engine.limits.device,
            )  # fmt: skip
            self._print(f"{name}: {found[name].sentence()}")
        return found

    def greedy(self) -> list[Equality]:
        """Token equality at temperature 0."""
        return self._equal("greedy", dataclasses.replace(self.sampling, temperature=0.0))

    def seeded(self) -> list[Equality]:
        """Token equality of sampled answers, where the sampler promises it."""
        if not self.engine.sampler.seed_exact:
            return []
        temperature = self.sampling.temperature or self.options.temperature
        return self._equal("same seed", dataclasses.replace(self.sampling, temperature=temperature))

    def _equal(self, what: str, sampling: SamplingParams) -> list[Equality]:
        limit = min(self.options.max_tokens, sampling.max_tokens)
        sampling = dataclasses.replace(
            sampling, max_tokens=limit, min_tokens=min(limit, sampling.min_tokens), logprobs=None
        )
        prompts = [rendered(prompt) for prompt in self.prompts]
        found = []
        for batch_size in self.options.batch_sizes:
            for self.proposer.active in (False, True):
                lengths = "drafts of random length" if self.proposer.active else "full drafts"
                label = f"{what}, batch {batch_size}, {lengths}"
                found.append(prove_equal(self.engine, label, prompts, sampling, batch_size, self.seed))
                self._show(found[-1])
        self.proposer.active = False
        return found

    def _show(self, one: Equality) -> None:
        verdict = "equal" if not one.differences else "equal up to ties" if one.passed else "DIFFERENT"
        counted = f"{one.requests} answers, {one.tokens} tokens, {one.drafted} drafts, {one.accepted} accepted"
        self._print(f"{one.what}: {verdict}; {counted}")

    def _print(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)

    def sampled(self) -> tuple[LawProof, ...]:
        """The exact law, for each of the first prompts."""
        options, found = self.options, []
        sampling = self.sampled_options
        for prompt in self.prompts[: options.sampled_prompts]:
            ids = echoing_prompt(self.engine, rendered(prompt), sampling, options.sampled_tokens)
            found.append(
                prove_law(
                    self.engine, ids, sampling, num_samples=options.samples, num_tokens=options.sampled_tokens,
                    first_seed=self.seed, alpha=options.alpha / options.sampled_prompts,
                )
            )  # fmt: skip
            self._show_law(prompt, found[-1])
        return tuple(found)

    def _show_law(self, prompt: Prompt, law: LawProof) -> None:
        how = f"temperature {self.sampled_options.temperature:g}, top_k {self.options.top_k}"
        self._print(
            f"sampled, prompt {prompt.id}, {how}: {law.num_samples} answers of {self.options.sampled_tokens} tokens, "
            f"{law.steps:.1f} verification steps each, {law.accepted} of {law.drafted} drafts accepted; "
            f"a bias of {law.detectable:.3f} of the joint law would be caught with probability {POWER:g}"
        )
        for name, gate in law.gates.items():
            self._print(f"  {name}: {gate.sentence()}")
