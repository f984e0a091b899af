"""Prompt lookup on the device: the drafts of `proposer=ngram`, found without a host read."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from specflow.core.draft import Draft
from specflow.core.limits import EngineLimits
from specflow.kernels import ngram_match
from specflow.kernels.ngram_match import MatchRule
from specflow.kernels.triton_choice import KernelChoice, check_kernels, uses_triton
from specflow.proposers.base import ProposeContext, Proposer, Requirements
from specflow.proposers.prompt_lookup import PromptLookupOptions

if TYPE_CHECKING:
    from specflow.targets.base import Target

_KERNELS = "proposer.kernels"
_LEAST_COLUMNS = 64


@dataclass(frozen=True, kw_only=True)
class NgramGpuOptions(PromptLookupOptions):
    """Options of `proposer=ngram_gpu`."""

    kernels: KernelChoice = "auto"  # auto: Triton on a GPU where it is installed, else torch

    def __post_init__(self) -> None:
        super().__post_init__()
        check_kernels(self.kernels, _KERNELS)


class NgramGpuProposer(Proposer):
    """The drafts and counts of `ngram`, for the whole batch at once and by device operations alone.

    Results do not differ from those of `ngram`; what differs is where they come from. No committed token is read on
    the host, `propose` enqueues work and returns, and without a match there is no draft, never a filler. It keeps no
    buffer of its own: the engine's token table lives on the device and gains only each step's tokens. With Triton a
    text is scanned as far as it goes; plain torch scans all columns it is given, so it is given no more than the
    longest text of the batch needs. On a CPU use `ngram`, which is 14 times as fast and more.
    """

    name = "ngram_gpu"
    drafts_nest = True

    def __init__(self, options: NgramGpuOptions) -> None:
        self.options = options
        self.num_speculative_tokens = options.num_speculative_tokens
        latest = options.match_policy == "latest"
        self._rule = MatchRule(options.lookup_min, options.lookup_max, latest, options.num_speculative_tokens)
        self._find, self._scans_all_columns = ngram_match.ngram_drafts, True

    def requirements(self) -> Requirements:
        """Nothing of the engine."""
        return Requirements(graph_safe=True)

    def attach(self, target: "Target", limits: EngineLimits) -> None:
        """Choose the scan, and run it once on a row as wide as the engine's: that compiles Triton's kernels."""
        if uses_triton(self.options.kernels, limits.device, _KERNELS):
            from specflow.kernels import ngram_match_triton

            self._find, self._scans_all_columns = ngram_match_triton.ngram_drafts, False
        table = torch.ones((1, limits.table_width), dtype=torch.int64, device=limits.device)
        one = torch.ones(1, dtype=torch.int64, device=limits.device)
        self._find(table, one - 1, one + 1, one, self._rule)

    def propose(self, context: ProposeContext) -> Draft:
        """See `Proposer.propose`."""
        table = context.token_table
        if self._scans_all_columns and not context.static:
            table = table[:, : scan_width(context.host.num_tokens, table.shape[1])]
        return Draft(*self._find(table, context.slots, context.num_tokens, context.max_drafts, self._rule))

    def describe(self) -> dict[str, str]:
        """Bounds in force, the choice among equal matches, and what scans."""
        scan = "plain torch" if self._scans_all_columns else "Triton"
        return {**self.options.in_force(), "scan": f"device, {scan}"}


def scan_width(num_tokens: np.ndarray, table_width: int) -> int:
    """Columns that hold the longest text, a power of two: few shapes, at most twice the work. num_tokens: [B] int64."""
    longest = max(num_tokens.max(initial=1), _LEAST_COLUMNS)
    return min(table_width, 1 << int(longest - 1).bit_length())
