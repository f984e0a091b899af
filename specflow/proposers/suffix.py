"""Suffix decoding: drafts from suffix trees over the request's own text and over past outputs.

The method is that of Liu et al. (SuffixDecoding, arXiv 2411.04975); options and results are those of vLLM's `suffix`.
"""

import time
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from specflow.core.draft import Draft
from specflow.core.limits import EngineLimits
from specflow.errors import ConfigError, StorageError
from specflow.proposers.base import HostProposer, ProposeContext
from specflow.proposers.suffix_cache import SuffixCache
from specflow.proposers.suffix_file import SavedOutputs, read_outputs, write_outputs

if TYPE_CHECKING:
    from specflow.targets.base import Target

_SHARE_OF_TIME = 0.05  # writing the cache file takes at most this part of a run, the end of the process apart


@dataclass(frozen=True, kw_only=True)
class SuffixOptions:
    """Options of `proposer=suffix`, with vLLM's names and defaults. Raises `ConfigError` for values out of range."""

    num_speculative_tokens: int | None = None  # K, most tokens drafted per round; None: the tree's depth
    suffix_decoding_max_tree_depth: int = 24  # D: match and draft together are at most this long
    suffix_decoding_max_cached_requests: int = 10000  # past outputs kept, oldest out first; 0: own text only
    suffix_decoding_max_spec_factor: float = 1.0  # tokens drafted per token matched
    suffix_decoding_min_token_prob: float = 0.1  # least estimated probability of a drafted token and all before it
    cache_path: str | None = None  # file that carries past outputs from run to run

    def __post_init__(self) -> None:
        if self.num_speculative_tokens is not None and self.num_speculative_tokens < 1:
            _refuse("num_speculative_tokens", self.num_speculative_tokens, "1 or more, or null for the tree's depth")
        if self.suffix_decoding_max_tree_depth < 2:
            _refuse("suffix_decoding_max_tree_depth", self.suffix_decoding_max_tree_depth, "2 or more: match and draft")
        if self.suffix_decoding_max_cached_requests < 0:
            value = self.suffix_decoding_max_cached_requests
            _refuse("suffix_decoding_max_cached_requests", value, "0 (no past outputs) or more")
        if not 0 <= self.suffix_decoding_max_spec_factor < float("inf"):
            _refuse("suffix_decoding_max_spec_factor", self.suffix_decoding_max_spec_factor, "0 or more, and finite")
        if not 0 <= self.suffix_decoding_min_token_prob <= 1:
            _refuse("suffix_decoding_min_token_prob", self.suffix_decoding_min_token_prob, "from 0 to 1")
        self._check_path()

    def _check_path(self) -> None:
        if self.cache_path == "":
            _refuse("cache_path", "''", "a file, or null to keep nothing between runs")
        if self.cache_path is not None and self.suffix_decoding_max_cached_requests == 0:
            raise ConfigError(
                f"proposer.cache_path={self.cache_path} has nothing to keep beside "
                "proposer.suffix_decoding_max_cached_requests=0. Leave the first out or raise the second."
            )


