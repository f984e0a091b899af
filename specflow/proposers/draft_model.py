"""A small language model drafts for the large one: speculative decoding as first published.

Leviathan et al. 2022 (arXiv 2211.17192), Chen et al. 2023 (arXiv 2302.01318). The draft model keeps keys and values of
its own under the target's block numbers; rejected drafts are simply overwritten.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F

from specflow.checkpoints.decoder import DecoderWeights, load_decoder
from specflow.checkpoints.decoder_config import read_decoder_config
from specflow.checkpoints.location import find_folder
from specflow.core.draft import Draft
from specflow.core.limits import EngineLimits
from specflow.errors import CheckpointError, ConfigError
from specflow.proposers.base import ProposeContext, Proposer, Requirements
from specflow.proposers.cpu_decoder_steps import CpuDecoderSteps
from specflow.proposers.decoder import Decoder
from specflow.proposers.draft_round import CpuRound, DraftRound, TorchRound, chunk_inputs
from specflow.proposers.draft_sampling import DraftSampler, SampleMethod
from specflow.proposers.vocabulary import check_same_vocabulary
from specflow.zoo.bundle import PREFIX

if TYPE_CHECKING:
    from specflow.backends.base import Backend
    from specflow.targets.base import Target

DraftDtype = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class DraftModelOptions:
    """Options of `proposer=draft_model`. Raises `ConfigError` when a value is out of range."""

    path: str | None = None  # folder or hub id of the draft model; None = the bundled one
    revision: str | None = None  # branch, tag or commit of a hub id
    dtype: DraftDtype = "auto"  # auto = the target's
    num_speculative_tokens: int = 4  # K, tokens drafted per round
    draft_sample_method: SampleMethod = "greedy"  # greedy = the most likely token; probabilistic = sampled

    def __post_init__(self) -> None:
        if self.num_speculative_tokens < 1:
            raise ConfigError(f"proposer.num_speculative_tokens={self.num_speculative_tokens} must be 1 or more.")
        for key, allowed in (("dtype", get_args(DraftDtype)), ("draft_sample_method", get_args(SampleMethod))):
            if getattr(self, key) not in allowed:
                raise ConfigError(f"proposer.{key}={getattr(self, key)!r} must be one of {', '.join(allowed)}.")


class DraftModelProposer(Proposer):
    """Drafts K tokens one after the other; requests that draft nothing only have their keys and values followed."""

    name = "draft_model"

    def __init__(self, options: DraftModelOptions) -> None:
        self.options = options
        self.num_speculative_tokens = options.num_speculative_tokens

    def load(self, target: "Target", backend: "Backend") -> None:
        """Read the draft model. Raises `CheckpointError`, `UnsupportedModelError`, or `ConfigError` when its
        vocabulary is not the target's."""
        reference = self.options.path or f"{PREFIX}draft"
        folder = find_folder(reference, self.options.revision, "proposer.path")
        config = read_decoder_config(folder)
        facts = target.facts
        check_same_vocabulary(
            target.tokenizer, facts.name, facts.vocab_size, _read_tokenizer(folder), str(folder), config.vocab_size
        )
        dtype = facts.dtype if self.options.dtype == "auto" else getattr(torch, self.options.dtype)
        weights = load_decoder(folder, config, backend.device, dtype)
        proposable = min(facts.vocab_size, config.vocab_size, facts.num_token_ids)
        self._weights = _fit_vocabulary(weights, facts.vocab_size, proposable)
        self._folder, self._dtype = folder, dtype

    def requirements(self) -> Requirements:
        """Pages of its own for the committed tokens and up to K positions past the anchor."""
        return Requirements(
            lookahead_tokens=self.num_speculative_tokens,
            kv_bytes_per_token=self._weights.config.kv_bytes_per_token(self._dtype),
            draft_logits=self.options.draft_sample_method == "probabilistic",
        )

    def attach(self, target: "Target", limits: EngineLimits) -> None:
        """Allocate pages, the rotary table and the store of draft logits."""
        self._decoder = Decoder(
            self._weights,
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            num_positions=limits.table_width,
        )
        fused = CpuDecoderSteps.serves(self._decoder)
        self._steps = CpuDecoderSteps(self._decoder, limits.table_width) if fused else None
        self._sampler = DraftSampler(
            self.options.draft_sample_method,
            max_rows=limits.max_num_seqs + 1,
            num_drafts=self.num_speculative_tokens,
            vocab_size=limits.vocab_size,
            device=limits.device,
        )
        # Committed positions of each slot whose keys and values are right, drafts counted as if accepted.
        self._covered = np.zeros(limits.max_num_seqs + 1, dtype=np.int64)
        self._too_long = limits.max_model_len > self._weights.config.max_positions
        self._num_cut = torch.zeros((), dtype=torch.int64, device=limits.device)

    def start(self, request_id: str, slot: int, prompt: Sequence[int]) -> None:
        """Forget what the slot's last owner left."""
        self._covered[slot] = 0

    @property
    def nan_drafts(self) -> int:
        """Rounds of a request that were cut short because the draft model's logits were not finite."""
        return int(self._num_cut)

    @torch.inference_mode()
    def propose(self, context: ProposeContext) -> Draft:
        """Draft for the requests that want it, follow the committed tokens of all; see `Proposer.propose`."""
        self._follow(context)
        rows = np.flatnonzero(context.host.wants_drafts)
        if len(rows) == len(context.host.slots):
            return self._draft(context)
        shape = (len(context.host.slots), self.num_speculative_tokens)
        token_ids = torch.full(shape, -1, device=context.slots.device)
        num_drafts = torch.zeros_like(context.slots)
        if not len(rows):
            return Draft(token_ids, num_drafts)
        picked = torch.from_numpy(rows).to(context.slots.device)
        draft = self._draft(_pick(context, rows, picked))
        logits = None
        if draft.logits is not None:
            logits = draft.logits.new_full((shape[0], *draft.logits.shape[1:]), float("-inf"))
            logits[picked] = draft.logits
        token_ids[picked], num_drafts[picked] = draft.token_ids, draft.num_drafts
        return Draft(token_ids, num_drafts, logits)

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
            "drafting steps": "fused CPU kernels" if getattr(self, "_steps", None) else "plain torch",
        }
        if hasattr(self, "_num_cut") and self.nan_drafts:
            facts["warning"] = f"draft_model: logits were not finite in {self.nan_drafts} rounds, which drafted less"
        return facts

    def _follow(self, context: ProposeContext) -> None:
        """Feed the committed tokens that the uniform catch-up of `_draft` does not reach: prompts, resumed requests
        and rounds without drafts."""
        host = context.host
        ends = np.where(host.wants_drafts, host.num_tokens - 2, host.chunk_start + host.chunk_len)
        covered = np.minimum(self._covered[host.slots], host.num_tokens - 1)
        rows = np.flatnonzero(covered < ends)
        if len(rows):
            picked = torch.from_numpy(rows).to(context.slots.device)
            decoder = self._decoder
            inputs, owners = chunk_inputs(
                covered[rows], ends[rows], host.block_table[rows], decoder.rotary, decoder.block_size, picked.device
            )
            ids = context.token_table[context.slots[picked][owners], inputs.attention.positions]
            self._decoder.forward(ids, inputs)
        drafted = host.num_tokens + self.num_speculative_tokens - 1
        self._covered[host.slots] = np.where(host.wants_drafts, drafted, np.maximum(covered, ends))

    def _draft(self, context: ProposeContext) -> Draft:
        """K drafts for each of R requests; no branch on values and no read by the host."""
        plan = self._round(context)
        self._sampler.begin(
            context.temperature,
            context.seeds,
            context.num_tokens,
            context.all_greedy,
            domain=context.noise_domain,
            keep_law=context.keep_law,
            filters=context.filters,
        )
        drafts = [self._sampler.choose(0, plan.catch_up())]
        for index in range(1, self.num_speculative_tokens):
            drafts.append(self._sampler.choose(index, plan.step(index, drafts[-1])))
        return Draft(torch.stack(drafts, 1), self._num_drafts(context), self._sampler.law())

    def _round(self, context: ProposeContext) -> DraftRound:
        if self._steps is not None:
            return CpuRound(context, self._steps)
        return TorchRound(context, self._decoder, self.num_speculative_tokens)

    def _num_drafts(self, context: ProposeContext) -> torch.Tensor:
        """Drafts that count, [R] int64: within the request's limit, finite, and within the trained positions."""
        usable = self._sampler.usable()
        self._num_cut += (usable < self.num_speculative_tokens).sum()
        counts = torch.minimum(usable, context.max_drafts)
        if self._too_long:
            room = (self._weights.config.max_positions - context.num_tokens).clamp_(min=0)
            counts = torch.minimum(counts, room)
        return counts


