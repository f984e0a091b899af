"""A draft model that was trained with mask tokens drafts all K tokens in one pass: PARD.

An et al. 2025 (arXiv 2504.18583). Behind the anchor stand K-1 masks: the anchor's row predicts the first draft, mask j
predicts draft j+1. Masks leave keys and values that mean nothing later, so a round feeds again whatever the last one
could have had accepted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from specflow.checkpoints.decoder_config import DecoderConfig
from specflow.checkpoints.folder import read_json
from specflow.checkpoints.mask_token import MASK_KEYS, find_mask_token
from specflow.core.draft import Draft
from specflow.core.limits import EngineLimits
from specflow.errors import ConfigError
from specflow.proposers.base import HostView, ProposeContext
from specflow.proposers.draft_loading import DraftOptions
from specflow.proposers.draft_round import DraftRound, RoundShape
from specflow.proposers.draft_sampling import DraftSampler
from specflow.proposers.mask_watch import MaskWatch
from specflow.proposers.paged_drafter import PagedDrafter

if TYPE_CHECKING:
    from specflow.targets.base import Target


@dataclass(frozen=True, kw_only=True)
class PardOptions(DraftOptions):
    """Options of `proposer=pard`. Raises `ConfigError` when a value is out of range."""

    mask_token_id: int | None = None  # id of the mask the model was trained with; None = what its config.json says


class PardProposer(PagedDrafter):
    """Drafts K tokens in one pass."""

    name = "pard"
    bundled = "pard"

    def __init__(self, options: PardOptions) -> None:
        super().__init__(options)
        self._given_mask = options.mask_token_id

    @property
    def shape(self) -> RoundShape:
        """K+1 committed tokens, which reach back to the last round's anchor even if all its drafts were accepted; then
        K-1 masks, of which nothing is kept. So every round has 2K tokens per request and no branch."""
        drafts = self.num_speculative_tokens
        return RoundShape(catch_up=drafts + 1, past_anchor=drafts - 1, kept=0)

    def check_config(self, folder: Path, config: DecoderConfig) -> None:
        """Find the mask token. Raises `ConfigError` when the model is no parallel drafter."""
        raw = read_json(folder / "config.json")
        self._mask_id, self._mask_source = _mask_token(folder, raw, self._given_mask, config.vocab_size)
        self._trained_drafts = raw.get("para_num")

    def attach(self, target: "Target", limits: EngineLimits) -> None:
        """Also put the mask token where the passes run."""
        super().attach(target, limits)
        self._mask = torch.tensor([self._mask_id], device=limits.device)
        self._watch = MaskWatch(limits.max_num_seqs, self.num_speculative_tokens)

    def start(self, request_id: str, slot: int, prompt: Sequence[int]) -> None:
        """See `PagedDrafter.start`."""
        super().start(request_id, slot, prompt)
        self._watch.forget(slot)

    def propose(self, context: ProposeContext) -> Draft:
        """See `PagedDrafter.propose`."""
        if not context.static:
            self._watch.see(context.host)
        return super().propose(context)

    def replayed(self, host: HostView) -> None:
        """See `Proposer.replayed`."""
        self._watch.see(host)
        super().replayed(host)

    def choose_drafts(self, plan: DraftRound, sampler: DraftSampler) -> torch.Tensor:
        """One pass for all."""
        return sampler.choose_all(plan.all_at_once(self._mask))

    def describe(self) -> dict[str, str]:
        """Also the mask token, how many drafts training prepared for if the checkpoint tells, and doubts about both."""
        facts = super().describe() | {"mask token": f"{self._mask_id} ({self._mask_source})"}
        if isinstance(self._trained_drafts, int):
            facts["drafts in training"] = str(self._trained_drafts)
        doubt = self._watch.warning() if hasattr(self, "_watch") else None
        if doubt:
            facts["warning"] = "; ".join([*filter(None, [facts.get("warning")]), f"pard: {doubt}"])
        return facts


def _mask_token(folder: Path, config: Mapping[str, object], given: int | None, vocab_size: int) -> tuple[int, str]:
    """The id of the mask token and who says so; vocab_size: of the draft model. Raises `ConfigError`.

    A mask token alone proves nothing, since ordinary models have one for other ends. So the config must also be
    PARD's (`spd_type` "pard", or the key `pard_token`), unless the user names the token.
    """
    if given is not None:
        if not 0 <= given < vocab_size:
            raise ConfigError(
                f"proposer.mask_token_id={given} is no id of {folder}: give one from 0 to {vocab_size - 1}."
            )
        return given, "proposer.mask_token_id"
    found = find_mask_token(config)
    advice = (
        "Use +proposer=draft_model for an ordinary model; if this one was trained to draft in parallel, give its mask "
        "token in proposer.mask_token_id."
    )
    if found is None:
        raise ConfigError(
            f"{folder} was not trained to draft in parallel: its config.json names no mask token "
            f"(looked for {', '.join(MASK_KEYS)}). {advice}"
        )
    if config.get("spd_type") != "pard" and "pard_token" not in config:
        raise ConfigError(
            f"{folder} is not known to draft in parallel: its config.json has {found.key}={found.value}, but neither "
            f'spd_type "pard" nor pard_token, which training a PARD drafter writes. {advice}'
        )
    if not isinstance(found.value, int) or isinstance(found.value, bool) or not 0 <= found.value < vocab_size:
        raise ConfigError(
            f"{folder} has no usable mask token: {found.key}={found.value} in its config.json is no id from 0 to "
            f"{vocab_size - 1} (PARD's training code writes -1 when it was not told one). {advice}"
        )
    return found.value, f"{found.key} of config.json"
