"""Proposer `custom_class`: any class of the user's, from a module or a plain file, without packaging."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from specflow.core.draft import Draft
from specflow.core.limits import EngineLimits
from specflow.errors import ConfigError
from specflow.proposers.base import HostProposer, ProposeContext, Proposer, Requirements
from specflow.proposers.custom_contract import (
    EXAMPLE,
    call,
    check_draft,
    check_ids,
    check_methods,
    check_requirements,
    construct,
)
from specflow.proposers.custom_loading import load_class

if TYPE_CHECKING:
    from specflow.backends.base import Backend
    from specflow.targets.base import Target


@dataclass(frozen=True, kw_only=True)
class CustomClassOptions:
    """Options of `proposer=custom_class`. Raises `ConfigError` without a path or a number of drafts."""

    path: str = ""  # package.module.Class or path/to/file.py:Class, relative to the launch folder
    num_speculative_tokens: int | None = None  # K, most tokens drafted per round
    options: Mapping[str, Any] = field(default_factory=dict)  # handed to the constructor by name

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError(
                "proposer.path must be set: proposer.path=package.module.Class or "
                f"proposer.path=path/to/file.py:Class.\n{EXAMPLE}"
            )
        if self.num_speculative_tokens is None:
            raise ConfigError(
                "proposer.num_speculative_tokens must be set: the most tokens the class drafts per round."
            )
        if self.num_speculative_tokens < 1:
            raise ConfigError(f"proposer.num_speculative_tokens={self.num_speculative_tokens} must be 1 or more.")


class CustomClassProposer(HostProposer):
    """Runs a class that has `draft(tokens, max_drafts, request_id)`, or a `Proposer` subclass with all its methods.

    `start`, `finish`, `reset`, `load`, `attach`, `requirements` and `describe` are called where the class has them.
    `tokens` is a read-only view of the engine's table that later steps write to: copy what is to be kept.
    """

    name = "custom_class"

    def __init__(self, options: CustomClassOptions) -> None:
        assert options.num_speculative_tokens is not None
        self.num_speculative_tokens = options.num_speculative_tokens
        self.options = options
        self.loaded = load_class(options.path)
        self.instance = construct(self.loaded, self.num_speculative_tokens, options.options)
        check_methods(self.loaded, self.instance)
        self._full = self.instance if isinstance(self.instance, Proposer) else None
        self._num_cut: torch.Tensor | None = None
        if self._full is not None:
            self._agree_on_length(self._full)

    def _agree_on_length(self, instance: Proposer) -> None:
        """The class's own K must be the option's, and is set to it where the class says nothing."""
        own = getattr(instance, "num_speculative_tokens", None)
        if own is None:
            instance.num_speculative_tokens = self.num_speculative_tokens
        elif own != self.num_speculative_tokens:
            raise ConfigError(
                f"{self.loaded.name} drafts num_speculative_tokens={own}, but proposer.num_speculative_tokens="
                f"{self.num_speculative_tokens}. Set the option to {own}, or let the constructor take the value."
            )

    def load(self, target: "Target", backend: "Backend") -> None:
        """See `Proposer.load`."""
        self._call("load", target, backend)

    def requirements(self) -> Requirements:
        """The class's own; `draft` always gets the committed tokens."""
        found = self._call("requirements") if hasattr(self.instance, "requirements") else Requirements()
        needed = check_requirements(self.loaded, found, self._full is not None)
        return needed if self._full is not None else replace(needed, host_tokens=True)

    def attach(self, target: "Target", limits: EngineLimits) -> None:
        """See `Proposer.attach`."""
        self._call("attach", target, limits)

    def start(self, request_id: str, slot: int, prompt: Sequence[int]) -> None:
        """See `Proposer.start`."""
        self._call("start", request_id, slot, prompt)

    def finish(self, request_id: str, slot: int, token_ids: Sequence[int]) -> None:
        """See `Proposer.finish`."""
        self._call("finish", request_id, slot, token_ids)

    def reset(self) -> None:
        """See `Proposer.reset`."""
        self._call("reset")

    def propose(self, context: ProposeContext) -> Draft:
        """The class's own `propose`, or one call of `draft` per request."""
        if self._full is None:
            return super().propose(context)
        draft = check_draft(self.loaded, self._call("propose", context), len(context.host.slots))
        return draft if draft.logits is None else self._defined(draft, draft.logits)

    def _defined(self, draft: Draft, logits: torch.Tensor) -> Draft:
        """The drafts before the first whose law is not defined (its logits hold NaN or infinity)."""
        usable = logits.amax(-1).isfinite().to(torch.int64).cumprod(1).sum(1)
        cut = (usable < draft.num_drafts).sum()
        self._num_cut = cut if self._num_cut is None else self._num_cut + cut
        return replace(draft, num_drafts=torch.minimum(usable, draft.num_drafts))

    @property
    def nan_drafts(self) -> int:
        """Rounds of a request that were cut short because the class's logits were not finite."""
        return 0 if self._num_cut is None else int(self._num_cut)

    def draft(self, tokens: np.ndarray, max_drafts: int, request_id: str) -> np.ndarray:
        """See `HostProposer.draft`; tokens [L] int64 -> ids [n] int64, not cut yet."""
        view = tokens.view()
        view.flags.writeable = False
        return check_ids(self.loaded, self._call("draft", view, max_drafts, request_id))

    def describe(self) -> dict[str, str]:
        """Class, file and its hash, options, and what the class says of itself."""
        facts = {
            "class": self.loaded.cls.__qualname__,
            "file": str(self.loaded.file or self.loaded.cls.__module__),
            "file sha256": self.loaded.digest,
            "contract": "propose(context)" if self._full is not None else "draft(tokens, max_drafts, request_id)",
            "num_speculative_tokens": str(self.num_speculative_tokens),
        }
        facts |= {f"options.{key}": str(value) for key, value in self.options.options.items()}
        if self.nan_drafts:
            facts["warning"] = f"{self.name}: logits were not finite in {self.nan_drafts} rounds, which drafted less"
        own = self._call("describe")
        if own is None:
            return facts
        if not isinstance(own, Mapping):
            raise ConfigError(f"{self.loaded.name}: describe() returned {type(own).__name__}, not a dict of texts.")
        return facts | {str(key): str(value) for key, value in own.items()}

    def _call(self, name: str, *arguments: Any) -> Any:
        """A method of the class, if it has it."""
        method = getattr(self.instance, name, None)
        return None if method is None else call(self.loaded, method, *arguments)
