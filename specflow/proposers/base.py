"""Contract of a proposer: it drafts tokens, may be wrong about every one, and the output does not change."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from specflow.core.draft import Draft
from specflow.core.limits import EngineLimits
from specflow.kernels.noise import DRAFT
from specflow.samplers.filters import RowFilters
from specflow.targets.base import Taps

if TYPE_CHECKING:
    from specflow.backends.base import Backend
    from specflow.targets.base import Target


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """What a proposer needs of the engine, known before any buffer is allocated."""

    taps: Taps = field(default_factory=Taps)
    target_kv: bool = False  # reads the target's own KV pages
    host_tokens: bool = False  # reads committed tokens on the host
    lookahead_tokens: int = 0  # KV positions past the anchor that drafting writes to pages of its own
    kv_bytes_per_token: int = 0  # of those pages, which share the target's block tables
    draft_logits: bool = False  # drafts come with the logits they were sampled from
    pass_costs: bool = False  # `calibrate` is told what passes of the target cost, before the first request
    # `propose` with a `ProposeContext.static` can be captured in a CUDA graph: its shapes follow from the number of
    # requests, it reads no device value, keeps no book on the host, and takes host integers for bounds.
    graph_safe: bool = False


@dataclass(frozen=True)
class PassCost:
    """What a pass of the target takes, measured on this machine."""

    requests: int
    tokens: int  # of all requests together, each with its logits
    seconds: float


@dataclass(frozen=True)
class Features:
    """Hidden states of the target pass that has just been committed, at its packed tokens."""

    start: torch.Tensor  # [B] int64: first packed row of each request
    num_valid: torch.Tensor  # [B] int64: rows that were kept: the prompt chunk, or anchor plus accepted drafts
    positions: torch.Tensor  # [T] int64
    hidden: dict[int, torch.Tensor]  # layer -> [T, E], see `Taps`
    last_hidden: torch.Tensor | None  # [T, E]


@dataclass(frozen=True)
class HostView:
    """The same step as host integers, for planning and for proposers that work on the host."""

    request_ids: Sequence[str]
    num_tokens: np.ndarray  # [B] int64: committed tokens, the anchor included
    prompt_len: np.ndarray  # [B] int64
    chunk_start: np.ndarray  # [B] int64: first position the target has just processed
    chunk_len: np.ndarray  # [B] int64: kept positions it has just processed
    wants_drafts: np.ndarray  # [B] bool: False while the prompt is still being processed, or at a limit
    max_drafts: np.ndarray  # [B] int64: 0 … K, most drafts that can be used
    token_table: np.ndarray  # [max_num_seqs+1, width] int64; read only; only with Requirements.host_tokens
    slots: np.ndarray  # [B] int64
    block_table: np.ndarray  # [B, max_blocks] int64; 0 where there is no block

    @classmethod
    def bounds(cls, num_requests: int, limits: EngineLimits) -> "HostView":
        """What holds for any decoding step of so many requests: the largest lengths, and nothing of any request."""
        full = np.full(num_requests, limits.max_model_len, dtype=np.int64)
        drafts = np.full(num_requests, limits.num_speculative_tokens, dtype=np.int64)
        return cls(
            request_ids=[""] * num_requests,
            num_tokens=full,
            prompt_len=np.ones_like(full),
            chunk_start=full - drafts - 2,
            chunk_len=drafts + 1,
            wants_drafts=np.ones(num_requests, dtype=bool),
            max_drafts=drafts,
            token_table=np.zeros((0, limits.table_width), dtype=np.int64),
            slots=np.full(num_requests, limits.pad_slot, dtype=np.int64),
            block_table=np.zeros((num_requests, limits.max_blocks_per_seq), dtype=np.int64),
        )


@dataclass(frozen=True)
class ProposeContext:
    """One call of `propose`. Requests that still process their prompt are included, so that caches follow.

    Device tensors unless said. Row b of every [B] field is the same request; `token_table[slots[b], :num_tokens[b]]`
    are its committed tokens and the last of them is the anchor, which the target has not processed yet.
    """

    slots: torch.Tensor  # [B] int64
    num_tokens: torch.Tensor  # [B] int64
    max_drafts: torch.Tensor  # [B] int64; 0 = follow the committed tokens, draft nothing
    token_table: torch.Tensor  # [max_num_seqs+1, width] int64
    block_table: torch.Tensor  # [B, max_blocks] int64; own pages may use the target's block numbers
    temperature: torch.Tensor  # [B] float32
    seeds: torch.Tensor  # [B] int64
    all_greedy: bool  # host knowledge: every temperature is 0
    features: Features | None  # what `Requirements.taps` asked for
    host: HostView
    noise_domain: int = DRAFT  # the sampler's: domain of the noise that sampled drafts are drawn with (kernels.noise)
    keep_law: bool = True  # the sampler reads `Draft.logits`; False: return None and store nothing
    filters: RowFilters | None = None  # top-k, top-p and min-p of the requests [B]; None when nobody has any
    # The step may be captured in a graph and run again: every request decodes and drafts, with `Features` of K + 1 rows
    # each, and `host` is `HostView.bounds`. Only for proposers with `Requirements.graph_safe`.
    static: bool = False


class Proposer(ABC):
    """A drafting method. Only `propose` must be written; model-free methods usually derive from `HostProposer`."""

    name: str = "proposer"
    num_speculative_tokens: int  # K
    # Prompts it was trained on: True = conversations in a chat template, False = plain text, None = both, or unknown.
    trained_on_chat: bool | None = None
    # What it drafts at a smaller K is, at least nearly always, the beginning of what it drafts at a larger one: then
    # acceptance at every smaller K can be read from a run at the largest.
    drafts_nest: bool = False

    def load(self, target: "Target", backend: "Backend") -> None:
        """Read the drafter's checkpoint and check it against the loaded target (vocabulary, sizes, layers)."""

    def requirements(self) -> Requirements:
        """What the engine must provide. Called after `load` and before `attach`."""
        return Requirements()

    def attach(self, target: "Target", limits: EngineLimits) -> None:
        """Allocate buffers and pages; called once, before the first step."""

    def calibrate(self, costs: Sequence["PassCost"]) -> None:
        """Told after `attach`, with `Requirements.pass_costs`, before any request has a slot.

        First passes of one request, their tokens ascending to what verification may need at once, or to where measuring
        took long; then passes of several requests. A single one means that further tokens cost nothing.
        """

    def start(self, request_id: str, slot: int, prompt: Sequence[int]) -> None:
        """A request enters its slot (again, after a pre-emption: nothing of it is cached any more)."""

    @abstractmethod
    def propose(self, context: ProposeContext) -> Draft:
        """Draft up to K tokens for each of the B requests."""

    def replayed(self, host: HostView) -> None:
        """A step with a static context has run on the device, with this view of it; for books kept on the host.

        Told in order, a step late, and before any further `propose`. `Requirements.graph_safe` only.
        """

    def finish(self, request_id: str, slot: int, token_ids: Sequence[int]) -> None:
        """A request leaves its slot: finished, aborted or pre-empted. Always paired with `start`.

        token_ids: all its committed tokens, prompt and output, on the host. The last of them, up to K + 1, were never
        in a `ProposeContext`: nothing is drafted for a request that has ended. A pre-empted one has no such rest.
        """

    def reset(self) -> None:
        """Forget what was learnt from requests that have ended. Called only while no request has a slot."""

    def describe(self) -> dict[str, str]:
        """What really ran: weights, sizes, options; shown in the report."""
        return {}


