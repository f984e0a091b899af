"""One decode step as a function of what lies on the device: target pass, verification, drafting, and the books.

Every shape follows from the `Variant`, nothing is read on the host, and all state is written in place, so the function
can be called or captured in a graph and replayed. Rows whose request has reached its limit, and padding, are idle: they
stand at position 0, write to block 0 and change nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from specflow.core.attention import AttentionInputs, QueryGroup
from specflow.core.batch import PackedBatch, TargetOutput
from specflow.core.draft import Draft, Verdict, VerifyInputs
from specflow.core.limits import EngineLimits
from specflow.engine.buffers import StepBuffers
from specflow.engine.decode_state import DecodeRows, DecodeState
from specflow.kernels.noise import fresh_seeds
from specflow.proposers.base import Features, HostView, ProposeContext, Proposer
from specflow.samplers.base import Sampler
from specflow.samplers.filters import RowFilters, filter_rows
from specflow.targets.base import Target

Law = Literal["greedy", "sampled", "filtered"]  # all requests greedy; some sampled; some with top-k, top-p or min-p
COUNTS = 5  # columns of a result before its tokens: emitted, accepted, verified drafts, next drafts, dropped drafts
RESULTS = 4  # results kept on the device: more than steps in flight


@dataclass(frozen=True)
class Variant:
    """What a step is made for; everything else it reads on the device."""

    batch: int  # rows, padding included
    width: int  # most drafts that it verifies: K, or 0
    law: Law
    drafts: bool  # the proposer runs inside


@dataclass(frozen=True)
class Verified:
    """The first half of a step."""

    rows: DecodeRows
    batch: PackedBatch
    output: TargetOutput
    verdict: Verdict


class DecodeStep:
    """The step over one engine's components and buffers."""

    def __init__(
        self,
        target: Target,
        proposer: Proposer | None,
        sampler: Sampler,
        buffers: StepBuffers,
        state: DecodeState,
        limits: EngineLimits,
    ) -> None:
        self._target, self._proposer, self._sampler = target, proposer, sampler
        self._buffers, self._state, self._limits = buffers, state, limits
        columns = COUNTS + limits.num_speculative_tokens + 1
        rows = len(state.slots)
        self.results = torch.zeros((RESULTS, rows, columns), dtype=torch.int64, device=limits.device)
        self.mark: Callable[[str], None] = _ignore  # called at the end of each part with its name, "" at the beginning
        self._turn = torch.zeros(1, dtype=torch.int64, device=limits.device)
        self._fixed: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def begin(self, turn: int) -> None:
        """The next step writes result number `turn`, the ones after it the following ones in a ring."""
        self._turn.fill_(turn)

    @torch.inference_mode()
    def run(self, variant: Variant) -> None:
        """A whole step; its outcome is in `results`."""
        self.mark("")
        done = self.verify(variant)
        rows, verdict = done.rows, done.verdict
        emitted = torch.where(rows.active, verdict.num_emitted, 0)
        accepted = torch.where(rows.active, verdict.num_accepted, 0)
        self._buffers.store_tokens(rows.slots, rows.num_tokens, verdict.token_ids, emitted)
        num_tokens, rounds = rows.num_tokens + emitted, rows.rounds + rows.active
        self._state.store("num_tokens", rows.slots, num_tokens)
        self._state.store("rounds", rows.slots, rounds)
        counts = dropped = torch.zeros_like(emitted)
        self.mark("books")
        if variant.drafts:
            counts, dropped = self._draft(variant, done, accepted, num_tokens, rounds)
            self._state.store("num_drafts", rows.slots, counts)
            self.mark("draft")
        columns = torch.stack([emitted, accepted, rows.num_drafts, counts, dropped], 1)
        result = torch.cat([columns, verdict.token_ids], 1)
        self.results[:, : variant.batch, : result.shape[1]].index_copy_(0, self._turn, result.unsqueeze(0))
        self._turn.add_(1).remainder_(RESULTS)
        self.mark("books")

    @torch.inference_mode()
    def verify(self, variant: Variant) -> Verified:
        """Target pass and verification; no book is changed."""
        rows = self._state.rows(variant.batch)
        batch = self._pack(variant, rows)
        self.mark("books")
        output = self._target.forward(batch)
        self.mark("target")
        logits, scaled = self._process(variant, rows, output.logits)
        verdict = self._sampler.verify(logits, self._inputs(variant, rows, batch, scaled))
        self.mark("verify")
        return Verified(rows, batch, output, verdict)

    def _pack(self, variant: Variant, rows: DecodeRows) -> PackedBatch:
        """One token and `width` drafts of each row, [B * (width + 1)]; places without a draft repeat the first
        position and write to block 0."""
        steps, starts, every = self._constants(variant)
        size, width = self._limits.block_size, variant.width
        first = torch.where(rows.active, rows.num_tokens - 1, 0).unsqueeze(1)
        real = steps <= rows.num_drafts.unsqueeze(1)
        positions = torch.where(real, first + steps, first)
        block_table = self._buffers.blocks.device[rows.slots]
        places = positions % size
        slots = torch.add(places, block_table.gather(1, positions // size), alpha=size)
        flat = positions.flatten()
        attention = AttentionInputs(
            positions=flat,
            slot_mapping=torch.where(real & rows.active.unsqueeze(1), slots, places).flatten(),
            block_table=block_table,
            seq_len=first.squeeze(1) + rows.num_drafts + 1,
            groups=(QueryGroup(0, variant.batch, 0, width + 1, self._limits.max_model_len, None, is_bound=True),),
            query_start=starts,
        )
        return PackedBatch(
            token_ids=self._buffers.tokens.device[rows.slots.unsqueeze(1), positions].flatten(),
            positions=flat,
            slots=rows.slots,
            query_start=starts,
            logit_rows=every,
            attention=attention,
            query_len_host=np.full(variant.batch, width + 1, dtype=np.int64),
        )

    def _constants(self, variant: Variant) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """0 … width, the first packed token of each row [B+1], and all packed tokens; made once, outside any graph."""
        key = variant.batch, variant.width + 1
        if key not in self._fixed:
            device = self._limits.device
            starts = torch.arange(key[0] + 1, device=device) * key[1]
            self._fixed[key] = (
                torch.arange(key[1], device=device),
                starts,
                torch.arange(key[0] * key[1], device=device),
            )
        return self._fixed[key]

    def _process(self, variant: Variant, rows: DecodeRows, logits: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """Logits as the sampler takes them, and whether temperatures are applied: `samplers.processors`, on the
        device, for requests that have nothing but temperature and filters."""
        if variant.law == "greedy":
            return logits, True
        if variant.law == "sampled" and self._sampler.applies_temperature:
            return logits, False
        most = variant.width + 1
        divisor = torch.where(rows.temperature == 0, 1.0, rows.temperature).repeat_interleave(most)
        logits = logits.float() / divisor.unsqueeze(1)
        if variant.law == "filtered":
            own = rows.filters
            parts = (part.repeat_interleave(most) for part in (own.top_k, own.top_p, own.min_p))
            logits = filter_rows(logits, RowFilters(*parts))
        return logits, True

    def _inputs(self, variant: Variant, rows: DecodeRows, batch: PackedBatch, scaled: bool) -> VerifyInputs:
        steps, starts, _ = self._constants(variant)
        drafts = batch.token_ids.unflatten(0, (variant.batch, -1))[:, 1:]
        laws = self._buffers.draft_logits if variant.width else None
        in_place = laws is not None and self._sampler.reads_draft_slots
        return VerifyInputs(
            cu_rows=starts,
            draft_ids=drafts.masked_fill(steps[1:] > rows.num_drafts.unsqueeze(1), -1),
            num_drafts=rows.num_drafts,
            positions=rows.num_tokens,
            temperature=rows.temperature,
            seeds=rows.seeds,
            rounds=rows.rounds,
            draft_logits=laws if in_place or laws is None else laws[rows.slots],
            draft_slots=rows.slots if in_place else None,
            all_greedy=variant.law == "greedy",
            scaled=scaled,
        )

    def _draft(
        self,
        variant: Variant,
        done: Verified,
        accepted: torch.Tensor,
        num_tokens: torch.Tensor,
        rounds: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft, keep the drafts behind the committed tokens; how many can be verified and how many were dropped."""
        assert self._proposer is not None
        rows, output = done.rows, done.output
        features = None
        if output.hidden or output.last_hidden is not None:
            features = Features(
                start=done.batch.query_start[:-1],
                num_valid=accepted + 1,
                positions=done.batch.positions,
                hidden=output.hidden,
                last_hidden=output.last_hidden,
            )
        room = (rows.limits - 1 - num_tokens).clamp(0, self._limits.num_speculative_tokens)
        context = ProposeContext(
            slots=rows.slots,
            num_tokens=num_tokens,
            max_drafts=room * rows.speculates,
            token_table=self._buffers.tokens.device,
            block_table=done.batch.attention.block_table,
            temperature=rows.temperature,
            seeds=fresh_seeds(rows.seeds, rounds) if self._sampler.fresh_draft_noise else rows.seeds,
            all_greedy=variant.law == "greedy",
            features=features,
            host=HostView.bounds(variant.batch, self._limits),
            noise_domain=self._sampler.draft_domain,
            keep_law=self._buffers.draft_logits is not None,
            filters=rows.filters if variant.law == "filtered" else None,
            static=True,
        )
        draft = self._proposer.propose(context)
        counts, dropped = usable_drafts(draft, context.max_drafts, self._limits.vocab_size)
        self._buffers.store_tokens(rows.slots, num_tokens, draft.token_ids, counts)
        self._buffers.store_draft_logits(rows.slots, draft)
        return counts, dropped


def _ignore(_part: str) -> None:
    """Nobody measures."""


def usable_drafts(draft: Draft, max_drafts: torch.Tensor, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Drafts that may be verified and drafts dropped for their ids, both [B] int64; max_drafts [B] int64."""
    wanted = torch.minimum(draft.num_drafts, max_drafts)
    in_vocabulary = (draft.token_ids >= 0) & (draft.token_ids < vocab_size)
    counts = torch.minimum(wanted, in_vocabulary.to(torch.int64).cumprod(1).sum(1))
    return counts, wanted - counts
