"""What a verification step costs against the number of tokens it checks.

It explains a missing speed-up better than anything else: the ceiling is mean acceptance length over this factor.
"""

import statistics
import time
from collections.abc import Sequence

import numpy as np

from specflow.core.request import Request
from specflow.core.sampling_params import SamplingParams
from specflow.engine.engine import Engine
from specflow.schedulers.base import ScheduledRequest, StepPlan

DEFAULT_WIDTHS = (1, 2, 4, 8, 16)


def measure_cost_curve(
    engine: Engine, widths: Sequence[int] = DEFAULT_WIDTHS, context: int = 256, repeats: int = 9
) -> list[tuple[int, float]]:
    """Median seconds of one target pass for each width at batch 1, behind `context` tokens; the engine must be idle.

    Widths are measured in turn, so that a drift of the machine's speed touches all alike.
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
    _forward(engine, request, 0, context)
    seconds: dict[int, list[float]] = {width: [] for width in widths}
    for repeat in range(repeats + 1):
        for width in widths:
            elapsed = _forward(engine, request, context, width)
            if repeat:
                seconds[width].append(elapsed)
    return [(width, statistics.median(seconds[width])) for width in widths]


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
