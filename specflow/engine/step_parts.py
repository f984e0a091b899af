"""What a decode step that runs as one piece consists of, and what memory traffic alone would take."""

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from specflow.core.request import Request
from specflow.core.sampling_params import SamplingParams
from specflow.engine.cost_curve import process_prompt
from specflow.engine.decode_state import DecodeState
from specflow.engine.decode_step import DecodeStep, Variant
from specflow.engine.engine import Engine
from specflow.engine.graphs import Calls, Graphs
from specflow.engine.timing import PartClock

PARTS = ("target", "verify", "draft", "books")
_COPY_BYTES = {"cuda": 2**30, "cpu": 2**28}


def measure_parts(
    engine: Engine, batch: int, context: int, *, drafts: bool, repeats: int = 20
) -> dict[str, float] | None:
    """Median seconds that the device spends on each of `PARTS` of a greedy decode step; the engine must be idle.

    batch requests of `context` tokens; drafts: with the proposer, else plain decoding. None where steps do not run as
    one piece, or where the parts of a graph cannot be timed (ROCm).
    """
    limits, backend = engine.limits, engine.backend
    graphs = backend.decode == "graphs"
    if engine.loop is None or not engine.loop.whole or (graphs and torch.version.hip):
        return None
    width = limits.num_speculative_tokens if drafts else 0
    requests = _requests(engine, batch, context + (repeats + 4) * (width + 1), context)
    if not requests:
        return None
    state = DecodeState(limits, batch)
    parts = engine.target, engine.proposer if drafts else None, engine.sampler
    step, clock = DecodeStep(*parts, engine.buffers, state, limits), PartClock(limits.device)
    step.mark = clock.mark
    calls: Calls[Variant, None] = Graphs(step.run, limits.device) if graphs else Calls(step.run)
    variant = Variant(batch, width, "greedy", drafts)
    state.load(requests, [limits.max_model_len] * batch)
    state.seat([request.slot for request in requests])
    found: list[dict[str, float]] = []
    with torch.inference_mode():
        calls.prepare(variant)
        for _ in range(repeats):
            calls.run(variant)
            found.append(clock.read())
    return {part: statistics.median(one.get(part, 0.0) for one in found) for part in PARTS}


def _requests(engine: Engine, batch: int, length: int, context: int) -> list[Request]:
    """Requests that have processed `context` tokens, with blocks for `length`; none when there are too few blocks."""
    limits = engine.limits
    each = -(-(length + limits.lookahead_tokens) // limits.block_size)
    if batch * each >= limits.num_blocks or length > limits.max_model_len:
        return []
    draw, requests = np.random.default_rng(0), []
    for slot in range(batch):
        ids = draw.integers(0, engine.target.facts.num_token_ids, context + 1).tolist()
        blocks = list(range(1 + slot * each, 1 + (slot + 1) * each))
        request = Request(f"parts-{slot}", ids, SamplingParams(), seed=slot, slot=slot, blocks=blocks)
        engine.buffers.enter(request)
        process_prompt(engine, request, context)
        requests.append(request)
    return requests


def target_bytes(engine: Engine, batch: int, context: int) -> int:
    """Least bytes that a target pass reads: every weight once, and keys and values of `context` tokens per request.

    An embedding table of its own is looked up and does not count; experts count as if all were used.
    """
    facts = engine.target.facts
    weights = facts.num_parameters * facts.dtype.itemsize
    try:
        tables = engine.target.token_tables()
    except Exception:  # a target that lends none: its embedding stays in the sum
        return weights + batch * context * facts.kv_bytes_per_token
    if tables.embedding.data_ptr() != tables.head.data_ptr():
        weights -= tables.embedding.numel() * tables.embedding.element_size()
    return weights + batch * context * facts.kv_bytes_per_token


def measure_copy_bandwidth(engine: Engine, repeats: int = 10) -> float:
    """Bytes per second, read plus written, of a large copy within the device's memory."""
    device = engine.limits.device
    source = torch.ones(_COPY_BYTES.get(device.type, 2**28), dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    seconds = [_timed(lambda: copy.copy_(source), engine) for _ in range(repeats + 2)][2:]
    return 2 * len(source) / statistics.median(seconds)


def _timed(call: Callable[[], object], engine: Engine) -> float:
    engine.backend.synchronize()
    begun = time.perf_counter()
    call()
    engine.backend.synchronize()
    return time.perf_counter() - begun
