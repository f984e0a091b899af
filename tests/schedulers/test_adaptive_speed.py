"""Adaptive lengths against every fixed one, in a world whose costs and acceptance are known: no machine's noise.

Costs are those of a small target on a processor core: a second token costs half a step, then few until the pass becomes
compute-bound. The scheduler starts with the pass over one request as it would be measured, and sees the times of steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from specflow.core.limits import EngineLimits
from specflow.core.request import Request
from specflow.core.sampling_params import SamplingParams
from specflow.proposers.base import PassCost
from specflow.schedulers.adaptive import AdaptiveOptions, AdaptiveScheduler
from specflow.schedulers.continuous import ContinuousOptions, ContinuousScheduler
from specflow.tracking.events import StepRecord

K = 7
TOKENS = 160


@dataclass(frozen=True)
class World:
    """What a method's drafts are worth and cost."""

    chance: float  # of the first draft
    decay: float = 0.95  # of a draft's chance against the one before it
    serial: float = 0.0  # milliseconds of drafting per draft
    parallel: float = 0.0  # milliseconds of drafting a round, whatever its length
    found: float = 1.0  # rounds in which there are drafts at all


def pass_ms(requests: int, tokens: int) -> float:
    """Milliseconds of the target."""
    return 2.0 + (1.0 if tokens > 1 else 0.0) + 0.12 * max(0, tokens - 4) + 0.05 * requests


def simulate(scheduler: ContinuousScheduler, phases: Sequence[tuple[int, int, World]], seed: int) -> float:
    """Tokens per second over phases of (requests in all, at the same time, world)."""
    draws = np.random.default_rng(seed)
    clock, tokens, number = 0.0, 0, 0
    for total, together, world in phases:
        waiting, running = total, set[str]()
        while waiting or running:
            while waiting and len(running) < together:
                number += 1
                one = Request(f"r{number}", [1] * 8, SamplingParams(max_tokens=TOKENS), seed=0)
                scheduler.add(one)
                running.add(one.request_id)
                waiting -= 1
            done, elapsed, emitted = _step(scheduler, world, draws)
            clock += elapsed
            tokens += emitted
            for request in done:
                scheduler.release(request)
                running.discard(request.request_id)
    return 1000 * tokens / clock


def _step(scheduler: ContinuousScheduler, world: World, draws: np.random.Generator) -> tuple[list[Request], float, int]:
    """One step: who ended, its milliseconds and its tokens."""
    plan = scheduler.plan()
    emitted, drafted, accepted = 0, [], []
    for item in plan.scheduled:
        chance, kept = world.chance, 0
        while kept < item.num_drafts and draws.random() < chance:
            kept, chance = kept + 1, chance * world.decay
        item.request.output_ids.extend([1] * (kept + 1))
        emitted += kept + 1
        if item.num_drafts:
            drafted.append(item.num_drafts)
            accepted.append(kept)
        scheduler.commit(item, kept + 1, kept)
    going = [item.request for item in plan.scheduled if len(item.request.output_ids) < TOKENS]
    longest = 0
    for request in going:
        most = scheduler.max_drafts(request)
        longest = max(longest, most)
        request.num_drafts = most if draws.random() < world.found else 0
    requests, prompt = len(plan.scheduled), sum(item.length for item in plan.scheduled if item.start == 0)
    target = pass_ms(requests, plan.num_tokens) * (1 + 0.1 * abs(draws.standard_normal()))
    drafting = (world.serial * longest + world.parallel) * bool(longest)
    record = StepRecord(
        1, requests, plan.num_tokens, prompt, emitted, tuple(drafted), tuple(accepted), target / 1000, 0.0002,
        drafting / 1000, (target + drafting + 0.4) / 1000,
    )  # fmt: skip
    scheduler.observe(record)
    done = [item.request for item in plan.scheduled if len(item.request.output_ids) >= TOKENS]
    return done, target + drafting + 0.4, emitted


def limits(most: int) -> EngineLimits:
    return EngineLimits(
        max_num_seqs=16, max_model_len=1000, max_num_batched_tokens=2048, block_size=16, num_blocks=2000,
        num_speculative_tokens=most, lookahead_tokens=0, vocab_size=10, device=torch.device("cpu"), dtype=torch.float32,
    )  # fmt: skip


def fixed(length: int) -> ContinuousScheduler:
    scheduler = ContinuousScheduler(ContinuousOptions())
    scheduler.configure(limits(length))
    return scheduler


def adaptive() -> ContinuousScheduler:
    scheduler = AdaptiveScheduler(AdaptiveOptions())
    scheduler.configure(limits(K))
    scheduler.calibrate([PassCost(1, tokens, pass_ms(1, tokens) / 1000) for tokens in (1, 2, 4, 8, 16, 32, 64, 128)])
    return scheduler


def speeds(phases: Sequence[tuple[int, int, World]]) -> tuple[float, dict[int, float]]:
    """Adaptive, and every fixed length; means over three seeds."""

    def mean(make: Callable[[], ContinuousScheduler]) -> float:
        return float(np.mean([simulate(make(), phases, seed) for seed in range(3)]))

    return mean(adaptive), {length: mean(lambda length=length: fixed(length)) for length in range(K + 1)}


WORLDS = {
    "parallel, good": World(0.85, parallel=0.6),
    "parallel, bad": World(0.35, parallel=0.6),
    "serial, good": World(0.85, serial=0.5),
    "serial, middling": World(0.6, serial=0.3),
    "found rarely": World(0.8, parallel=0.01, found=0.2),
    "hopeless": World(0.05, parallel=0.5),
}


@pytest.mark.parametrize("together", [1, 4, 16])
@pytest.mark.parametrize("name", WORLDS)
def test_close_to_the_best_fixed_length_where_nothing_changes(name: str, together: int) -> None:
    found, every = speeds([(max(4, 2 * together), together, WORLDS[name])])
    assert found >= 0.97 * max(every.values()), {length: round(speed) for length, speed in every.items()}


def test_faster_than_any_fixed_length_where_load_and_text_change() -> None:
    good, bad = World(0.85, parallel=0.6), World(0.3, parallel=0.6)
    phases = [(3, 1, good), (16, 16, good), (3, 1, bad), (16, 16, bad)] * 2
    found, every = speeds(phases)
    assert found > 1.03 * max(every.values()), {length: round(speed) for length, speed in every.items()}