def _pick(context: ProposeContext, rows: np.ndarray, picked: torch.Tensor) -> ProposeContext:
    """The context of some of its requests, as far as `_draft` reads it."""
    return replace(
        context,
        slots=context.slots[picked],
        num_tokens=context.num_tokens[picked],
        max_drafts=context.max_drafts[picked],
        block_table=context.block_table[picked],
        temperature=context.temperature[picked],
        seeds=context.seeds[picked],
        filters=None if context.filters is None else context.filters.of(picked),
        host=replace(
            context.host,
            num_tokens=context.host.num_tokens[rows],
            block_table=context.host.block_table[rows],
        ),
    )


def _fit_vocabulary(weights: DecoderWeights, target_size: int, proposable: int) -> DecoderWeights:
    """Make every id of the target an input, and only ids below `proposable` an output.

    Either model may have padding rows that the other lacks. Those the draft lacks embed as zeros; columns of padding
    are cut from the head, so they are neither computed nor proposed.
    """
    lacking = max(0, target_size - len(weights.embedding))
    embedding = F.pad(weights.embedding, (0, 0, 0, lacking)) if lacking else weights.embedding
    narrow = proposable < weights.head.shape[1]
    head = weights.head[:, :proposable].contiguous() if narrow else weights.head
    return replace(weights, embedding=embedding, head=head)


def _read_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder))
    except (OSError, ValueError, KeyError, TypeError) as error:
        cause = str(error).strip().split("\n")[0]
        raise CheckpointError(
            f"{folder} has no usable tokenizer ({cause}), so its vocabulary cannot be compared with the target's: "
            "copy the tokenizer files that belong to the draft model there."
        ) from error