class SuffixProposer(HostProposer):
    """The better of two continuations: from the request's own tree, or from the tree over past outputs.

    How many tokens are drafted follows from the length of the match and from how often the texts went on that way;
    with nothing worth drafting there is no draft. With a factor of 1 a draft has at most D // 2 tokens.
    """

    name = "suffix"
    drafts_nest = True

    def __init__(self, options: SuffixOptions) -> None:
        self.options = options
        self.num_speculative_tokens = options.num_speculative_tokens or options.suffix_decoding_max_tree_depth
        self._saved = read_outputs(Path(options.cache_path)) if options.cache_path else SavedOutputs()
        self.cache = self._make_cache()
        self._keeper: _Keeper | None = None

    def attach(self, target: "Target", limits: EngineLimits) -> None:
        """Compile the kernels, and take in what earlier runs have left."""
        self._warm_up()
        if self._saved.vocab_size not in (None, limits.vocab_size):
            raise ConfigError(
                f"proposer.cache_path={self.options.cache_path} holds outputs over {self._saved.vocab_size} token ids, "
                f"and this target has {limits.vocab_size}. The file is left as it is: set one path for each target."
            )
        self.cache = self._make_cache(self._saved.outputs)
        if self.options.cache_path:
            self._keeper = _Keeper(self.cache, Path(self.options.cache_path), limits.vocab_size)
            weakref.finalize(self, self._keeper.save)  # at the end of the process at the latest
        self._saved = SavedOutputs()

    def start(self, request_id: str, slot: int, prompt: Sequence[int]) -> None:
        """See `Proposer.start`; after a pre-emption the own tree is built again from prompt and output."""
        self.cache.start(request_id, len(prompt))

    def finish(self, request_id: str, slot: int, token_ids: Sequence[int]) -> None:
        """See `Proposer.finish`; the output, to its last token, stays in the shared tree."""
        self.cache.stop(request_id, np.asarray(token_ids, dtype=np.int64))
        if self._keeper is not None and not self.cache.running:
            self._keeper.save_if_due()

    def reset(self) -> None:
        """See `Proposer.reset`; what `cache_path` held at the start is kept. The file stays as it is until new outputs
        are written, which then stand in it behind those of the start.
        """
        self.cache.reset()

    def draft(self, tokens: np.ndarray, max_drafts: int, request_id: str) -> np.ndarray:
        """See `HostProposer.draft`; tokens [L] int64 -> ids [≤ max_drafts] int32."""
        factor, least = self.options.suffix_decoding_max_spec_factor, self.options.suffix_decoding_min_token_prob
        self.cache.update(request_id, tokens)
        return self.cache.draft(request_id, tokens, max_drafts, factor, least).token_ids

    def propose(self, context: ProposeContext) -> Draft:
        """Take in what all requests have committed, then draft; see `Proposer.propose`."""
        host = context.host
        for request_id, slot, length in zip(host.request_ids, host.slots, host.num_tokens, strict=True):
            self.cache.update(request_id, host.token_table[slot, :length])
        return super().propose(context)

    def save(self) -> None:
        """Write the past outputs to `cache_path` now; also done as requests end and when the process does."""
        if self._keeper is not None:
            self._keeper.save()

    def describe(self) -> dict[str, str]:
        """Options in force and what is cached."""
        options, shared = self.options, self.cache.shared
        learns = "own text and outputs of all requests so far" if self.cache.max_requests else "own text only"
        return {
            "num_speculative_tokens": str(self.num_speculative_tokens),
            "suffix_decoding_max_tree_depth": str(options.suffix_decoding_max_tree_depth),
            "suffix_decoding_max_cached_requests": str(options.suffix_decoding_max_cached_requests),
            "suffix_decoding_max_spec_factor": str(options.suffix_decoding_max_spec_factor),
            "suffix_decoding_min_token_prob": str(options.suffix_decoding_min_token_prob),
            "drafts from": learns,
            "past outputs": f"{len(self.cache.cached)} requests, {shared.num_tokens} tokens, {shared.nbytes} bytes",
            "cache_path": "none" if self._keeper is None else str(self._keeper),
            "trees": "host, compiled by numba",
        }

    def _make_cache(self, outputs: Sequence[np.ndarray] = ()) -> SuffixCache:
        options = self.options
        return SuffixCache(options.suffix_decoding_max_tree_depth, options.suffix_decoding_max_cached_requests, outputs)

    def _warm_up(self) -> None:
        """Run every kernel once: the first request does not wait for the compiler, nor the first eviction."""
        cache = SuffixCache(self.options.suffix_decoding_max_tree_depth, 1)
        tokens = np.arange(600, dtype=np.int64) % 300
        for request_id in ("a", "b"):
            cache.start(request_id, 1)
            cache.update(request_id, tokens)
            cache.draft(request_id, tokens, 1, 1.0, 0.1)
        cache.outputs()


class _Keeper:
    """Writes the cache file: when nothing runs, rarely enough, and once more at the end."""

    def __init__(self, cache: SuffixCache, path: Path, vocab_size: int) -> None:
        self._cache, self._path, self._vocab_size = cache, path, vocab_size
        self._written_changes = 0
        self._due = 0.0
        self._problem = ""

    def __str__(self) -> str:
        return f"{self._path}{self._problem}"

    def save_if_due(self) -> None:
        """Save, unless that was done so recently that it would slow the run down."""
        if time.monotonic() >= self._due:
            self.save()

    def save(self) -> None:
        """Write what has changed; a failure is a warning and shows in the report, for the outputs are not at stake."""
        if self._cache.changes == self._written_changes:
            return
        begun = time.monotonic()
        try:
            write_outputs(self._path, self._cache.outputs(), self._vocab_size)
        except StorageError as error:
            self._problem = " (not written)"
            warnings.warn(str(error), RuntimeWarning, stacklevel=2)
        else:
            self._problem, self._written_changes = "", self._cache.changes
        self._due = time.monotonic() + (time.monotonic() - begun) / _SHARE_OF_TIME


def _refuse(key: str, value: object, allowed: str) -> None:
    raise ConfigError(f"proposer.{key}={value} must be {allowed}.")
