"""Continuous batching: running requests first, then waiting ones, within one token budget a step.

There is no prefill phase and no decode phase: a request has tokens with KV and tokens without, and a step runs some of
the latter, followed by the drafts that are to be verified.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specflow.core.limits import EngineLimits
from specflow.core.request import Request, Status
from specflow.errors import ConfigError, PromptError
from specflow.schedulers.base import ScheduledRequest, Scheduler, SchedulerSizes, StepPlan
from specflow.schedulers.blocks import BlockAllocator


@dataclass(frozen=True, kw_only=True)
class ContinuousOptions(SchedulerSizes):
    """Options of `scheduler=continuous`."""

    enable_chunked_prefill: bool = True  # split prompts that do not fit the budget of a step
    long_prefill_token_threshold: int = 0  # most prompt tokens of one request in a step; 0 = the budget
    # Most drafts by running requests, [first, last, K] per range; elsewhere proposer.num_speculative_tokens.
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_ranges(self.num_speculative_tokens_per_batch_size or ())
        if self.long_prefill_token_threshold < 0:
            raise ConfigError(
                f"scheduler.long_prefill_token_threshold={self.long_prefill_token_threshold} must be 0 (off) or more."
            )


def _check_ranges(ranges: Sequence[tuple[int, int, int]]) -> None:
    option = "scheduler.num_speculative_tokens_per_batch_size"
    behind = 0
    for one in sorted(ranges):
        first, last, drafts = one
        if not 1 <= first <= last or drafts < 0:
            raise ConfigError(
                f"{option} has {list(one)}: give [first, last, K] with 1 <= first <= last running requests and K >= 0."
            )
        if first <= behind:
            raise ConfigError(f"{option} says twice what {first} running requests draft: ranges may not overlap.")
        behind = last


class ContinuousScheduler(Scheduler):
    """First come, first served; the newest running request is pre-empted (recomputed later) when blocks run out."""

    options: ContinuousOptions

    def __init__(self, options: ContinuousOptions) -> None:
        self.options = options
        # Who runs in the next step is known when the outcome of the last one is.
        self.plans_drafts_ahead = self.plans_drafts_ahead and not options.num_speculative_tokens_per_batch_size

    def configure(self, limits: EngineLimits) -> None:
        """See `Scheduler.configure`. Raises `ConfigError` when one request could never fit."""
        self._limits = limits
        self._blocks = BlockAllocator(limits.num_blocks, limits.block_size)
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._free_slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self.num_preemptions = 0
        needed = self._blocks.blocks_for(self._most_tokens())
        if needed > self._blocks.num_usable:
            raise ConfigError(
                f"scheduler.num_kv_blocks={limits.num_blocks} is too little: one request of "
                f"max_model_len={limits.max_model_len} needs {needed + 1} blocks. "
                "Raise num_kv_blocks (or kv_cache_memory_gib), or lower scheduler.max_model_len."
            )
        if not self.options.enable_chunked_prefill and limits.max_num_batched_tokens < limits.max_model_len:
            raise ConfigError(
                f"scheduler.enable_chunked_prefill=false needs max_num_batched_tokens >= max_model_len, "
                f"but {limits.max_num_batched_tokens} < {limits.max_model_len}: a long prompt could never run."
            )

    def add(self, request: Request) -> None:
        """See `Scheduler.add`."""
        if request.prompt_len > self._limits.max_model_len:
            raise PromptError(
                f"prompt of request {request.request_id!r} has {request.prompt_len} tokens, but the context limit is "
                f"max_model_len={self._limits.max_model_len}. Shorten the prompt or raise scheduler.max_model_len "
                "(at most what the target supports)."
            )
        request.status = Status.WAITING
        self._waiting.append(request)

    @property
    def has_work(self) -> bool:
        """See `Scheduler.has_work`."""
        return bool(self._waiting or self._running)

    def plan(self) -> StepPlan:
        """See `Scheduler.plan`."""
        budget = self._limits.max_num_batched_tokens
        scheduled: list[ScheduledRequest] = []
        preempted: list[tuple[Request, int]] = []
        running = list(self._running)
        for index, request in enumerate(running):
            if request.status is not Status.RUNNING:
                continue
            # One token is kept for every request behind this one, so that none starves.
            item = self._grant(request, budget - (len(running) - index - 1))
            if item is not None and self._reserve(item, preempted):
                scheduled.append(item)
                budget -= item.length
        admitted = [] if preempted else self._admit(budget, scheduled)
        scheduled.sort(key=lambda item: item.length)
        return StepPlan(tuple(scheduled), tuple(admitted), tuple(preempted))

    def _admit(self, budget: int, scheduled: list[ScheduledRequest]) -> list[Request]:
        """Move waiting requests to free slots while budget and blocks last."""
        admitted: list[Request] = []
        while self._waiting and self._free_slots and budget > 0:
            request = self._waiting[0]
            item = self._grant(request, budget)
            if item is None or not self._blocks.grow(request, self._covered(item)):
                break
            self._waiting.popleft()
            request.slot = self._free_slots.pop()
            request.status = Status.RUNNING
            self._running.append(request)
            admitted.append(request)
            scheduled.append(item)
            budget -= item.length
        return admitted

    def _grant(self, request: Request, budget: int) -> ScheduledRequest | None:
        """How many of the request's tokens run now; None when nothing useful fits."""
        pending = request.num_tokens - request.num_computed
        allowed = budget
        if pending > 1 and self.options.long_prefill_token_threshold:
            allowed = min(allowed, self.options.long_prefill_token_threshold)
        if pending > allowed:
            if not self.options.enable_chunked_prefill:
                return None
            return ScheduledRequest(request, request.num_computed, allowed, 0, samples=False)
        # A chunk that catches up on several tokens carries no drafts: there were none to make.
        drafts = min(request.num_drafts, allowed - pending) if pending == 1 else 0
        return ScheduledRequest(request, request.num_computed, pending + drafts, drafts, samples=True)

    def _covered(self, item: ScheduledRequest) -> int:
        """Positions that the request's blocks must cover: this step's tokens and what drafting writes after it."""
        return self._at_most(item.start + item.length)

    def _at_most(self, num_tokens: int) -> int:
        """The same for processed tokens."""
        return min(num_tokens + self._limits.lookahead_tokens, self._most_tokens())

    def _most_tokens(self) -> int:
        return self._limits.max_model_len + self._limits.num_speculative_tokens + self._limits.lookahead_tokens

    def _reserve(self, item: ScheduledRequest, preempted: list[tuple[Request, int]]) -> bool:
        """Get blocks for a running request, pre-empting the newest ones; False when it was pre-empted itself.

        The newest ones stand behind it in the queue, so none of them has been granted tokens in this step.
        """
        while not self._blocks.grow(item.request, self._covered(item)):
            victim = self._running[-1]
            preempted.append((victim, victim.slot))
            self._preempt(victim)
            if victim is item.request:
                return False
        return True

    def _preempt(self, victim: Request) -> None:
        """Give back everything; the output so far is kept and recomputed as if it were prompt."""
        self._free(victim)
        victim.status = Status.WAITING
        victim.num_computed = 0
        victim.num_drafts = 0
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.appendleft(victim)

    def commit(self, item: ScheduledRequest, num_emitted: int, num_accepted: int) -> None:
        """See `Scheduler.commit`: positions past the accepted drafts are overwritten by the next step."""
        item.request.num_computed = item.start + item.length - item.num_drafts + num_accepted
        item.request.num_drafts = 0

    def release(self, request: Request) -> None:
        """See `Scheduler.release`; also takes a waiting request out of the queue."""
        if request.status is Status.WAITING:
            self._waiting.remove(request)
        elif request.status is Status.RUNNING:
            self._free(request)
        request.status = Status.FINISHED

    def _free(self, request: Request) -> None:
        self._blocks.release(request)
        self._running.remove(request)
        self._free_slots.append(request.slot)
        request.slot = -1

    def max_drafts(self, request: Request) -> int:
        """See `Scheduler.max_drafts`: no draft that could not be kept is ever asked for."""
        if not request.speculate:
            return 0
        return max(0, min(self._drafts_at_this_size(), self._most_tokens_of(request) - request.num_tokens - 1))

    def _drafts_at_this_size(self) -> int:
        most, ranges = self._limits.num_speculative_tokens, self.options.num_speculative_tokens_per_batch_size
        if not ranges:
            return most
        running = sum(request.finish_reason is None for request in self._running)
        return next((min(most, drafts) for first, last, drafts in ranges if first <= running <= last), most)

    def _drafts(self, request: Request) -> bool:
        return request.speculate and self._limits.num_speculative_tokens > 0

    def token_limit(self, request: Request) -> int | None:
        """See `Scheduler.token_limit`: the context, or the request's own budget."""
        return self._most_tokens_of(request) if self.plans_drafts_ahead or not self._drafts(request) else None

    def _most_tokens_of(self, request: Request) -> int:
        return min(self._limits.max_model_len, request.prompt_len + request.sampling.max_tokens)

    def plan_ahead(self, steps_ahead: Mapping[str, int]) -> Sequence[Request] | None:
        """See `Scheduler.plan_ahead`."""
        if not self.plans_drafts_ahead and any(map(self._drafts, self._running)):
            return None
        most = self._limits.num_speculative_tokens + 1
        budget = self._limits.max_num_batched_tokens
        if len(self._running) * most > budget or self._could_admit(budget - len(self._running)):
            return None
        for request in self._running:
            if request.num_tokens - request.num_computed != 1:
                return None
            behind = request.num_tokens - 1 + steps_ahead.get(request.request_id, 0) * most
            if not self._blocks.grow(request, self._at_most(behind + most)):
                return None
        return tuple(self._running)

    def _could_admit(self, budget: int) -> bool:
        """Whether the first waiting request would find a slot, blocks and budget for its first tokens."""
        if not (self._waiting and self._free_slots):
            return False
        item = self._grant(self._waiting[0], budget)
        return item is not None and self._blocks.blocks_for(self._covered(item)) <= self._blocks.num_free

    def check_idle(self) -> Sequence[str]:
        """See `Scheduler.check_idle`."""
        problems = []
        if self._blocks.num_free != self._blocks.num_usable:
            problems.append(f"{self._blocks.num_usable - self._blocks.num_free} KV blocks are not free")
        if len(self._free_slots) != self._limits.max_num_seqs:
            problems.append(f"{self._limits.max_num_seqs - len(self._free_slots)} request slots are not free")
        return problems

    def describe(self) -> dict[str, str]:
        """Sizes in force and what happened."""
        limits = self._limits
        return {
            "policy": "continuous batching",
            "chunked_prefill": "on" if self.options.enable_chunked_prefill else "off",
            "max_num_seqs": str(limits.max_num_seqs),
            "max_num_batched_tokens": str(limits.max_num_batched_tokens),
            "max_model_len": str(limits.max_model_len),
            "kv_blocks": f"{limits.num_blocks} of {limits.block_size} tokens",
            "preemptions": str(self.num_preemptions),
        } | self._describe_ranges()

    def _describe_ranges(self) -> dict[str, str]:
        ranges = self.options.num_speculative_tokens_per_batch_size
        if not ranges:
            return {}
        words = [f"{first} to {last} requests: {drafts}" for first, last, drafts in ranges]
        return {"most drafts by batch size": "; ".join(words)}
