"""The scheduler alone: integers in, integers out."""

import pytest
import torch

from specflow.core.limits import EngineLimits
from specflow.core.request import Request, Status
from specflow.core.sampling_params import SamplingParams
from specflow.errors import ConfigError, PromptError
from specflow.schedulers.base import StepPlan
from specflow.schedulers.continuous import ContinuousOptions, ContinuousScheduler


def make(
    num_blocks: int = 100, drafts: int = 0, lookahead: int = 0, max_model_len: int = 64, **options
) -> ContinuousScheduler:
    chosen = ContinuousOptions(**{"max_num_seqs": 4, "max_num_batched_tokens": 32, "block_size": 4, **options})
    scheduler = ContinuousScheduler(chosen)
    scheduler.configure(
        EngineLimits(
            max_num_seqs=chosen.max_num_seqs,
            max_model_len=max_model_len,
            max_num_batched_tokens=chosen.max_num_batched_tokens,
            block_size=chosen.block_size,
            num_blocks=num_blocks,
            num_speculative_tokens=drafts,
            lookahead_tokens=lookahead,
            vocab_size=100,
            device=torch.device("cpu"),
            dtype=torch.float32,
        )
    )
    return scheduler


def request(name: str, prompt: int, max_tokens: int = 100) -> Request:
    return Request(name, list(range(prompt)), SamplingParams(max_tokens=max_tokens), seed=0)


def shape(plan: StepPlan) -> list[tuple[str, int, int, int]]:
    return [(item.request.request_id, item.start, item.length, item.num_drafts) for item in plan.scheduled]


def run_step(scheduler: ContinuousScheduler, accepted: int = 0) -> StepPlan:
    """Plan and commit a step in which every sampling request emits accepted + 1 tokens."""
    plan = scheduler.plan()
    for item in plan.scheduled:
        kept = min(accepted, item.num_drafts)
        if item.samples:
            item.request.output_ids.extend([1] * (kept + 1))
        scheduler.commit(item, kept + 1, kept)
        item.request.num_drafts = scheduler.max_drafts(item.request) if item.samples else 0
    return plan


def test_a_prompt_is_chunked_by_the_budget_and_samples_only_at_its_end() -> None:
    scheduler = make()
    scheduler.add(request("a", 50))
    plan = scheduler.plan()
    assert shape(plan) == [("a", 0, 32, 0)]
    assert not plan.scheduled[0].samples
    scheduler.commit(plan.scheduled[0], 0, 0)
    plan = scheduler.plan()
    assert shape(plan) == [("a", 32, 18, 0)]
    assert plan.scheduled[0].samples


def test_drafts_follow_the_anchor_and_rejected_ones_are_rolled_back_by_length() -> None:
    scheduler = make(drafts=3)
    one = request("a", 10)
    scheduler.add(one)
    run_step(scheduler)
    assert (one.num_tokens, one.num_computed) == (11, 10)
    plan = run_step(scheduler, accepted=1)
    assert shape(plan) == [("a", 10, 4, 3)]
    # Worked example of the verification note, 6.3: anchor at 10, one of three accepted, next anchor at 12.
    assert (one.num_tokens, one.num_computed) == (13, 12)
    assert shape(scheduler.plan()) == [("a", 12, 4, 3)]


def test_running_requests_come_first_and_lengths_are_ordered() -> None:
    scheduler = make()
    scheduler.add(request("a", 5))
    run_step(scheduler)
    scheduler.add(request("b", 40))
    scheduler.add(request("c", 3))
    assert shape(scheduler.plan()) == [("a", 5, 1, 0), ("b", 0, 31, 0)]


def test_every_running_request_keeps_a_token_of_a_tight_budget() -> None:
    scheduler = make(max_num_batched_tokens=6, drafts=3)
    for name in "abcd":
        scheduler.add(request(name, 1))
    run_step(scheduler)
    assert sorted(shape(run_step(scheduler))) == [("a", 1, 3, 2), ("b", 1, 1, 0), ("c", 1, 1, 0), ("d", 1, 1, 0)]


def test_long_prefill_threshold_limits_a_chunk() -> None:
    scheduler = make(long_prefill_token_threshold=8)
    scheduler.add(request("a", 30))
    scheduler.add(request("b", 30))
    assert shape(scheduler.plan()) == [("a", 0, 8, 0), ("b", 0, 8, 0)]


def test_without_chunked_prefill_a_prompt_waits_for_the_whole_budget() -> None:
    scheduler = make(enable_chunked_prefill=False, max_model_len=32)
    scheduler.add(request("a", 20))
    scheduler.add(request("b", 20))
    assert shape(scheduler.plan()) == [("a", 0, 20, 0)]


