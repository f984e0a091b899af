"""Continuous batching in which every request gets as many drafts per step as pay: none under load, all where they do.

The length is decided before drafting, from earlier rounds and from costs, never from the drafts that it cuts; so the
sampled law stays what it was. The drafting method is told, and saves what it can.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specflow.core.limits import EngineLimits
from specflow.core.request import Request
from specflow.errors import ConfigError
from specflow.schedulers.acceptance import AcceptanceBook
from specflow.schedulers.base import ScheduledRequest, StepPlan
from specflow.schedulers.continuous import ContinuousOptions, ContinuousScheduler
from specflow.schedulers.draft_lengths import Others, best_lengths
from specflow.schedulers.step_costs import StepCosts

if TYPE_CHECKING:
    from specflow.proposers.base import PassCost
    from specflow.tracking.events import StepRecord

__all__ = ["AdaptiveOptions", "AdaptiveScheduler"]

_PLAIN_EVERY = 16  # steps of so many requests per one without drafts, while the cost of those is unknown
_LONGEST_PAUSE = 8  # times probe_interval: how far probes that find nothing move apart


@dataclass(frozen=True, kw_only=True)
class AdaptiveOptions(ContinuousOptions):
    """Options of `scheduler=adaptive`. Raises `ConfigError` when a value is out of range."""

    prior_acceptance: float = 0.8  # chance of a draft before the method has shown its own: high, so that it is tried
    forgetting: float = 0.95  # what a round leaves of its request's older rounds; 1 = nothing is forgotten
    probe_interval: int = 64  # steps without any draft after which some are tried again
    # Pairs of tokens and milliseconds of a decode step without drafting, as [[1, 2.0], [8, 2.6]]; None = measured at
    # the start, and corrected by the steps' own times. Lengths, and so what is sampled from a seed, repeat exactly only
    # with given costs.
    verify_costs: tuple[tuple[int, float], ...] | None = None
    # Pairs of drafts per request and milliseconds of drafting them; None = learnt, or nothing with given verify_costs.
    draft_costs: tuple[tuple[int, float], ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.prior_acceptance < 1:
            raise ConfigError(f"scheduler.prior_acceptance={self.prior_acceptance} must lie between 0 and 1.")
        if not 0.5 <= self.forgetting <= 1:
            raise ConfigError(f"scheduler.forgetting={self.forgetting} must be from 0.5 to 1.")
        if self.probe_interval < 1:
            raise ConfigError(f"scheduler.probe_interval={self.probe_interval} must be 1 or more.")
        for name, least in (("verify_costs", 1), ("draft_costs", 0)):
            given = getattr(self, name)
            if given is not None and (not given or any(number < least or cost < 0 for number, cost in given)):
                raise ConfigError(
                    f"scheduler.{name}={[list(pair) for pair in given]} must be pairs of a number from {least} on and "
                    "milliseconds, as [[1, 2.0], [8, 2.6]], or null."
                )
        if self.verify_costs is not None and min(cost for _, cost in self.verify_costs) <= 0:
            raise ConfigError("scheduler.verify_costs must have milliseconds above 0.")
        if self.draft_costs is not None and self.verify_costs is None:
            raise ConfigError("scheduler.draft_costs needs scheduler.verify_costs: both are given, or both measured.")


class AdaptiveScheduler(ContinuousScheduler):
    """Decides once per step, after the outcome of the last one, for all requests together."""

    options: AdaptiveOptions

    plans_drafts_ahead = False  # the length of the next drafts needs the outcome of the last ones on the host

    def __init__(self, options: AdaptiveOptions) -> None:
        super().__init__(options)

    def configure(self, limits: EngineLimits) -> None:
        """See `Scheduler.configure`."""
        super().configure(limits)
        options = self.options
        self._book = AcceptanceBook(limits.num_speculative_tokens, options.prior_acceptance, options.forgetting)
        self._lengths: dict[str, int] | None = None  # of the next drafts; None = to be decided
        self._asked: dict[str, int] = {}  # of the drafts that the next step verifies
        self._quiet, self._pause = 0, options.probe_interval
        self._given: Counter[int] = Counter()
        self._steps_without_knowing: Counter[int] = Counter()  # by requests: the cost of a step without drafts
        self._costs = StepCosts([], None, limits.max_num_batched_tokens, learns=True)
        if options.verify_costs is not None:
            given = _seconds(options.verify_costs)
            drafting = _seconds(options.draft_costs or ((0, 0.0),))
            self._costs = StepCosts(given, drafting, limits.max_num_batched_tokens, learns=False)

    @property
    def wants_pass_costs(self) -> bool:
        """See `Scheduler.wants_pass_costs`."""
        return self.options.verify_costs is None and self._limits.num_speculative_tokens > 0

    def calibrate(self, costs: "Sequence[PassCost]") -> None:
        """See `Scheduler.calibrate`."""
        alone = [(cost.tokens, cost.seconds) for cost in costs if cost.requests == 1]
        self._costs = StepCosts(alone, None, self._limits.max_num_batched_tokens, learns=True)
        for cost in costs:
            if cost.requests > 1:
                self._costs.believe(cost.requests, cost.tokens, cost.seconds)

    def plan(self) -> StepPlan:
        """See `Scheduler.plan`."""
        self._asked, self._lengths = self._lengths or {}, None
        return super().plan()

    def commit(self, item: ScheduledRequest, num_emitted: int, num_accepted: int) -> None:
        """See `Scheduler.commit`; and learn from the round."""
        request = item.request
        asked = self._asked.get(request.request_id)
        if asked is not None and item.samples:
            # Drafts that the budget of the step cut were not judged.
            cut = item.num_drafts < request.num_drafts
            self._book.add(request.request_id, item.num_drafts if cut else asked, item.num_drafts, num_accepted)
        super().commit(item, num_emitted, num_accepted)

    def release(self, request: Request) -> None:
        """See `Scheduler.release`."""
        super().release(request)
        self._book.forget(request.request_id)

    def max_drafts(self, request: Request) -> int:
        """See `Scheduler.max_drafts`. Asked for after the outcome of a step, for all its requests."""
        most = super().max_drafts(request)
        if not most:
            return 0
        if self._lengths is None:
            self._lengths = self._decide()
        return min(most, self._lengths.get(request.request_id, 0))

    def _decide(self) -> dict[str, int]:
        """Drafts of the requests that go on, by id."""
        going = [request for request in self._running if request.finish_reason is None]
        drafting: list[Request] = []
        rooms: list[int] = []
        emitting = tokens = 0
        for request in going:
            pending = request.num_tokens - request.num_computed
            most = super().max_drafts(request) if pending == 1 else 0
            if most:
                drafting.append(request)
                rooms.append(most)
                continue
            emitting += pending == 1
            tokens += pending
        if not drafting:
            return {}
        book = self._book
        names = [request.request_id for request in drafting]
        if self._wants_plain_step(len(drafting) + emitting):
            return dict.fromkeys(names, 0)
        probing = self._quiet >= self._pause
        choice = best_lengths(
            [book.survival(name) for name in names],
            rooms,
            [book.fill(name) for name in names],
            self._costs,
            Others(emitting, min(tokens, self._limits.max_num_batched_tokens)),
            probe=probing,
        )
        self._watch_quiet(any(choice.lengths), probing)
        self._given.update(choice.lengths)
        return dict(zip(names, choice.lengths, strict=True))

    def _wants_plain_step(self, requests: int) -> bool:
        """Whether a step without drafts is due, because nobody knows what it costs: a few, far apart."""
        if self._costs.knows_plain(requests):
            return False
        self._steps_without_knowing[requests] += 1
        return self._steps_without_knowing[requests] % _PLAIN_EVERY == 0

    def _watch_quiet(self, drafts: bool, probing: bool) -> None:
        """Count the steps without drafts; probes that change nothing become rarer."""
        if not drafts:
            self._quiet += 1
            return
        if not probing:
            self._pause = self.options.probe_interval
        else:
            self._pause = min(2 * self._pause, _LONGEST_PAUSE * self.options.probe_interval)
        self._quiet = 0

    def observe(self, record: "StepRecord") -> None:
        """See `Scheduler.observe`: the time of a step of decoding requests corrects the costs."""
        if record.num_prompt_tokens or record.undivided_seconds or not record.num_requests:
            return
        besides = record.total_seconds - record.propose_seconds - record.target_seconds
        self._costs.add_pass(record.num_requests, record.num_tokens, record.target_seconds)
        self._costs.add_besides(record.num_requests, besides)
        if self._lengths:
            self._costs.add_drafting(len(self._lengths), max(self._lengths.values()), record.propose_seconds)

    def describe(self) -> dict[str, str]:
        """See `Scheduler.describe`; and how many drafts were asked for, the chances found and the costs gone by."""
        facts = super().describe() | {"policy": "continuous batching, draft lengths by acceptance and cost"}
        if not self._limits.num_speculative_tokens:
            return facts
        total = max(1, self._given.total())
        shares = [f"{length}: {100 * count / total:.0f} %" for length, count in sorted(self._given.items())]
        facts["drafts asked for"] = ", ".join(shares) or "never"
        facts["chance of each draft"] = ", ".join(f"{1 - hazard:.2f}" for hazard in self._book.hazards)
        return facts | self._costs.describe()


def _seconds(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    return [(number, milliseconds / 1000) for number, milliseconds in points]
