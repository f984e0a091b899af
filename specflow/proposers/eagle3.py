"""EAGLE-3: a small head that reads the target's hidden states drafts a chain of tokens (Li et al. 2025, arXiv
2503.01840).

The head's row p holds token p + 1 and the target's state at p; it predicts token p + 2. Every round the rows that the
target has just confirmed go through the head with true states, which replaces what drafting had written for them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

import torch
from torch import Tensor

from specflow.checkpoints.capture_layers import CONVENTIONS, AuxLayerConvention
from specflow.checkpoints.eagle3 import load_eagle3
from specflow.checkpoints.location import find_folder
from specflow.checkpoints.trained_on import trained_on_chat
from specflow.core.draft import Draft
from specflow.core.limits import EngineLimits
from specflow.errors import ConfigError
from specflow.heads.eagle3 import FusingLayer
from specflow.kernels.paged_kernels import steps_by
from specflow.kernels.rotary import rotary_table
from specflow.proposers.base import ProposeContext, Proposer, Requirements
from specflow.proposers.draft_loading import DraftDtype, LoadFormat, dummy_note
from specflow.proposers.draft_sampling import DraftSampler, SampleMethod
from specflow.proposers.eagle3_round import (
    CpuEagle3Round,
    CpuEagle3Steps,
    Eagle3Round,
    GpuEagle3Round,
    GpuEagle3Steps,
    TorchEagle3Round,
)
from specflow.proposers.feature_rows import FeatureRows, captured, feature_rows
from specflow.proposers.head_pages import HeadPages
from specflow.proposers.some_requests import draft_where_wanted, drafts_wanted, stacked_drafts
from specflow.proposers.vocabulary import over_all_ids
from specflow.targets.base import Taps, lent_tables
from specflow.zoo.bundle import PREFIX

BUNDLED = f"{PREFIX}eagle3"  # what an empty `path` means

if TYPE_CHECKING:
    from specflow.backends.base import Backend
    from specflow.targets.base import Target


@dataclass(frozen=True, kw_only=True)
class Eagle3Options:
    """Options of `proposer=eagle3`. Raises `ConfigError` when a value is out of range."""

    path: str | None = None  # folder or hub id of the head; None = the bundled one, made for the bundled target
    revision: str | None = None  # branch, tag or commit of a hub id
    dtype: DraftDtype = "auto"  # auto = the target's
    num_speculative_tokens: int = 4  # K, tokens drafted per round
    draft_sample_method: SampleMethod = "greedy"  # greedy = the most likely token; probabilistic = sampled
    aux_layer_convention: AuxLayerConvention = "auto"  # what layer numbers in the head's config mean
    rope_theta: float | None = None  # rotary base; None = the head's config
    load_format: LoadFormat = "auto"  # dummy = random weights, only config.json is needed

    def __post_init__(self) -> None:
        if self.num_speculative_tokens < 1:
            raise ConfigError(f"proposer.num_speculative_tokens={self.num_speculative_tokens} must be 1 or more.")
        if self.rope_theta is not None and self.rope_theta <= 0:
            raise ConfigError(f"proposer.rope_theta={self.rope_theta} must be above 0.")
        choices = {
            "dtype": get_args(DraftDtype),
            "draft_sample_method": get_args(SampleMethod),
            "aux_layer_convention": CONVENTIONS,
            "load_format": get_args(LoadFormat),
        }
        for key, allowed in choices.items():
            if getattr(self, key) not in allowed:
                raise ConfigError(f"proposer.{key}={getattr(self, key)!r} must be one of {', '.join(allowed)}.")


class Eagle3Proposer(Proposer):
    """Drafts K tokens one after the other with a trained head; its pages follow every committed position."""

    name = "eagle3"
    drafts_nest = True

    def __init__(self, options: Eagle3Options) -> None:
        self.options = options
        self.num_speculative_tokens = options.num_speculative_tokens

    def load(self, target: "Target", backend: "Backend") -> None:
        """Read the head and complete it with the target's tables. Raises `CheckpointError` or
        `UnsupportedModelError`; see `load_eagle3`."""
        self._folder = find_folder(self.options.path or BUNDLED, self.options.revision, "proposer.path")
        self._dtype = target.facts.dtype if self.options.dtype == "auto" else getattr(torch, self.options.dtype)
        self._loaded = load_eagle3(
            self._folder,
            target.facts,
            lent_tables(target),
            device=backend.device,
            dtype=self._dtype,
            convention=self.options.aux_layer_convention,
            rope_theta=self.options.rope_theta,
            dummy=self.options.load_format == "dummy",
        )
        self._head = self._loaded.head.eval()
        self.trained_on_chat = trained_on_chat(self._folder)

    def requirements(self) -> Requirements:
        """The captured layers, and pages for the committed tokens and up to K positions past the anchor."""
        config = self._head.config
        return Requirements(
            taps=Taps(layers=config.capture_layers),
            lookahead_tokens=self.num_speculative_tokens,
            kv_bytes_per_token=config.num_layers * config.layer.kv_values_per_token * self._dtype.itemsize,
            draft_logits=self.options.draft_sample_method == "probabilistic",
            graph_safe=True,
        )

    def attach(self, target: "Target", limits: EngineLimits) -> None:
        """Allocate pages, the rotary table and the store of draft logits."""
        config = self._head.config
        self._pages = HeadPages(config.layer, config.windows, limits, self._dtype)
        self._rotary = rotary_table(config.layer.rope, limits.table_width, limits.device, self._dtype)
        self._steps: CpuEagle3Steps | GpuEagle3Steps | None = None
        if CpuEagle3Steps.serves(self._head):
            self._steps = CpuEagle3Steps(self._head, self._pages, self._rotary, limits.table_width)
        elif GpuEagle3Steps.serves(self._head, limits):
            most_rows = limits.max_num_seqs * (self.num_speculative_tokens + 1)
            self._steps = GpuEagle3Steps(self._head, self._pages, self._rotary, most_rows)
        self._vocab_size, self._pages_on_cpu = limits.vocab_size, limits.device.type == "cpu"
        self._sampler = DraftSampler(self.options.draft_sample_method, limits, self.num_speculative_tokens)

    @property
    def nan_drafts(self) -> int:
        """Rounds of a request that were cut short because the head's logits were not finite."""
        return self._sampler.num_cut

    @torch.inference_mode()
    def propose(self, context: ProposeContext) -> Draft:
        """Bring the pages up to date for all requests, draft for those that want it; see `Proposer.propose`."""
        rows = feature_rows(context, self._pages.block_size, self.num_speculative_tokens + 1, self.name)
        ids, states = self._follow(context, rows)
        if len(ids) != len(context.host.slots):
            ids, states = ids.index_select(0, rows.last), states.index_select(0, rows.last)
        return draft_where_wanted(
            context,
            self.num_speculative_tokens,
            lambda part, picked: self._draft(part, ids[picked], states[picked]),
        )

    def _follow(self, context: ProposeContext, rows: FeatureRows) -> tuple[Tensor, Tensor]:
        """Write keys and values of the confirmed rows; the tokens they embed [N] and their states [N, E]."""
        attention, head = rows.attention, self._head
        ids = context.token_table[context.slots[rows.owners], attention.positions + 1]
        states = head.fuse(captured(context, rows, head.config.capture_layers, self._dtype))
        if not self._newest_alone(context, len(ids)):  # else the first draft's pass writes them
            self._write(context, rows, ids, states)
        return ids, states

    def _newest_alone(self, context: ProposeContext, num_rows: int) -> bool:
        """Whether the rows are the newest of requests that all draft; host knowledge, on a CPU."""
        host = context.host
        return self._pages_on_cpu and num_rows == len(host.slots) and bool(host.wants_drafts.all())

    def _write(self, context: ProposeContext, rows: FeatureRows, ids: Tensor, states: Tensor) -> None:
        """Keys and values of rows that embed `ids` [N] and have `states` [N, E]."""
        head, host, attention, steps = self._head, context.host, rows.attention, self._steps
        one_layer = head.config.num_layers == 1
        if isinstance(steps, GpuEagle3Steps):
            # Nothing but keys and values of these rows is ever read.
            (steps.store if one_layer else steps.run)(head.embed(ids), states, attention)
            return
        if not one_layer:
            head(head.embed(ids), states, self._rotary.rows(attention.positions), self._pages.attend(attention))
            return
        if steps is not None and not context.static and (host.chunk_len == host.chunk_len[0]).all():
            steps.store(ids, states, host.chunk_start, host.block_table)
            return
        fusing = head.layers[0]
        assert isinstance(fusing, FusingLayer)
        inputs, _ = fusing.inputs(head.embed(ids), states)
        keys_values = fusing.self_attn.keys_values(inputs, self._rotary.rows(attention.positions))
        self._pages.write(0, attention.slot_mapping, *keys_values)

    def _draft(self, context: ProposeContext, ids: Tensor, states: Tensor) -> Draft:
        """K drafts for each of R requests from their newest rows; no branch on values and no read by the host."""
        plan = self._round(context)
        sampler, config = self._sampler, self._head.config
        sampler.begin(context)
        drafts: list[Tensor] = []
        for index in range(drafts_wanted(context.host, self.num_speculative_tokens)):
            states, logits = plan.step(index, ids, states)
            if config.reduced and sampler.sampled:
                logits = over_all_ids(logits, self._head.ids, self._vocab_size)
            ids = sampler.choose(index, logits)
            if config.reduced and not sampler.sampled:
                ids = self._head.ids[ids]
            drafts.append(ids)
        counts = torch.minimum(sampler.usable(), context.max_drafts)
        return Draft(stacked_drafts(drafts, self.num_speculative_tokens), counts, sampler.law())

    def _round(self, context: ProposeContext) -> Eagle3Round:
        if isinstance(self._steps, GpuEagle3Steps):
            return GpuEagle3Round(context, self._steps, self.num_speculative_tokens)
        if self._steps is not None and not context.static:
            return CpuEagle3Round(context, self._steps)
        return TorchEagle3Round(context, self._head, self._pages, self._rotary, self.num_speculative_tokens)

    def describe(self) -> dict[str, str]:
        """Weights in memory, layers, borrowed tables, method; and drafts lost to logits that were not finite."""
        loaded, config = self._loaded, self._head.config
        facts = {
            "num_speculative_tokens": str(self.num_speculative_tokens),
            "draft_sample_method": self.options.draft_sample_method,
            "head": f"{self._folder} (EAGLE-3, {config.num_layers} layer{'s' if config.num_layers > 1 else ''})",
            "parameters": f"{loaded.num_parameters:,}",
            "weights": loaded.checkpoint_hash + dummy_note(self.options.load_format),
            "dtype": str(self._dtype).removeprefix("torch."),
            "captured layers": f"{_list(config.capture_layers)} ({_list(loaded.captures.boundaries)} in vLLM's count)",
            "captured layers from": loaded.captures.source,
            "tables": f"{' and '.join(loaded.borrowed)} borrowed from the target" if loaded.borrowed else "its own",
            "vocabulary": f"{config.draft_vocab_size} of {config.vocab_size} ids may be proposed",
            "rotary base": f"{config.layer.rope.theta:g}",
        }
        if self.trained_on_chat is not None:
            facts["trained on"] = "conversations in a chat template" if self.trained_on_chat else "plain text"
        if hasattr(self, "_steps"):
            facts["drafting steps"] = steps_by(self._steps is not None, self._pages.kernels)
            if isinstance(self._steps, GpuEagle3Steps):
                facts["products of few rows"] = self._steps.products()
            if self.nan_drafts:
                facts["warning"] = f"eagle3: logits were not finite in {self.nan_drafts} rounds, which drafted less"
        return facts


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
