"""Contract of a scheduler: which request runs how many tokens. Integers and lists only, no tensors."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specflow.core.limits import EngineLimits
from specflow.core.request import Request
from specflow.errors import ConfigError

if TYPE_CHECKING:
    from specflow.proposers.base import PassCost
    from specflow.tracking.events import StepRecord


@dataclass(frozen=True)
class ScheduledRequest:
    """One request's part of a step: `length` tokens from position `start`, the last `num_drafts` of them drafts."""

    request: Request
    start: int
    length: int
    num_drafts: int
    samples: bool  # the step reaches the request's last committed token, so that it emits at least one token


@dataclass(frozen=True)
class StepPlan:
    """One step: what runs, who was admitted to a slot and who lost it."""

    scheduled: tuple[ScheduledRequest, ...]  # ordered by length, so that equal lengths are adjacent
    admitted: tuple[Request, ...] = ()  # got a slot in this step (first time, or again after pre-emption)
    preempted: tuple[tuple[Request, int], ...] = ()  # lost their blocks, and the slot each one had

    @property
    def num_tokens(self) -> int:
        """T of the packed batch."""
        return sum(item.length for item in self.scheduled)


@dataclass(frozen=True, kw_only=True)
class SchedulerSizes:
    """Sizes that the user may set, from which the engine fixes its limits; options of every scheduler derive from it.

    Names are vLLM's where it has one. Raises `ConfigError` when a value is out of range.
    """

    max_num_seqs: int = 16  # requests that run at the same time
    max_num_batched_tokens: int = 2048  # tokens of one step, drafts included
    max_model_len: int | None = None  # prompt and output together; None = the target's limit
    block_size: int = 16  # tokens of one KV block
    num_kv_blocks: int | None = None  # None = enough for max_num_seqs requests, within kv_cache_memory_gib
    kv_cache_memory_gib: float | None = None  # most memory for KV pages; None = 2, on a GPU half of what is free

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size", "max_model_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"scheduler.{name}={value} must be 1 or more.")
        if self.num_kv_blocks is not None and self.num_kv_blocks < 2:
            raise ConfigError(f"scheduler.num_kv_blocks={self.num_kv_blocks} must be 2 or more (block 0 is reserved).")
        if self.kv_cache_memory_gib is not None and self.kv_cache_memory_gib <= 0:
            raise ConfigError(f"scheduler.kv_cache_memory_gib={self.kv_cache_memory_gib} must be above 0.")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"scheduler.max_num_batched_tokens={self.max_num_batched_tokens} is below "
                f"scheduler.max_num_seqs={self.max_num_seqs}: every running request needs a token a step. "
                "Raise the first or lower the second."
            )


class Scheduler(ABC):
    """Owns the queues, the token budget, the KV blocks and the request slots."""

    # False: how many drafts come next depends on the outcome of the last ones, so that `plan_ahead` is for requests
    # that do not speculate.
    plans_drafts_ahead: bool = True

    options: SchedulerSizes

    @abstractmethod
    def configure(self, limits: EngineLimits) -> None:
        """Fix the sizes; called once, before the first request."""

    @abstractmethod
    def add(self, request: Request) -> None:
        """Queue a request. Raises `PromptError` when it can never fit."""

    @abstractmethod
    def plan(self) -> StepPlan:
        """Decide the next step. Empty `scheduled` means that nothing can run."""

    @abstractmethod
    def commit(self, item: ScheduledRequest, num_emitted: int, num_accepted: int) -> None:
        """Account for a step's result: KV is valid for the kept positions, the rest is rolled back by length."""

    @abstractmethod
    def release(self, request: Request) -> None:
        """Free the blocks and the slot of a request that ended or was aborted."""

    @property
    @abstractmethod
    def has_work(self) -> bool:
        """True while any request waits or runs."""

    @abstractmethod
    def max_drafts(self, request: Request) -> int:
        """Drafts this request can use in its next step (context, max_tokens, budget, policy); 0 … K."""

    def token_limit(self, request: Request) -> int | None:
        """Tokens at which the request ends at the latest, if until then `max_drafts` is what the K and that limit leave
        room for. None: drafts depend on more, and the engine has to ask after every step."""
        return None

    def plan_ahead(self, steps_ahead: Mapping[str, int]) -> Sequence[Request] | None:
        """The requests of the next step before the outcome of the last ones is known: all that run, one token and its
        drafts each, with blocks for the most that they can have become by then.

        steps_ahead: by request id, steps not yet committed. None: the outcome is needed first, since somebody can be
        admitted, a prompt is not through, or blocks or budget run out.
        """
        return None

    @property
    def wants_pass_costs(self) -> bool:
        """Whether `calibrate` is to be called. Asked once, after `configure`."""
        return False

    def calibrate(self, costs: "Sequence[PassCost]") -> None:
        """Told once before the first request what passes of the target cost, as `Proposer.calibrate` is."""

    def observe(self, record: "StepRecord") -> None:
        """Told after every step what it did and how long its parts took, with the next drafts made already."""

    @abstractmethod
    def check_idle(self) -> Sequence[str]:
        """Integrity check when nothing runs: every block and slot is free again; returns what is wrong."""

    def describe(self) -> dict[str, str]:
        """What really ran; shown in the report."""
        return {}
