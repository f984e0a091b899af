"""Passes that explore: each method once per batch size, at its largest length, in the run that tunes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from specflow.core.sampling_params import SamplingParams
from specflow.engine.build import assemble
from specflow.engine.engine import Engine
from specflow.engine.verification_cost import measure_verification
from specflow.errors import ConfigError, SpecflowError
from specflow.metrics.summary import PLAIN
from specflow.options import build_options
from specflow.plugins.component import Kind
from specflow.plugins.registry import Registry
from specflow.proposers.base import PassCost
from specflow.runner import check
from specflow.schedulers.step_costs import StepCosts
from specflow.sweep.kept_targets import KeptTarget
from specflow.tasks.base import TaskContext
from specflow.tasks.baselines import MOST_DRIFT, feel_pulse
from specflow.tasks.measure import Measurement, measure
from specflow.tracking.events import Series, StepRecord
from specflow.tuning.candidates import Composition
from specflow.tuning.exploration import Exploration, explore_steps, learn_costs
from specflow.tuning.prediction import Cell, predict
from specflow.tuning.selection import Budget
from specflow.workloads.base import Prompt, Workload
from specflow.workloads.prompt_list import fit_template

__all__ = ["Explorer"]

_SHORT_TOKENS = 12  # output tokens of a request in a pass that only times steps


@dataclass
class Explorer:
    """Runs the passes and predicts from them. One target is loaded for all."""

    context: TaskContext
    composition: Composition
    budget: Budget
    kept: KeptTarget = field(default_factory=KeptTarget)
    cells: list[Cell] = field(default_factory=list)
    explorations: list[Exploration] = field(default_factory=list)
    costs: dict[str, StepCosts] = field(default_factory=dict)  # by method
    lengths: dict[str, list[int]] = field(default_factory=dict)  # by method: those that it can draft
    unusable: dict[str, str] = field(default_factory=dict)  # methods without a result, with the reason
    really_ran: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    _points: list[PassCost] = field(default_factory=list)
    _plain: list[list[StepRecord]] = field(default_factory=list)
    _pulse: float | None = None  # seconds of a target pass when plain decoding was explored

    def __post_init__(self) -> None:
        config = self.context.config
        self.sampling: SamplingParams = build_options(SamplingParams, config.get("sampling") or {}, "sampling")
        self._workload: Workload = self.context.build(Kind.WORKLOAD)
        self._loaded = self._workload.load()

    def explore(self, methods: Sequence[str]) -> None:
        """Plain decoding, then every method; one that cannot be used is put among the unusable ones."""
        engine = self._engine(PLAIN, 0)
        self._check_batch_sizes(engine)
        self.really_ran = engine.describe()
        self._points = measure_verification(engine)
        self._pulse = feel_pulse(engine)
        for batch_size in self.composition.options.batch_sizes:
            self._warm_up(engine, PLAIN, batch_size)
            done = self._pass(engine, PLAIN, batch_size)
            self._plain.append(done.steps)
            seen = self._seen(done, 0)
            self.explorations.append(seen)
            self.cells.append(Cell(PLAIN, 0, batch_size, seen.tokens_per_second, 1.0, explored=True))
        for method in methods:
            try:
                self._explore(method)
            except SpecflowError as error:
                self.unusable[method] = str(error).splitlines()[0]
                self.kept.drop()

    def _explore(self, method: str) -> None:
        """Passes at the largest length, and at all others where drafts of a smaller one are not their beginning."""
        engine, lengths = self._longest(method)
        nested = engine.proposer is not None and engine.proposer.drafts_nest
        costs = self.costs[method] = self._new_costs(engine)
        tempo = self._tempo(engine)
        found = self._passes(engine, method, costs)
        for length in lengths[-2::-1] if not nested else []:
            found += self._passes(self._engine(method, length), method, costs)
        if nested and len(lengths) > 1:
            self._time_steps(self._engine(method, lengths[0]), method, costs)
        self.lengths[method] = lengths
        self.explorations += found
        for seen in found:
            cells = predict(seen, costs, lengths if nested else [seen.num_speculative_tokens])
            self.cells += [replace(cell, predicted=tempo * (cell.predicted or 0.0)) for cell in cells]

    def _tempo(self, engine: Engine) -> float:
        """How much slower the machine has become since plain decoding was explored; 1 where that is within its noise.

        Predictions of different methods are compared, so they have to be of one machine.
        """
        now = feel_pulse(engine)
        if now is None or self._pulse is None or 1 / MOST_DRIFT <= now / self._pulse <= MOST_DRIFT:
            return 1.0
        return now / self._pulse

    def _longest(self, method: str) -> tuple[Engine, list[int]]:
        """The engine with the largest length that the method can draft, and all lengths up to it."""
        lengths = sorted(self.composition.options.num_speculative_tokens)
        while True:
            try:
                return self._engine(method, lengths[-1]), lengths
            except ConfigError as error:
                if len(lengths) == 1 or "num_speculative_tokens" not in str(error):
                    raise
                lengths.pop()

    def _engine(self, method: str, length: int) -> Engine:
        plan = check(self.composition.with_method(method, length), self._registry)
        return assemble(self.kept.building(plan.build, plan.config))

    @property
    def _registry(self) -> Registry:
        assert self.context.registry is not None
        return self.context.registry

    def _check_batch_sizes(self, engine: Engine) -> None:
        sizes = self.composition.options.batch_sizes
        if max(sizes) > engine.limits.max_num_seqs:
            raise ConfigError(
                f"task.batch_sizes={list(sizes)} asks for more requests at the same time than "
                f"scheduler.max_num_seqs={engine.limits.max_num_seqs} allows. Raise the latter."
            )

    def _new_costs(self, engine: Engine) -> StepCosts:
        """Costs that know the passes measured at the start, and the steps of plain decoding."""
        alone = [(cost.tokens, cost.seconds) for cost in self._points if cost.requests == 1]
        costs = StepCosts(alone, None, engine.limits.max_num_batched_tokens, learns=True)
        for cost in self._points:
            if cost.requests > 1:
                costs.believe(cost.requests, cost.tokens, cost.seconds)
        for steps in self._plain:
            learn_costs(costs, 0, steps)
        return costs

    # -- passes ----------------------------------------------------------------------------------------------------
    def _passes(self, engine: Engine, method: str, costs: StepCosts) -> list[Exploration]:
        """One pass per batch size at the engine's length."""
        length, done = engine.limits.num_speculative_tokens, []
        for batch_size in self.composition.options.batch_sizes:
            self._warm_up(engine, method, batch_size)
            done.append(self._pass(engine, method, batch_size))
            learn_costs(costs, length, done[-1].steps)
        return [self._seen(one, length) for one in done]

    def _time_steps(self, engine: Engine, method: str, costs: StepCosts) -> None:
        """A few steps at another length, for the slope of the costs."""
        whole = max(1, sum(seen.output_tokens for seen in self.explorations) / max(1, len(self.explorations)))
        sampling = replace(self.sampling, max_tokens=min(_SHORT_TOKENS, self.sampling.max_tokens))
        for batch_size in self.composition.options.batch_sizes:
            prompts = self._prompts(engine)[:batch_size]
            done = self._run(engine, method, batch_size, prompts, sampling, warmup=True)
            learn_costs(costs, engine.limits.num_speculative_tokens, done.steps)
            self.budget.used += sum(len(output.token_ids) for output in done.outputs) / whole

    def _warm_up(self, engine: Engine, method: str, batch_size: int) -> None:
        if count := self.composition.options.warmup_requests:
            self._run(engine, method, batch_size, self._prompts(engine)[:count], self.sampling, warmup=True)
        if engine.proposer is not None:
            engine.proposer.reset()  # nothing learnt from the same prompts

    def _pass(self, engine: Engine, method: str, batch_size: int) -> Measurement:
        self.budget.used += 1
        return self._run(engine, method, batch_size, self._prompts(engine), self.sampling)

    def _prompts(self, engine: Engine) -> list[Prompt]:
        has_template = bool(getattr(engine.target.tokenizer, "chat_template", None))
        return list(fit_template(self._workload, self._loaded, has_template)[0])

    def _run(
        self,
        engine: Engine,
        method: str,
        batch_size: int,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        warmup: bool = False,
    ) -> Measurement:
        length = engine.limits.num_speculative_tokens
        series = Series(
            name=f"exploring {method}{f' K={length}' if length else ''}, batch {batch_size}",
            method=method,
            batch_size=batch_size,
            num_requests=sum(len(prompt.turns) for prompt in prompts),
            warmup=warmup,
            max_tokens=sampling.max_tokens,
        )
        seed = int(self.context.config.get("seed", 0))
        return measure(engine, prompts, sampling, series, self.context.hooks, seed=seed)

    @staticmethod
    def _seen(done: Measurement, length: int) -> Exploration:
        tokens = sum(len(output.token_ids) for output in done.outputs)
        return explore_steps(done.series.method, length, done.series.batch_size, done.steps, tokens, done.wall_seconds)
