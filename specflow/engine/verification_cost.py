"""What verification costs, for proposers that choose how many drafts to submit: see `Proposer.calibrate`."""

import statistics
import time
from collections.abc import Sequence

import numpy as np

from specflow.core.request import Request
from specflow.core.sampling_params import SamplingParams
from specflow.engine.cost_curve import measure_cost_curve, process_prompt
from specflow.engine.engine import Engine
from specflow.proposers.base import PassCost
from specflow.schedulers.base import ScheduledRequest, StepPlan

_PATIENCE = 0.5  # seconds of one pass from which on no wider one is measured
_WIDEST = 1024
_MANY = 8  # requests that a pass is measured for, besides one
_CONTEXT = 64  # tokens before them
_REPEATS = 5


def measure_verification(engine: Engine) -> list[PassCost]:
    """Median seconds of target passes of one request over 1, 2, 4, … tokens, up to what verification may need at once,
    and of eight requests. Stops where a pass takes half a second, so that a large target is not kept from its work.
    The engine must be idle.

    Where decode steps are prepared for the device they have K + 1 rows for every request, used or not: then a draft
    costs nothing more, and a single point says so.
    """
    limits, width = engine.limits, engine.limits.num_speculative_tokens + 1
    if engine.loop is not None:
        return [PassCost(1, tokens, seconds) for tokens, seconds in measure_cost_curve(engine, (width,), _CONTEXT)]
    most = min(limits.max_num_seqs * width, limits.max_num_batched_tokens, limits.max_model_len // 2, _WIDEST)
    widths: list[int] = []
    slow = False
    for tokens in _doubled(most):
        widths.append(tokens)
        points = measure_cost_curve(engine, (tokens,), _CONTEXT, repeats=1)
        slow = not points or points[0][1] > _PATIENCE
        if slow:
            break
    points = measure_cost_curve(engine, widths, _CONTEXT, _REPEATS)
    found = [PassCost(1, tokens, seconds) for tokens, seconds in points]
    requests = _enter(engine, min(_MANY, limits.max_num_seqs, limits.max_num_batched_tokens // width), width)
    if len(requests) > 1 and not slow:
        found += [_measure(engine, requests, each) for each in _doubled(width)]
    return found


def _doubled(most: int) -> list[int]:
    """1, 2, 4, … and most."""
    return sorted({most, *(1 << power for power in range(most.bit_length()) if 1 << power <= most)})


def _enter(engine: Engine, count: int, width: int) -> list[Request]:
    """Requests with a prompt that has been processed, as many as there are blocks for."""
    limits = engine.limits
    context = max(1, min(_CONTEXT, limits.max_model_len - width))
    blocks = -(-(context + width) // limits.block_size)
    count = min(count, (limits.num_blocks - 1) // blocks)
    ids = np.random.default_rng(0).integers(0, engine.target.facts.num_token_ids, context + width).tolist()
    requests = []
    for slot in range(count):
        own = list(range(1 + slot * blocks, 1 + (slot + 1) * blocks))
        request = Request(f"cost-{slot}", ids, SamplingParams(), seed=0, slot=slot, blocks=own)
        engine.buffers.enter(request)
        process_prompt(engine, request, context)
        requests.append(request)
    return requests


def _measure(engine: Engine, requests: Sequence[Request], width: int) -> PassCost:
    """A pass over the last `width` tokens of every request."""
    start = len(requests[0].prompt_ids) - engine.limits.num_speculative_tokens - 1
    items = tuple(ScheduledRequest(request, start, width, width - 1, samples=True) for request in requests)
    seconds = []
    for _ in range(_REPEATS + 1):
        begun = time.perf_counter()
        engine.target.forward(engine.buffers.pack(StepPlan(items)))
        engine.backend.synchronize()
        seconds.append(time.perf_counter() - begun)
    return PassCost(len(requests), len(requests) * width, statistics.median(seconds[1:]))
