"""`task=generate`: text for prompts given on the command line, as it is written."""

import sys
import time
from dataclasses import dataclass

from rich.console import Console

from specflow.core.sampling_params import SamplingParams
from specflow.engine.build import assemble
from specflow.engine.engine import Engine
from specflow.engine.outputs import RequestOutput
from specflow.errors import ConfigError
from specflow.metrics.acceptance import AcceptanceCounts
from specflow.options import build_options
from specflow.plugins.component import Kind
from specflow.tasks.base import Task, TaskContext
from specflow.tasks.measure import request_row, seeded, template_warning
from specflow.tracking.events import RunFinished, Series, StepRecord


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Options of `task=generate`."""

    prompts: tuple[str, ...] = ()  # texts to continue; a chat template is applied with chat=true
    stream: bool = True  # show text as it comes (for one prompt; several are shown one after the other)
    chat: bool = False  # treat each prompt as a user's message

    def __post_init__(self) -> None:
        if any(not prompt for prompt in self.prompts):
            raise ConfigError("task.prompts holds an empty prompt: there is nothing to continue.")


class GenerateTask(Task):
    """Continues each prompt with the composed engine."""

    name = "generate"
    needs = (Kind.TARGET, Kind.PROPOSER, Kind.SAMPLER, Kind.SCHEDULER, Kind.BACKEND)

    def __init__(self, options: GenerateOptions) -> None:
        self.options = options

    def run(self, context: TaskContext) -> RunFinished:
        """See `Task.run`. Raises `ConfigError` without prompts."""
        if not self.options.prompts:
            raise ConfigError("task=generate has nothing to do: give it prompts, e.g. 'task.prompts=[\"import os\"]'.")
        engine = assemble(context.build)
        sampling: SamplingParams = build_options(SamplingParams, context.config.get("sampling") or {}, "sampling")
        method = engine.proposer.name if engine.proposer else "plain"
        series = Series(f"generate, {method}", method, 1, len(self.options.prompts), max_tokens=sampling.max_tokens)
        if warning := template_warning(engine.proposer, [self.options.chat] * len(self.options.prompts)):
            Console(stderr=True).print(warning, style="yellow", highlight=False)
        counts, seed = AcceptanceCounts(), int(context.config.get("seed", 0))
        begun = time.perf_counter()
        outputs = [
            self._one(engine, prompt, seeded(sampling, seed, index), counts, series, context)
            for index, prompt in enumerate(self.options.prompts)
        ]
        seconds = time.perf_counter() - begun
        tokens = sum(len(output.token_ids) for output in outputs)
        metrics = {"tokens_per_second": tokens / seconds, "output_tokens": float(tokens)}
        line = f"{tokens} tokens in {seconds:.2f} s, {tokens / seconds:.0f} tokens/s, {method}"
        if (length := counts.mean_acceptance_length) is not None:
            metrics["mean_acceptance_length"] = length
            line += f", mean acceptance length {length:.2f}"
        Console(stderr=True).print(line, style="dim", highlight=False)
        return RunFinished("finished", metrics=metrics)

    def _one(
        self,
        engine: Engine,
        prompt: str,
        sampling: SamplingParams,
        counts: AcceptanceCounts,
        series: Series,
        context: TaskContext,
    ) -> RequestOutput:
        """Write one prompt and its continuation to standard output."""

        def on_step(record: StepRecord) -> None:
            for drafted, accepted in zip(record.drafted, record.accepted, strict=True):
                counts.add(drafted, accepted)
            context.hooks.specflow_step_finished(record=record)

        given = [{"role": "user", "content": prompt}] if self.options.chat else prompt
        _write("" if self.options.chat else prompt)
        stream = self.options.stream
        on_chunk = (lambda chunk: _write(chunk.text)) if stream else None
        output = engine.generate([given], sampling, on_chunk=on_chunk, on_step=on_step)[0]
        _write("\n" if stream else output.text + "\n")
        context.hooks.specflow_request_finished(row=request_row(output, series))
        return output


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
