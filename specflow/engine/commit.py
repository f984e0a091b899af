"""What an emitted token does to its request, whichever way the step was run."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from specflow.core.limits import EngineLimits
from specflow.core.request import Request
from specflow.engine.buffers import StepBuffers
from specflow.engine.detokenizer import Detokenizer
from specflow.engine.stops import append_tokens
from specflow.schedulers.base import ScheduledRequest
from specflow.tracking.events import StepRecord


@dataclass
class StepResult:
    """What a step did, for the engine's callers."""

    record: StepRecord
    emitted: list[tuple[Request, int]] = field(default_factory=list)  # request and how many tokens it gained


def keep_tokens(
    request: Request,
    ids: Sequence[int],
    limits: EngineLimits,
    buffers: StepBuffers,
    detokenizer: Detokenizer | None,
) -> int:
    """Append a step's emitted ids to a request up to a stop; returns how many were kept."""
    request.steps += 1
    first = request.num_tokens
    count = append_tokens(request, ids, limits.max_model_len, detokenizer)
    # On a CPU this is the memory that `store_tokens` has written already; elsewhere it keeps the host twin in step.
    buffers.tokens.host[request.slot, first : first + count] = ids[:count]
    return count


def count_round(item: ScheduledRequest, accepted: int) -> None:
    """Count a verification, which a step without drafts is not."""
    if item.num_drafts:
        item.request.rounds += 1
        item.request.drafted += item.num_drafts
        item.request.accepted += accepted
