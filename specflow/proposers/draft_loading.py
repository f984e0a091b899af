"""Loading a language model that drafts: its options, its weights, and whether its vocabulary is the target's."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.nn.functional as F

from specflow.checkpoints.decoder import DecoderWeights, load_decoder
from specflow.checkpoints.decoder_config import DecoderConfig
from specflow.errors import CheckpointError, ConfigError
from specflow.proposers.draft_sampling import SampleMethod
from specflow.proposers.vocabulary import check_same_vocabulary

if TYPE_CHECKING:
    from specflow.backends.base import Backend
    from specflow.targets.base import Target

DraftDtype = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "dummy"]


def dummy_note(load_format: LoadFormat) -> str:
    """What reports add to the hash of weights that no checkpoint holds."""
    return " (random: load_format=dummy)" if load_format == "dummy" else ""


@dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """What every drafter that is a language model can be told. Raises `ConfigError` when a value is out of range."""

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


def load_draft(
    folder: Path, config: DecoderConfig, dtype: DraftDtype, target: "Target", backend: "Backend"
) -> DecoderWeights:
    """Weights whose inputs are all ids of the target and whose outputs are ids that the target has.

    Raises `CheckpointError`, or `ConfigError` when the vocabulary is not the target's.
    """
    facts = target.facts
    check_same_vocabulary(
        target.tokenizer, facts.name, facts.vocab_size, _read_tokenizer(folder), str(folder), config.vocab_size
    )
    weights = load_decoder(folder, config, backend.device, facts.dtype if dtype == "auto" else getattr(torch, dtype))
    proposable = min(facts.vocab_size, config.vocab_size, facts.num_token_ids)
    return _fit_vocabulary(weights, facts.vocab_size, proposable)


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
