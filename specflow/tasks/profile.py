"""`task=profile`: where the time of a decode step goes, against what the device's memory allows."""

import json
import statistics
from dataclasses import dataclass

import numpy as np
from rich.console import Console

from specflow.core.sampling_params import SamplingParams
from specflow.engine.build import assemble
from specflow.engine.cost_curve import measure_cost_curve
from specflow.engine.engine import Engine
from specflow.engine.step_parts import measure_copy_bandwidth, measure_parts, target_bytes
from specflow.errors import ConfigError
from specflow.metrics.profile import ProfileSummary, StepProfile
from specflow.metrics.summary import PLAIN, cost_points
from specflow.plugins.component import Kind
from specflow.report.profile import print_profile, profile_plot
from specflow.tasks.base import Task, TaskContext
from specflow.tracking.events import RunFinished, StepRecord

__all__ = ["ProfileOptions", "ProfileTask"]

_WIDTH = 120
_WARM_UP = 2  # steps before those that count


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """Options of `task=profile`. Raises `ConfigError` when a value is out of range."""

    batch_sizes: tuple[int, ...] = (1, 8)  # requests at the same time
    context: int = 256  # tokens of each request's prompt, drawn at random
    steps: int = 32  # decode steps measured, greedy
    query_tokens: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)  # widths of a target pass whose cost is measured
    repeats: int = 9  # passes of each width

    def __post_init__(self) -> None:
        for name in ("batch_sizes", "query_tokens"):
            values = getattr(self, name)
            if not values or min(values) < 1 or len(set(values)) < len(values):
                raise ConfigError(f"task.{name}={list(values)} must be different numbers of 1 or more.")
        for name in ("context", "steps", "repeats"):
            if getattr(self, name) < 1:
                raise ConfigError(f"task.{name}={getattr(self, name)} must be 1 or more.")


class ProfileTask(Task):
    """Times decode steps and their parts, with the proposer and without, and the cost of verification."""

    name = "profile"
    needs = (Kind.TARGET, Kind.PROPOSER, Kind.SAMPLER, Kind.SCHEDULER, Kind.BACKEND)

    def __init__(self, options: ProfileOptions) -> None:
        self.options = options

    def run(self, context: TaskContext) -> RunFinished:
        """See `Task.run`. Writes profile.json and profile.png."""
        engine = assemble(context.build)
        self._check(engine)
        steps = []
        for batch in self.options.batch_sizes:
            steps.append(self._measure(engine, PLAIN, batch))
            if engine.proposer is not None:
                steps.append(self._measure(engine, engine.proposer.name, batch))
        curve = measure_cost_curve(
            engine, sorted(self.options.query_tokens), self.options.context, repeats=self.options.repeats
        )
        summary = ProfileSummary(
            name=f"{engine.proposer.name if engine.proposer else PLAIN} on {engine.target.facts.name}",
            context=self.options.context,
            steps=steps,
            cost_curve=cost_points(curve) or (),
            copy_bandwidth=measure_copy_bandwidth(engine),
            really_ran=engine.describe(),
        )
        text = json.dumps(summary.to_dict(), indent=1, ensure_ascii=False)
        (context.output_dir / "profile.json").write_text(text, encoding="utf-8")
        (context.output_dir / "profile.png").write_bytes(profile_plot(summary))
        console = Console()
        # A file or pipe has no width of its own.
        print_profile(summary, console if console.is_terminal else Console(width=_WIDTH))
        return RunFinished("finished", None, summary.to_metrics(), summary)

    def _check(self, engine: Engine) -> None:
        """Raise `ConfigError` when the requests do not fit the engine."""
        options, limits = self.options, engine.limits
        if max(options.batch_sizes) > limits.max_num_seqs:
            raise ConfigError(
                f"task.batch_sizes={list(options.batch_sizes)} asks for more requests at the same time than "
                f"scheduler.max_num_seqs={limits.max_num_seqs} allows. Raise the latter."
            )
        needed = options.context + self._tokens(engine) + limits.num_speculative_tokens + 1
        if needed > limits.max_model_len:
            raise ConfigError(
                f"task.context={options.context} and task.steps={options.steps} need up to {needed} tokens per "
                f"request, but the context limit is {limits.max_model_len}. Lower one of them."
            )

    def _tokens(self, engine: Engine) -> int:
        """Output tokens after which every method has had enough steps, however many drafts are accepted."""
        return (self.options.steps + _WARM_UP + 2) * (engine.limits.num_speculative_tokens + 1)

    def _measure(self, engine: Engine, method: str, batch: int) -> StepProfile:
        speculate, options = method != PLAIN, self.options
        draw = np.random.default_rng(batch)
        most = engine.target.facts.num_token_ids
        prompts = [draw.integers(0, most, options.context).tolist() for _ in range(batch)]
        records: list[StepRecord] = []
        engine.generate(
            prompts,
            SamplingParams(max_tokens=self._tokens(engine), ignore_eos=True),
            speculate=speculate,
            on_step=records.append,
        )
        whole = [one for one in records if one.num_prompt_tokens == 0 and one.num_requests == batch]
        counted = whole[_WARM_UP : _WARM_UP + options.steps]
        inside = measure_parts(engine, batch, options.context, drafts=speculate)
        return StepProfile(
            method=method,
            batch_size=batch,
            num_query_tokens=1 + (engine.limits.num_speculative_tokens if speculate else 0),
            step_seconds=statistics.median(one.total_seconds for one in counted),
            parts=inside or _parts_of(counted),
            target_bytes=target_bytes(engine, batch, options.context),
        )


def _parts_of(records: list[StepRecord]) -> dict[str, float]:
    """Medians of what the host timed; nothing for steps that ran as one piece."""
    timed = [one for one in records if not one.undivided_seconds]
    if not timed:
        return {}
    return {
        "target": statistics.median(one.target_seconds for one in timed),
        "verify": statistics.median(one.sample_seconds for one in timed),
        "draft": statistics.median(one.propose_seconds for one in timed),
    }
