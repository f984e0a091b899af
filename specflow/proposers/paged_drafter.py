"""What drafters that are language models have in common: loading, following, drafting for those who want drafts."""

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from specflow.checkpoints.decoder_config import DecoderConfig, read_decoder_config
from specflow.checkpoints.location import find_folder
from specflow.core.draft import Draft
from specflow.core.limits import EngineLimits
from specflow.kernels.paged_kernels import steps_by
from specflow.proposers.base import HostView, ProposeContext, Proposer, Requirements
from specflow.proposers.draft_loading import DraftOptions, load_draft
from specflow.proposers.draft_pages import DraftPages
from specflow.proposers.draft_round import DraftRound, RoundShape
from specflow.proposers.draft_sampling import DraftSampler
from specflow.proposers.some_requests import draft_where_wanted
from specflow.zoo.bundle import PREFIX

if TYPE_CHECKING:
    from specflow.backends.base import Backend
    from specflow.targets.base import Target


class PagedDrafter(Proposer):
    """Drafts K tokens by a language model of its own; requests that draft nothing only have their pages followed.

    A method says how a round is shaped, and how it gets its drafts.
    """

    drafts_nest = True
    bundled: str  # name of the bundled model that `path: null` stands for

    def __init__(self, options: DraftOptions) -> None:
        self.options = options
        self.num_speculative_tokens = options.num_speculative_tokens

    @property
    @abstractmethod
    def shape(self) -> RoundShape:
        """How many tokens a round feeds, and what it leaves in the pages."""

    @abstractmethod
    def choose_drafts(self, plan: DraftRound, sampler: DraftSampler) -> torch.Tensor:
        """Run a round over R requests; token ids [R, K] int64. No branch on values and no read by the host."""

    def load(self, target: "Target", backend: "Backend") -> None:
        """Read the draft model. Raises `CheckpointError`, `UnsupportedModelError`, or `ConfigError` when its
        vocabulary is not the target's."""
        reference = self.options.path or f"{PREFIX}{self.bundled}"
        self._folder = find_folder(reference, self.options.revision, "proposer.path")
        config = read_decoder_config(self._folder)
        self.check_config(self._folder, config)
        self._weights = load_draft(self._folder, config, self.options.dtype, target, backend)
        self._dtype = self._weights.embedding.dtype

    def check_config(self, folder: Path, config: DecoderConfig) -> None:
        """Look at a checkpoint before its weights are read, to refuse what is none of this method's."""

    def requirements(self) -> Requirements:
        """Pages of its own for the committed tokens and up to K positions past the anchor."""
        return Requirements(
            lookahead_tokens=self.num_speculative_tokens,
            kv_bytes_per_token=self._weights.config.kv_bytes_per_token(self._dtype),
            draft_logits=self.options.draft_sample_method == "probabilistic",
            graph_safe=True,
        )

    def attach(self, target: "Target", limits: EngineLimits) -> None:
        """Allocate pages, the rotary table and the store of draft logits."""
        self._pages = DraftPages(self._weights, limits, self.shape)
        self._sampler = DraftSampler(self.options.draft_sample_method, limits, self.num_speculative_tokens)
        self._too_long = limits.max_model_len > self._weights.config.max_positions

    def start(self, request_id: str, slot: int, prompt: Sequence[int]) -> None:
        """Forget what the slot's last owner left."""
        self._pages.forget(slot)

    @property
    def nan_drafts(self) -> int:
        """Rounds of a request that were cut short because the draft model's logits were not finite."""
        return self._sampler.num_cut

    @torch.inference_mode()
    def propose(self, context: ProposeContext) -> Draft:
        """Draft for the requests that want it, follow the committed tokens of all; see `Proposer.propose`."""
        self._pages.follow(context)
        return draft_where_wanted(context, self.num_speculative_tokens, lambda part, _picked: self._draft(part))

    def replayed(self, host: HostView) -> None:
        """See `Proposer.replayed`."""
        self._pages.replayed(host)

    def describe(self) -> dict[str, str]:
        """Weights in memory, sizes, method; and drafts lost to logits that were not finite, if any."""
        config = self._weights.config
        facts = {
            "num_speculative_tokens": str(self.num_speculative_tokens),
            "draft_sample_method": self.options.draft_sample_method,
            "model": f"{self._folder} ({config.architecture})",
            "parameters": f"{self._weights.num_parameters:,}",
            "weights": self._weights.checkpoint_hash,
            "dtype": str(self._dtype).removeprefix("torch."),
            "vocabulary": f"{self._weights.head.shape[1]} of {config.vocab_size} ids may be proposed",
            "max_positions": str(config.max_positions),
        }
        if hasattr(self, "_pages"):
            facts["drafting steps"] = steps_by(self._pages.steps is not None, self._pages.decoder.kernels)
            if self.nan_drafts:
                rounds = self.nan_drafts
                facts["warning"] = f"{self.name}: logits were not finite in {rounds} rounds, which drafted less"
        return facts

    def _draft(self, context: ProposeContext) -> Draft:
        """K drafts for each of R requests; no branch on values and no read by the host."""
        self._sampler.begin(context)
        drafts = self.choose_drafts(self._pages.round(context), self._sampler)
        return Draft(drafts, self._num_drafts(context), self._sampler.law())

    def _num_drafts(self, context: ProposeContext) -> torch.Tensor:
        """Drafts that count, [R] int64: within the request's limit, finite, and within the trained positions."""
        counts = torch.minimum(self._sampler.usable(), context.max_drafts)
        if self._too_long:
            room = (self._weights.config.max_positions - context.num_tokens).clamp_(min=0)
            counts = torch.minimum(counts, room)
        return counts