class HostProposer(Proposer):
    """Base of methods that look at one request's tokens on the host and return a list of ids."""

    def requirements(self) -> Requirements:
        """Committed tokens on the host, nothing else."""
        return Requirements(host_tokens=True)

    @abstractmethod
    def draft(self, tokens: np.ndarray, max_drafts: int, request_id: str) -> Sequence[int] | np.ndarray:
        """Ids that may follow `tokens` ([L] int64, prompt and output), at most `max_drafts`; empty for none."""

    def propose(self, context: ProposeContext) -> Draft:
        """Call `draft` once per request and pack the results."""
        host = context.host
        ids = np.full((len(host.slots), self.num_speculative_tokens), -1, dtype=np.int64)
        counts = np.zeros(len(host.slots), dtype=np.int64)
        for row in np.flatnonzero(host.wants_drafts & (host.max_drafts > 0)).tolist():
            tokens = host.token_table[host.slots[row], : host.num_tokens[row]]
            found = np.asarray(self.draft(tokens, int(host.max_drafts[row]), host.request_ids[row]), dtype=np.int64)
            counts[row] = min(len(found), int(host.max_drafts[row]))
            ids[row, : counts[row]] = found[: counts[row]]
        device = context.slots.device
        return Draft(torch.from_numpy(ids).to(device), torch.from_numpy(counts).to(device))
