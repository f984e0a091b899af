"""What the engine hands back."""

from dataclasses import dataclass

from specflow.core.request import FinishReason, Request, TokenLogprobs


@dataclass(frozen=True)
class RequestOutput:
    """One finished request."""

    request_id: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...]  # empty unless asked for
    rounds: int  # verification steps with at least one draft
    drafted: int
    accepted: int
    arrival: float  # seconds on the process's performance clock
    token_times: tuple[float, ...]  # when each token reached the host, same clock
    finished: float
    seed: int = 0  # the request's own, or the one it was given in its place

    @classmethod
    def of(cls, request: Request, finished: float) -> "RequestOutput":
        """Freeze a request that has ended."""
        assert request.finish_reason is not None
        return cls(
            request.request_id,
            tuple(request.prompt_ids),
            tuple(request.output_ids),
            request.text or "",
            request.finish_reason,
            tuple(request.logprobs),
            request.rounds,
            request.drafted,
            request.accepted,
            request.arrival,
            tuple(request.token_times),
            finished,
            request.seed,
        )


@dataclass(frozen=True)
class Chunk:
    """New tokens of one request, for streaming; all chunks of a request together are its output."""

    index: int  # of the prompt
    request_id: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None  # set on the last chunk
