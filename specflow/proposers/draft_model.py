"""A small language model drafts for the large one: speculative decoding as first published.

Leviathan et al. 2022 (arXiv 2211.17192), Chen et al. 2023 (arXiv 2302.01318). The draft model keeps keys and values of
its own under the target's block numbers; rejected drafts are simply overwritten.
"""

from dataclasses import dataclass

import torch

from specflow.proposers.draft_loading import DraftOptions
from specflow.proposers.draft_round import DraftRound, RoundShape
from specflow.proposers.draft_sampling import DraftSampler
from specflow.proposers.paged_drafter import PagedDrafter
from specflow.proposers.some_requests import drafts_wanted, stacked_drafts


@dataclass(frozen=True, kw_only=True)
class DraftModelOptions(DraftOptions):
    """Options of `proposer=draft_model`. Raises `ConfigError` when a value is out of range."""


class DraftModelProposer(PagedDrafter):
    """Drafts K tokens one after the other."""

    name = "draft_model"
    bundled = "draft"

    @property
    def shape(self) -> RoundShape:
        """Two committed tokens, then one draft at a time.

        Two tokens cover both a partly accepted round, whose last kept draft is already in the pages (writing it again
        changes nothing), and a fully accepted one, whose last draft was never fed; so every round has the same shapes
        and no branch.
        """
        drafts = self.num_speculative_tokens
        return RoundShape(catch_up=2, past_anchor=drafts - 1, kept=drafts - 1)

    def choose_drafts(self, plan: DraftRound, sampler: DraftSampler) -> torch.Tensor:
        """One pass per draft that some request can use."""
        drafts = [sampler.choose(0, plan.catch_up())]
        for index in range(1, drafts_wanted(plan.host, self.num_speculative_tokens)):
            drafts.append(sampler.choose(index, plan.step(index, drafts[-1])))
        return stacked_drafts(drafts, self.num_speculative_tokens)