def test_pre_emption_takes_the_newest_and_recomputes_it() -> None:
    scheduler = make(num_blocks=1 + 16, max_model_len=60)
    old, new = request("old", 28), request("new", 28)
    scheduler.add(old)
    scheduler.add(new)
    run_step(scheduler)
    run_step(scheduler)
    preempted: list[str] = []
    for _ in range(10):
        preempted += [victim.request_id for victim, _ in run_step(scheduler).preempted]
    assert preempted == ["new"]
    assert new.status is Status.WAITING
    assert (new.num_computed, new.blocks, new.slot) == (0, [], -1)
    assert len(new.output_ids) > 0  # kept, and recomputed as if it were prompt
    scheduler.release(old)
    plan = scheduler.plan()
    assert shape(plan) == [("new", 0, 32, 0)]


def test_blocks_cover_the_lookahead() -> None:
    scheduler = make(drafts=3, lookahead=3)
    one = request("a", 8)
    scheduler.add(one)
    scheduler.plan()
    assert len(one.blocks) * 4 >= 8 + 3


def test_a_single_request_gets_blocks_in_a_row() -> None:
    scheduler = make()
    one = request("a", 20)
    scheduler.add(one)
    for _ in range(20):
        run_step(scheduler)
    assert one.blocks == list(range(one.blocks[0], one.blocks[0] + len(one.blocks)))


def test_drafts_shrink_towards_both_limits() -> None:
    scheduler = make(drafts=4, max_model_len=16)
    one = request("a", 10, max_tokens=50)
    one.output_ids = [1] * 4  # 14 tokens: one more can be emitted plus at most one draft
    assert scheduler.max_drafts(one) == 1
    one.output_ids = [1] * 5
    assert scheduler.max_drafts(one) == 0
    two = request("b", 2, max_tokens=3)
    two.output_ids = [1]
    assert scheduler.max_drafts(two) == 1


def test_nothing_is_lost_when_all_is_released() -> None:
    scheduler = make(drafts=2)
    requests = [request(name, 7) for name in "abcdef"]
    for one in requests:
        scheduler.add(one)
    run_step(scheduler)
    assert scheduler.check_idle()
    for one in requests:
        scheduler.release(one)
    assert scheduler.check_idle() == []
    assert not scheduler.has_work


def test_a_prompt_longer_than_the_context_is_refused() -> None:
    with pytest.raises(PromptError, match=r"65 tokens.*max_model_len=64"):
        make().add(request("a", 65))


def test_too_few_blocks_for_one_request_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="num_kv_blocks"):
        make(num_blocks=10)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"block_size": 0}, "block_size"),
        ({"num_kv_blocks": 1}, "num_kv_blocks"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 4}, "max_num_batched_tokens"),
        ({"kv_cache_memory_gib": 0}, "kv_cache_memory_gib"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold"),
    ],
)
def test_impossible_options_name_themselves(options: dict[str, int], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ContinuousOptions(**options)


def test_drafts_by_batch_size() -> None:
    """C71: as many as the range of the running requests says; a size that no range names has the proposer's K."""
    scheduler = make(drafts=5, num_speculative_tokens_per_batch_size=((1, 1, 4), (3, 4, 0)))
    drafted = []
    for name in "abc":
        scheduler.add(request(name, 2))
        run_step(scheduler)  # its prompt
        drafted.append([count for *_, count in shape(run_step(scheduler))])
    assert drafted == [[4], [5, 5], [0, 0, 0]]
    assert scheduler.describe()["most drafts by batch size"] == "1 to 1 requests: 4; 3 to 4 requests: 0"


def test_drafts_by_batch_size_are_not_planned_ahead() -> None:
    scheduler = make(drafts=5, num_speculative_tokens_per_batch_size=((1, 1, 4),))
    one = request("a", 2)
    scheduler.add(one)
    run_step(scheduler)
    assert not scheduler.plans_drafts_ahead
    assert scheduler.plan_ahead({}) is None
    assert scheduler.token_limit(one) is None
    one.speculate = False
    assert scheduler.plan_ahead({}) == (one,)
    assert make(drafts=5).plans_drafts_ahead


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        (((0, 3, 1),), r"has \[0, 3, 1\]: give \[first, last, K\]"),
        (((3, 2, 1),), r"has \[3, 2, 1\]"),
        (((1, 2, -1),), r"has \[1, 2, -1\]"),
        (((2, 6, 1), (1, 2, 3)), "says twice what 2 running requests draft"),
    ],
)
def test_ranges_that_make_no_sense(ranges: tuple[tuple[int, int, int], ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(num_speculative_tokens_per_batch_size=ranges)
