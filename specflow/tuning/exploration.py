"""What one pass over the workload tells about a method: acceptance by position, and the time of its steps."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from specflow.metrics.acceptance import AcceptanceCounts
from specflow.schedulers.step_costs import StepCosts
from specflow.tracking.events import StepRecord

__all__ = ["Exploration", "Occupancy", "explore_steps", "learn_costs"]


@dataclass(frozen=True)
class Occupancy:
    """Decode steps with the same number of requests."""

    requests: int
    steps: int
    drafting_steps: int  # of them with at least one draft verified


@dataclass(frozen=True)
class Exploration:
    """One pass at one K and batch size; K = 0 is plain decoding. Seconds and tokens are those of the pass."""

    method: str
    num_speculative_tokens: int
    batch_size: int
    output_tokens: int
    seconds: float
    prompt_seconds: float  # steps with prompt tokens in them
    prompt_output: int  # output tokens of those steps
    occupancy: tuple[Occupancy, ...]
    # By draft position, over all requests of all decode steps, rounds without drafts included.
    survival: tuple[float, ...]  # accepted
    drafted: tuple[float, ...]  # verified
    acceptance: AcceptanceCounts = field(default_factory=AcceptanceCounts)

    @property
    def tokens_per_second(self) -> float:
        """Of the whole pass, prompts included."""
        return self.output_tokens / self.seconds

    def length(self, num_drafts: int) -> float:
        """Mean tokens per request and step at num_drafts ≤ K."""
        return 1 + sum(self.survival[:num_drafts])

    def verified(self, num_drafts: int) -> float:
        """Mean drafts verified per request and step at num_drafts ≤ K."""
        return sum(self.drafted[:num_drafts])


def explore_steps(
    method: str,
    num_speculative_tokens: int,
    batch_size: int,
    steps: Sequence[StepRecord],
    output_tokens: int,
    seconds: float,
) -> Exploration:
    """Put the steps of a pass together. seconds: the pass from the first request in to the last token out."""
    decoding = [step for step in steps if not step.num_prompt_tokens and step.num_requests]
    prompts = [step for step in steps if step.num_prompt_tokens]
    counts = AcceptanceCounts()
    sizes, drafting = Counter[int](), Counter[int]()
    for step in decoding:
        counts.add_all(step.drafted, step.accepted)
        sizes[step.num_requests] += 1
        drafting[step.num_requests] += bool(step.drafted)
    requests = max(1, sum(step.num_requests for step in decoding))
    padding = [0] * (num_speculative_tokens - counts.num_positions)
    return Exploration(
        method=method,
        num_speculative_tokens=num_speculative_tokens,
        batch_size=batch_size,
        output_tokens=output_tokens,
        seconds=seconds,
        prompt_seconds=sum(step.total_seconds for step in prompts),
        prompt_output=sum(step.num_emitted for step in prompts),
        occupancy=tuple(Occupancy(size, sizes[size], drafting[size]) for size in sorted(sizes)),
        survival=tuple(count / requests for count in [*counts.accepted_at, *padding]),
        drafted=tuple(count / requests for count in [*counts.drafted_at, *padding]),
        acceptance=counts,
    )


def learn_costs(costs: StepCosts, num_speculative_tokens: int, steps: Sequence[StepRecord]) -> None:
    """Let a pass, whose requests all asked for K drafts wherever they could, correct the costs."""
    for step in steps:
        if step.num_prompt_tokens or not step.num_requests:
            continue
        if step.undivided_seconds:  # ran as one piece: everything is the pass
            costs.add_pass(step.num_requests, step.num_tokens, step.total_seconds)
            continue
        costs.add_pass(step.num_requests, step.num_tokens, step.target_seconds)
        costs.add_besides(step.num_requests, step.total_seconds - step.target_seconds - step.propose_seconds)
        if num_speculative_tokens:
            costs.add_drafting(step.num_requests, num_speculative_tokens, step.propose_seconds)
