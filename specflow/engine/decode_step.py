"""One decode step as a function of what lies on the device: target pass, verification, drafting, and the books.

Every shape follows from the `Variant` and nothing is read on the host, so the function can be called or captured in a
graph and replayed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from specflow.core.batch import PackedBatch, TargetOutput
from specflow.core.draft import Draft, Verdict, VerifyInputs
from specflow.core.limits import EngineLimits
from specflow.engine.buffers import StepBuffers
from specflow.engine.decode_books import Committed, Opened, decode_books
from specflow.engine.decode_state import DecodeRows, DecodeState
from specflow.kernels.noise import fresh_seeds
from specflow.proposers.base import Features, HostView, ProposeContext, Proposer
from specflow.samplers.base import Sampler
from specflow.samplers.filters import RowFilters, filter_rows
from specflow.targets.base import Target

Law = Literal["greedy", "sampled", "filtered"]  # all requests greedy; some sampled; some with top-k, top-p or min-p


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
        self._buffers, self._limits = buffers, limits
        self.books = decode_books(buffers, state, limits)
        self.mark: Callable[[str], None] = _ignore  # called at the end of each part with its name, "" at the beginning

    @torch.inference_mode()
    def run(self, variant: Variant) -> None:
        """A whole step; its outcome is in the books' `results`."""
        self.mark("")
        done = self.verify(variant)
        committed = self.books.commit(done.rows, done.verdict)
        self.mark("books")
        draft = None
        if variant.drafts:
            draft = self._draft(variant, done, committed)
            self.mark("draft")
        self.books.close(done.rows, done.verdict, committed, draft)
        self.mark("books")

    @torch.inference_mode()
    def verify(self, variant: Variant) -> Verified:
        """Target pass and verification; no book is changed."""
        opened = self.books.open(variant.batch, variant.width)
        self.mark("books")
        output = self._target.forward(opened.batch)
        self.mark("target")
        logits, scaled = self._process(variant, opened.rows, output.logits)
        verdict = self._sampler.verify(logits, self._inputs(variant, opened, scaled))
        self.mark("verify")
        return Verified(opened.rows, opened.batch, output, verdict)

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

    def _inputs(self, variant: Variant, opened: Opened, scaled: bool) -> VerifyInputs:
        rows = opened.rows
        laws = self._buffers.draft_logits if variant.width else None
        in_place = laws is not None and self._sampler.reads_draft_slots
        return VerifyInputs(
            cu_rows=opened.batch.query_start,
            draft_ids=opened.draft_ids,
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

    def _draft(self, variant: Variant, done: Verified, committed: Committed) -> Draft:
        """Draft, and keep the law of the drafts."""
        assert self._proposer is not None
        rows, output = done.rows, done.output
        features = None
        if output.hidden or output.last_hidden is not None:
            features = Features(
                start=done.batch.query_start[:-1],
                num_valid=committed.accepted + 1,
                positions=done.batch.positions,
                hidden=output.hidden,
                last_hidden=output.last_hidden,
            )
        seeds = rows.seeds
        if self._sampler.fresh_draft_noise and variant.law != "greedy":
            seeds = fresh_seeds(seeds, committed.rounds)
        draft = self._proposer.propose(
            ProposeContext(
                slots=rows.slots,
                num_tokens=committed.num_tokens,
                max_drafts=committed.max_drafts,
                token_table=self._buffers.tokens.device,
                block_table=done.batch.attention.block_table,
                temperature=rows.temperature,
                seeds=seeds,
                all_greedy=variant.law == "greedy",
                features=features,
                host=HostView.bounds(variant.batch, self._limits),
                noise_domain=self._sampler.draft_domain,
                keep_law=self._buffers.draft_logits is not None,
                filters=rows.filters if variant.law == "filtered" else None,
                static=True,
            )
        )
        self._buffers.store_draft_logits(rows.slots, draft)
        return draft


def _ignore(_part: str) -> None:
    """Nobody measures."""
