"""Drafts what followed the last tokens where they occurred before, in the prompt rather than in the output."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specflow.errors import ConfigError
from specflow.proposers.base import HostProposer


@dataclass(frozen=True, kw_only=True)
class PhraseLookupOptions:
    """Options of `proposer=phrase_lookup`. Raises `ConfigError` for values out of range."""

    num_speculative_tokens: int = 5  # K, most tokens drafted per round
    max_phrase: int = 4  # longest phrase looked for, in tokens
    min_phrase: int = 1  # shortest phrase that counts

    def __post_init__(self) -> None:
        if self.num_speculative_tokens < 1:
            raise ConfigError(f"proposer.num_speculative_tokens={self.num_speculative_tokens} must be 1 or more.")
        if self.min_phrase < 1:
            raise ConfigError(f"proposer.min_phrase={self.min_phrase} must be 1 or more.")
        if self.max_phrase < self.min_phrase:
            raise ConfigError(
                f"proposer.max_phrase={self.max_phrase} is below proposer.min_phrase={self.min_phrase}: "
                "no phrase could be found. Raise the first or lower the second."
            )


class PhraseLookupProposer(HostProposer):
    """The longest phrase wins; among its occurrences the last one in the prompt, else the last one in the output."""

    name = "phrase_lookup"

    def __init__(self, options: PhraseLookupOptions) -> None:
        self.options = options
        self.num_speculative_tokens = options.num_speculative_tokens
        self._prompt_len: dict[str, int] = {}

    def start(self, request_id: str, slot: int, prompt: Sequence[int]) -> None:
        """Remember where the prompt ends."""
        self._prompt_len[request_id] = len(prompt)

    def finish(self, request_id: str, slot: int, token_ids: Sequence[int]) -> None:
        """Forget the request; it may start again, after a pre-emption."""
        del self._prompt_len[request_id]

    def draft(self, tokens: np.ndarray, max_drafts: int, request_id: str) -> np.ndarray:
        """Ids that may follow tokens [L] int64, at most max_drafts of them; none when no phrase is found."""
        for size in range(self.options.max_phrase, self.options.min_phrase - 1, -1):
            ends = phrase_ends(tokens, size)
            if len(ends):
                in_prompt = ends[ends < self._prompt_len[request_id]]
                start = in_prompt[-1] if len(in_prompt) else ends[-1]
                return tokens[start : start + max_drafts]
        return tokens[:0]

    def describe(self) -> dict[str, str]:
        """What is looked for, for the report."""
        return {
            "num_speculative_tokens": str(self.num_speculative_tokens),
            "phrases": f"{self.options.min_phrase} to {self.options.max_phrase} tokens, the prompt first",
        }


def phrase_ends(tokens: np.ndarray, size: int) -> np.ndarray:
    """Indexes just past the earlier occurrences of the last `size` of tokens [L], ascending: [n] int64."""
    if len(tokens) <= size:
        return np.zeros(0, dtype=np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(tokens[:-1], size)
    return np.flatnonzero((windows == tokens[-size:]).all(1)) + size
