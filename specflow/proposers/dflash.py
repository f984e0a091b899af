"""DFlash: all drafts of a round from one pass over a block of masks (Chen et al. 2026, arXiv 2602.06036).

Every position that the target confirms leaves keys and values in the head's pages, made of the target's hidden states
there. A round then feeds the anchor and masks behind it once, and every row says one draft on its own.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import torch
from torch import Tensor

from specflow.checkpoints.dflash import LoadedDFlash, load_dflash
from specflow.checkpoints.location import find_folder
from specflow.checkpoints.trained_on import trained_on_chat
from specflow.core.draft import Draft
from specflow.core.layer_numbers import to_vllm
from specflow.core.limits import EngineLimits
from specflow.errors import ConfigError
from specflow.kernels.paged_kernels import steps_by
from specflow.proposers.base import ProposeContext, Proposer, Requirements
from specflow.proposers.block_drafter import BlockRows, CpuBlockDrafter, GpuBlockDrafter, block_drafter
from specflow.proposers.draft_loading import DraftDtype, LoadFormat, dummy_note
from specflow.proposers.draft_sampling import DraftSampler, SampleMethod
from specflow.proposers.some_requests import draft_where_wanted
from specflow.proposers.vocabulary import over_all_ids
from specflow.targets.base import Taps, lent_tables
from specflow.zoo.bundle import PREFIX

if TYPE_CHECKING:
    from specflow.backends.base import Backend
    from specflow.targets.base import Target


@dataclass(frozen=True, kw_only=True)
class DFlashOptions:
    """Options of `proposer=dflash`. Raises `ConfigError` when a value is out of range."""

    path: str | None = None  # folder or hub id of the head; None = the bundled one, made for the bundled target
    revision: str | None = None  # branch, tag or commit of a hub id
    dtype: DraftDtype = "auto"  # auto = the target's
    num_speculative_tokens: int | None = None  # K, tokens drafted per round; None = as many as the head was trained for
    whole_block: bool = True  # run the block of the training and keep its first K drafts; False = a shorter block
    draft_sample_method: SampleMethod = "greedy"  # greedy = the most likely token; probabilistic = sampled
    load_format: LoadFormat = "auto"  # dummy = random weights, only config.json is needed

    def __post_init__(self) -> None:
        if self.num_speculative_tokens is not None and self.num_speculative_tokens < 1:
            raise ConfigError(f"proposer.num_speculative_tokens={self.num_speculative_tokens} must be 1 or more.")
        choices = {
            "dtype": get_args(DraftDtype),
            "draft_sample_method": get_args(SampleMethod),
            "load_format": get_args(LoadFormat),
        }
        for key, allowed in choices.items():
            if getattr(self, key) not in allowed:
                raise ConfigError(f"proposer.{key}={getattr(self, key)!r} must be one of {', '.join(allowed)}.")


class DFlashProposer(Proposer):
    """Drafts K tokens in one pass. A head with more than a block overrides `read_head`, `choose` and `count`."""

    name = "dflash"
    bundled = "dflash"

    def __init__(self, options: DFlashOptions) -> None:
        self.options = options
        self.num_speculative_tokens = options.num_speculative_tokens or 0  # known after `load`
        self.drafts_nest = options.whole_block  # rows of a shorter block see fewer masks

    def read_head(self, folder: Path, target: "Target", device: torch.device, dtype: torch.dtype) -> LoadedDFlash:
        """Read the checkpoint for a target. Raises `CheckpointError` or `UnsupportedModelError`."""
        dummy = self.options.load_format == "dummy"
        return load_dflash(folder, target.facts, lent_tables(target), device=device, dtype=dtype, dummy=dummy)

    def bundled_head(self) -> str:
        """Folder, `zoo:NAME` or hub id of the head that an empty `path` means. Raises `ConfigError` for none."""
        return f"{PREFIX}{self.bundled}"

    def load(self, target: "Target", backend: "Backend") -> None:
        """Read the head, complete it with the target's tables and fix K. Raises what `read_head` raises, and
        `ConfigError` for more drafts than the head was trained for."""
        options = self.options
        self._folder = find_folder(options.path or self.bundled_head(), options.revision, "proposer.path")
        self._dtype = target.facts.dtype if options.dtype == "auto" else getattr(torch, options.dtype)
        self._loaded = self.read_head(self._folder, target, backend.device, self._dtype)
        self._head = self._loaded.head.eval()
        self.trained_on_chat = trained_on_chat(self._folder)
        most = self._head.config.max_drafts
        if self.num_speculative_tokens > most:
            raise ConfigError(
                f"proposer.num_speculative_tokens={self.num_speculative_tokens}, but {self._folder} was trained for "
                f"blocks of {self._head.config.block_size} rows, which draft {most}: more would spoil all of them. "
                f"Use at most {most}, or null for {most}."
            )
        self.num_speculative_tokens = self.num_speculative_tokens or most

    def requirements(self) -> Requirements:
        """The captured layers, and pages for the committed tokens and a block that begins with the anchor."""
        config = self._head.config
        return Requirements(
            taps=Taps(layers=config.capture_layers),
            # Counted from the target's last position, one before the anchor.
            lookahead_tokens=config.rows_to_run(self.num_speculative_tokens, self.options.whole_block),
            kv_bytes_per_token=len(config.block_layers) * config.shape.kv_values_per_token * self._dtype.itemsize,
            draft_logits=self.options.draft_sample_method == "probabilistic",
            graph_safe=True,
        )

    def attach(self, target: "Target", limits: EngineLimits) -> None:
        """Allocate pages, tables and the store of draft logits."""
        whole = self.options.whole_block
        self._drafter = block_drafter(self._head, limits, self.num_speculative_tokens, self.name, whole)
        self._vocab_size = limits.vocab_size
        self._sampler = DraftSampler(self.options.draft_sample_method, limits, self.num_speculative_tokens)

    @property
    def nan_drafts(self) -> int:
        """Rounds of a request that were cut short because the head's logits were not finite."""
        return self._sampler.num_cut

    @torch.inference_mode()
    def propose(self, context: ProposeContext) -> Draft:
        """Write the context of all requests, draft for those that want it; see `Proposer.propose`."""
        self._drafter.follow(context)
        return draft_where_wanted(context, self.num_speculative_tokens, lambda part, _picked: self._draft(part))

    def choose(self, rows: BlockRows, sampler: DraftSampler, sampled: bool) -> Tensor:
        """Choose the drafts, [R, K] int64 ids of the target, through the sampler, for which the round has begun.

        sampled: drafts are drawn at the requests' temperatures, so that the sampler keeps the law they are drawn from.
        """
        if not self._head.config.reduced:
            return sampler.choose_all(rows.logits)
        if sampled:
            return sampler.choose_all(over_all_ids(rows.logits, self._head.ids, self._vocab_size))
        return self._head.ids[sampler.choose_all(rows.logits)]

    def count(self, context: ProposeContext, rows: BlockRows, drafts: Tensor, usable: Tensor) -> Tensor:
        """How many of the drafts [R, K] to verify, [R] int64; usable [R]: those before the first that was not finite.

        What exceeds `context.max_drafts` is cut. An answer that depends on a draft may not decide about that draft or
        an earlier one.
        """
        return usable

    def _draft(self, context: ProposeContext) -> Draft:
        """K drafts for each of R requests; no branch on values and no read by the host."""
        sampler = self._sampler
        sampler.begin(context)
        rows = self._drafter.draft(context)
        drafts = self.choose(rows, sampler, sampler.sampled)
        usable = sampler.usable()
        counts = torch.minimum(self.count(context, rows, drafts, usable), context.max_drafts)
        return Draft(drafts, counts, sampler.law())

    def describe(self) -> dict[str, str]:
        """Weights in memory, layers, layout, borrowed tables, method; and drafts lost to logits that were not
        finite."""
        loaded, config = self._loaded, self._head.config
        count, layout = len(config.block_layers), "next-token" if config.sample_from_anchor else "fill-in"
        facts = {
            "num_speculative_tokens": f"{self.num_speculative_tokens} of {config.max_drafts} the head was trained for",
            "draft_sample_method": self.options.draft_sample_method,
            "head": f"{self._folder} ({self.name}, {count} layer{'s' if count > 1 else ''})",
            "parameters": f"{loaded.num_parameters:,}",
            "weights": loaded.checkpoint_hash + dummy_note(self.options.load_format),
            "dtype": str(self._dtype).removeprefix("torch."),
            "block layout": f"{layout} ({loaded.description.layout})",
            "captured layers": f"{_list(config.capture_layers)} ({_list(map(to_vllm, config.capture_layers))} "
            "in vLLM's count)",
            "mask token": str(config.mask_token_id),
            "tables": f"{' and '.join(loaded.borrowed)} borrowed from the target" if loaded.borrowed else "its own",
            "vocabulary": f"{config.draft_vocab_size} of {config.vocab_size} ids may be proposed",
            "rotary base": f"{config.shape.rope.theta:g}",
        }
        if loaded.description.trained_for:
            facts["trained for"] = loaded.description.trained_for
        if self.trained_on_chat is not None:
            facts["trained on"] = "conversations in a chat template" if self.trained_on_chat else "plain text"
        if hasattr(self, "_drafter"):
            fused = isinstance(self._drafter, CpuBlockDrafter | GpuBlockDrafter)
            facts["drafting steps"] = steps_by(fused, self._drafter.pages.kernels)
            if isinstance(self._drafter, GpuBlockDrafter):
                facts["products of few rows"] = self._drafter.products()
            if self.nan_drafts:
                facts["warning"] = (
                    f"{self.name}: logits were not finite in {self.nan_drafts} rounds, which drafted less"
                )
        return facts


def _list(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
