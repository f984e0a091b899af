"""What a verification step costs against the number of tokens it checks.

It explains a missing speed-up better than anything else: the ceiling is mean acceptance length over this factor.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from specflow.core.attention import QueryGroup
from specflow.core.batch import PackedBatch, TargetOutput
from specflow.core.request import Request
from specflow.core.sampling_params import SamplingParams
from specflow.engine.engine import Engine
from specflow.engine.graphs import Graphs
from specflow.schedulers.base import ScheduledRequest, StepPlan

DEFAULT_WIDTHS = (1, 2, 4, 8, 16)


def measure_cost_curve(
    engine: Engine, widths: Sequence[int] = DEFAULT_WIDTHS, context: int = 256, repeats: int = 9
) -> list[tuple[int, float]]:
    """Median seconds of one target pass for each width at batch 1, behind `context` tokens; the engine must be idle.

    Where decode steps run as graphs, so do these passes, and the device's time alone counts: run by the host they would
    all cost what launching them costs. Widths are measured in turn, so that a drift of the machine's speed touches all
    alike.
    """
    limits = engine.limits
    context = min(context, limits.max_model_len // 2)
    widths = [width for width in widths if context + width <= limits.max_model_len]
    blocks = -(-(context + max(widths)) // limits.block_size)
    if blocks >= limits.num_blocks:
        return []
    ids = np.random.default_rng(0).integers(0, engine.target.facts.num_token_ids, context + max(widths)).tolist()
    request = Request("cost-curve", ids, SamplingParams(), seed=0, slot=0, blocks=list(range(1, blocks + 1)))
    engine.buffers.enter(request)
    process_prompt(engine, request, context)
    run = _replays(engine, request, context, widths) or (lambda width: _forward(engine, request, context, width))
    seconds: dict[int, list[float]] = {width: [] for width in widths}
    for repeat in range(repeats + 1):
        for width in widths:
            elapsed = run(width)
            if repeat:
                seconds[width].append(elapsed)
    return [(width, statistics.median(seconds[width])) for width in widths]


def process_prompt(engine: Engine, request: Request, length: int) -> None:
    """Run the first `length` tokens of a request that has a slot and blocks, as prompts run."""
    _forward(engine, request, 0, length)


def _replays(engine: Engine, request: Request, start: int, widths: Sequence[int]) -> Callable[[int], float] | None:
    """Seconds of one pass of a width as a graph; None where decode steps are no graphs or the target cannot be one."""
    if engine.backend.decode != "graphs":
        return None
    graphs: Graphs[int, TargetOutput] = Graphs(
        lambda width: engine.target.forward(batches[width]), engine.limits.device
    )
    batches: dict[int, PackedBatch] = {}
    for width in widths:
        item = ScheduledRequest(request, start, width, width - 1, samples=True)
        batches[width] = _own(engine.buffers.pack(StepPlan((item,))), engine.limits.max_model_len)
        try:
            graphs.prepare(width)
        except Exception:  # whatever keeps a model from being captured; it is timed as it runs then
            return None

    def run(width: int) -> float:
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begun.record()
        graphs.run(width)
        ended.record()
        ended.synchronize()
        return begun.elapsed_time(ended) / 1000

    return run


def _own(batch: PackedBatch, most: int) -> PackedBatch:
    """A lone request's batch in tensors of its own, with bounds for lengths as decode steps have them."""
    attention = batch.attention
    group = QueryGroup(0, 1, 0, len(batch.token_ids), most, None, is_bound=True)
    positions, query_start = batch.positions.clone(), batch.query_start.clone()
    return replace(
        batch,
        positions=positions,
        slots=batch.slots.clone(),
        query_start=query_start,
        logit_rows=batch.logit_rows.clone(),
        attention=replace(
            attention,
            positions=positions,
            slot_mapping=attention.slot_mapping.clone(),
            seq_len=attention.seq_len.clone(),
            query_start=query_start,
            groups=(group,),
        ),
    )


def _forward(engine: Engine, request: Request, start: int, width: int) -> float:
    """Seconds of one target pass; long prompts run in pieces of the step budget."""
    begun = time.perf_counter()
    most = engine.limits.max_num_batched_tokens
    for first in range(start, start + width, most):
        length = min(most, start + width - first)
        # As many logits rows as tokens, like a real verification; a prompt needs only the last.
        item = ScheduledRequest(request, first, length, length - 1 if start else 0, samples=True)
        engine.target.forward(engine.buffers.pack(StepPlan((item,))))
        engine.backend.synchronize()
    return time.perf_counter() - begun
