"""The adaptive scheduler alone: integers in, integers out."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from specflow.core.limits import EngineLimits
from specflow.core.request import FinishReason, Request
from specflow.core.sampling_params import SamplingParams
from specflow.errors import ConfigError
from specflow.proposers.base import PassCost
from specflow.schedulers.adaptive import AdaptiveOptions, AdaptiveScheduler
from specflow.tracking.events import StepRecord

FREE = ((1, 1.0),)
DEAR = ((1, 1.0), (100, 100.0))
# A request or two: further tokens cost next to nothing; from eight tokens on they cost their share.
LOADED = ((1, 1.0), (8, 1.05), (100, 13.0))


def make(drafts: int = 4, **options: Any) -> AdaptiveScheduler:
    given = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "block_size": 4, **options}
    chosen = AdaptiveOptions(**given)
    scheduler = AdaptiveScheduler(chosen)
    scheduler.configure(
        EngineLimits(
            max_num_seqs=chosen.max_num_seqs,
            max_model_len=20000,
            max_num_batched_tokens=chosen.max_num_batched_tokens,
            block_size=chosen.block_size,
            num_blocks=50000,
            num_speculative_tokens=drafts,
            lookahead_tokens=0,
            vocab_size=100,
            device=torch.device("cpu"),
            dtype=torch.float32,
        )
    )
    return scheduler


def add(scheduler: AdaptiveScheduler, *names: str, max_tokens: int = 19000) -> list[Request]:
    found = [Request(name, [1, 2, 3], SamplingParams(max_tokens=max_tokens), seed=0) for name in names]
    for one in found:
        scheduler.add(one)
    return found


def step(scheduler: AdaptiveScheduler, accept: dict[str, int] | int = 99) -> dict[str, int]:
    """One step in which each request accepts so many drafts at most; the drafts that were verified."""
    plan = scheduler.plan()
    for item in plan.scheduled:
        most = accept if isinstance(accept, int) else accept[item.request.request_id]
        kept = min(most, item.num_drafts)
        item.request.output_ids.extend([1] * (kept + 1))
        scheduler.commit(item, kept + 1, kept)
    for item in plan.scheduled:
        item.request.num_drafts = scheduler.max_drafts(item.request)
    return {item.request.request_id: item.num_drafts for item in plan.scheduled}


def steps(scheduler: AdaptiveScheduler, number: int, accept: dict[str, int] | int = 99) -> list[dict[str, int]]:
    return [step(scheduler, accept) for _ in range(number)]


def test_all_drafts_where_tokens_are_free_and_none_where_each_costs_a_step() -> None:
    free, dear = make(verify_costs=FREE), make(verify_costs=DEAR)
    for scheduler in (free, dear):
        add(scheduler, "a")
    assert [one["a"] for one in steps(free, 6)[1:]] == [4] * 5
    assert [one["a"] for one in steps(dear, 60, accept=2)[1:]] == [0] * 59


def test_lengths_follow_what_is_accepted() -> None:
    scheduler = make(drafts=6, verify_costs=LOADED, draft_costs=((1, 0.05), (6, 0.3)))
    add(scheduler, "a")
    lengths = [one["a"] for one in steps(scheduler, 200, accept=2)]
    assert lengths[1] == 6  # hopeful at first
    assert lengths[-1] == 2
    lengths = [one["a"] for one in steps(scheduler, 300)]
    assert lengths[-1] == 6


def test_no_drafts_under_load_and_drafts_again_when_it_ends() -> None:
    scheduler = make(verify_costs=LOADED, draft_costs=((1, 0.1),))
    names = "abcdefgh"
    requests = add(scheduler, *names)
    busy = steps(scheduler, 150, accept=1)
    for one in requests[1:]:
        one.finish_reason = FinishReason.STOP
        scheduler.release(one)
    alone = steps(scheduler, 40, accept=1)
    assert sum(sum(one.values()) for one in busy[-50:]) / 50 < 1
    assert all(one["a"] >= 1 for one in alone[2:])


def test_a_request_whose_drafts_fail_gets_fewer_than_its_neighbour() -> None:
    scheduler = make(verify_costs=LOADED)
    add(scheduler, *"abcd")
    last = steps(scheduler, 120, accept={"a": 99, "b": 99, "c": 0, "d": 0})[-40:]
    given = {name: sum(one[name] for one in last) for name in "abcd"}
    assert min(given["a"], given["b"]) > 3 * max(given["c"], given["d"])


def test_a_method_that_fails_is_probed_ever_more_rarely_and_taken_up_again() -> None:
    scheduler = make(verify_costs=DEAR, probe_interval=10)
    add(scheduler, "a")
    drafted = [number for number, one in enumerate(steps(scheduler, 320, accept=0)) if one["a"]]
    gaps = [after - before for before, after in pairwise(drafted)]
    assert drafted[0] == 11  # the step of the prompt, ten without drafts, then the one that verifies the probe
    assert gaps == sorted(gaps)
    assert gaps[0] < 25 < 75 < gaps[-1]

    scheduler = make(verify_costs=LOADED, probe_interval=10, draft_costs=((1, 0.5),))
    add(scheduler, "a")
    steps(scheduler, 100, accept=0)
    assert sum(one["a"] for one in steps(scheduler, 20, accept=0)) <= 8
    steps(scheduler, 300)
    assert all(one["a"] for one in steps(scheduler, 20))


def test_both_limits_still_hold() -> None:
    scheduler = make(verify_costs=FREE)
    (one,) = add(scheduler, "a", max_tokens=4)
    step(scheduler)
    assert scheduler.max_drafts(one) == 2
    one.output_ids.extend([1] * 2)
    assert scheduler.max_drafts(one) == 0


def test_drafts_that_the_budget_cut_are_no_failures() -> None:
    scheduler = make(verify_costs=FREE, max_num_seqs=2, max_num_batched_tokens=6)
    add(scheduler, "a", "b")
    drafts = steps(scheduler, 40)[-10:]
    assert any(one[name] < 4 for one in drafts for name in "ab")
    assert scheduler._book.survival("a")[3] > 0.8


def record(requests: int, tokens: int, seconds: float, drafting: float, prompt: int = 0) -> StepRecord:
    return StepRecord(1, requests, tokens, prompt, requests, (), (), seconds, 0.0, drafting, seconds + drafting)


def test_measured_costs_are_corrected_by_the_steps_and_given_ones_are_not() -> None:
    measured, given = make(), make(verify_costs=FREE)
    assert measured.wants_pass_costs
    assert not given.wants_pass_costs
    assert not make(drafts=0).wants_pass_costs
    measured.calibrate([PassCost(1, 1, 1e-3), PassCost(1, 8, 1e-3), PassCost(4, 16, 2e-3)])
    for scheduler in (measured, given):
        add(scheduler, "a")
        for _ in range(120):
            (verified,) = step(scheduler, accept=2).values()
            # In truth every token costs a step, and the drafting too.
            scheduler.observe(record(1, 1 + verified, 1e-3 * (1 + verified), 1e-3 if scheduler._lengths["a"] else 0.0))
            scheduler.observe(record(1, 500, 9.0, 9.0, prompt=500))  # prompts teach nothing
    assert step(given)["a"] == 4
    assert step(measured)["a"] == 0
    facts = measured.describe()
    assert facts["verify_costs"] == "[[1, 1.0], [8, 1.0]]"
    assert "0: " in facts["drafts asked for"]
    assert len(facts["chance of each draft"].split(", ")) == 4


def test_given_costs_repeat() -> None:
    def lengths() -> list[dict[str, int]]:
        scheduler = make(verify_costs=LOADED, draft_costs=((1, 0.1), (4, 0.2)))
        add(scheduler, *"abc")
        return steps(scheduler, 80, accept={"a": 0, "b": 2, "c": 4})

    assert lengths() == lengths()


def test_lengths_need_the_host_between_steps() -> None:
    """The decode loop keeps target and verification on the device only; whoever does not speculate runs ahead."""
    scheduler = make(verify_costs=FREE)
    assert not scheduler.plans_drafts_ahead
    (one,) = add(scheduler, "a")
    steps(scheduler, 2, accept={"a": 1})
    assert scheduler.plan_ahead({}) is None
    assert scheduler.token_limit(one) is None
    one.speculate = False
    assert scheduler.plan_ahead({}) == (one,)
    assert scheduler.token_limit(one) is not None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"prior_acceptance": 1.0}, "prior_acceptance=1.0"),
        ({"forgetting": 0.2}, "forgetting=0.2"),
        ({"probe_interval": 0}, "probe_interval=0"),
        ({"verify_costs": ()}, "verify_costs"),
        ({"verify_costs": ((0, 1.0),)}, "from 1 on"),
        ({"verify_costs": ((1, 0.0),)}, "above 0"),
        ({"draft_costs": ((1, 1.0),)}, "needs scheduler.verify_costs"),
        ({"verify_costs": FREE, "draft_costs": ((1, -1.0),)}, "draft_costs"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
    ],
)
def test_impossible_options(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        replace(AdaptiveOptions(), **options)
