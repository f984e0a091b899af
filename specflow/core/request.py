"""State of one request. Everything that belongs to a request lives here, as host integers."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from specflow.core.sampling_params import SamplingParams


class Status(StrEnum):
    """Where a request is."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why it ended; the names are vLLM's."""

    STOP = "stop"  # EOS, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the context limit
    ABORT = "abort"  # cancelled, or the run failed


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one output token, from the target's raw logits (vLLM's `raw_logprobs`)."""

    chosen: float
    max_logit: float  # highest raw logit: rounding errors scale with it
    top: tuple[tuple[int, float], ...]  # (token id, log-probability), most likely first


@dataclass(eq=False)
class Request:
    """One prompt on its way through the engine."""

    request_id: str
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    seed: int  # the resolved one: never None
    stop_ids: frozenset[int] = frozenset()  # EOS (unless ignored) and stop_token_ids together
    bad_word_ids: tuple[tuple[int, ...], ...] = ()  # token ids of each bad word, with and without a leading space
    speculate: bool = True

    status: Status = Status.WAITING
    slot: int = -1  # row in the per-request tables while running
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0  # leading tokens whose KV is in the pages
    num_drafts: int = 0  # drafts waiting to be verified
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    text: str | None = None  # set at the end, or as it grows when text is needed earlier

    rounds: int = 0  # verification steps with at least one draft
    steps: int = 0  # steps that emitted a token
    drafted: int = 0
    accepted: int = 0
    num_preemptions: int = 0
    arrival: float = field(default_factory=time.perf_counter)
    token_times: list[float] = field(default_factory=list)  # when each output token reached the host

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_ids)

    @property
    def num_tokens(self) -> int:
        """Committed tokens: prompt and output, without drafts."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def token_ids(self) -> list[int]:
        """The committed tokens, copied."""
        return [*self.prompt_ids, *self.output_ids]
