"""Running a workload through an engine and keeping what was measured."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from specflow.core.sampling_params import SamplingParams, seeded
from specflow.engine.engine import Engine
from specflow.engine.losslessness import LATER_TURN
from specflow.engine.outputs import RequestOutput
from specflow.engine.prompts import PromptLike
from specflow.proposers.base import Proposer
from specflow.tracking.events import RequestRow, Series, StepRecord
from specflow.workloads.base import Prompt
from specflow.workloads.turns import answer_sampling, render_turn


@dataclass
class Measurement:
    """One pass over the workload."""

    series: Series
    rows: list[RequestRow] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    outputs: list[RequestOutput] = field(default_factory=list)
    wall_seconds: float = 0.0
    peak_memory_bytes: int = 0


def measure(
    engine: Engine,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    series: Series,
    hooks: Any,
    *,
    seed: int,
    request_rate: float | None = None,
) -> Measurement:
    """Run every turn of every prompt, at most `series.batch_size` requests at a time, telling the listeners.

    Turn t of all conversations runs together; later turns contain the target's own earlier answers.
    """
    result = Measurement(series)
    hooks.specflow_series_started(series=series)
    conversations: list[list[dict[str, str]]] = [[] for _ in prompts]
    engine.backend.reset_peak_memory()
    for turn in range(max(len(prompt.turns) for prompt in prompts)):
        chosen = [index for index, prompt in enumerate(prompts) if turn < len(prompt.turns)]
        texts = [render_turn(prompts[index], turn, conversations[index]) for index in chosen]
        _run_turn(engine, prompts, chosen, texts, turn, sampling, result, hooks, seed, request_rate)
        for index, output in zip(chosen, result.outputs[-len(chosen) :], strict=True):
            conversations[index].append({"role": "assistant", "content": output.text})
    result.peak_memory_bytes = engine.backend.peak_memory_bytes()
    return result


def _run_turn(
    engine: Engine,
    prompts: Sequence[Prompt],
    chosen: Sequence[int],
    texts: Sequence[PromptLike],
    turn: int,
    sampling: SamplingParams,
    result: Measurement,
    hooks: Any,
    seed: int,
    request_rate: float | None,
) -> None:
    series = result.series

    def on_step(record: StepRecord) -> None:
        result.steps.append(record)
        hooks.specflow_step_finished(record=record)

    def on_finish(output: RequestOutput) -> None:
        result.rows.append(request_row(output, series))
        hooks.specflow_request_finished(row=result.rows[-1])

    begun = time.perf_counter()
    result.outputs += engine.generate(
        texts,
        [seeded(answer_sampling(prompts[i], sampling), seed, i + turn * len(prompts)) for i in chosen],
        speculate=series.method != "plain",
        concurrency=series.batch_size,
        arrivals=_arrivals(len(chosen), request_rate, seed),
        request_ids=[f"{prompts[index].id}{f'{LATER_TURN}{turn + 1}' if turn else ''}" for index in chosen],
        on_step=on_step,
        on_finish=on_finish,
    )
    result.wall_seconds += time.perf_counter() - begun


def rendered(prompt: Prompt) -> PromptLike:
    """The first turn as the engine takes it."""
    return render_turn(prompt, 0, [])


def template_warning(proposer: Proposer | None, chat: Sequence[bool]) -> str | None:
    """A sentence when prompts are plain text (chat: of each, whether it is a conversation) and the drafter only knows
    conversations, else None."""
    plain = chat.count(False)
    if proposer is None or not proposer.trained_on_chat or not plain:
        return None
    return (
        f"warning: {proposer.name} was trained on conversations in a chat template, and {plain} of {len(chat)} prompts "
        "are plain text: expect few accepted drafts"
    )


def _arrivals(count: int, request_rate: float | None, seed: int) -> list[float] | None:
    """Poisson arrivals in seconds from the start, or None for all at once."""
    if request_rate is None:
        return None
    gaps = np.random.default_rng(seed).exponential(1 / request_rate, count)
    return np.cumsum(gaps).tolist()


def request_row(output: RequestOutput, series: Series) -> RequestRow:
    """A finished request as a row of the results."""
    times = output.token_times
    return RequestRow(
        series=series.name,
        method=series.method,
        batch_size=series.batch_size,
        repeat=series.repeat,
        request_id=output.request_id,
        prompt_tokens=len(output.prompt_ids),
        output_tokens=len(output.token_ids),
        finish_reason=str(output.finish_reason),
        ttft_seconds=times[0] - output.arrival if times else None,
        latency_seconds=(times[-1] if times else output.finished) - output.arrival,
        inter_token_seconds=tuple(after - before for before, after in pairwise(times)),
        rounds=output.rounds,
        drafted=output.drafted,
        accepted=output.accepted,
        token_ids=output.token_ids,
        text=output.text,
    )
