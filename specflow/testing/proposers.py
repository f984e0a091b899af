"""Proposers that reach full acceptance and full rejection at will."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from specflow.proposers.base import HostProposer


class OracleProposer(HostProposer):
    """Replays known sequences, with a wrong token at draft position `wrong_at` (None = never wrong).

    sequences maps a request id to its prompt plus the continuation that the target is known to choose.
    """

    name = "oracle"

    def __init__(
        self,
        sequences: Mapping[str, Sequence[int]],
        num_speculative_tokens: int,
        wrong_at: int | Mapping[str, int | None] | None = None,
        vocab_size: int = 64,
    ) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self._sequences = {name: np.asarray(ids, dtype=np.int64) for name, ids in sequences.items()}
        self._wrong_at = wrong_at if isinstance(wrong_at, Mapping) else dict.fromkeys(sequences, wrong_at)
        self._vocab_size = vocab_size

    def draft(self, tokens: np.ndarray, max_drafts: int, request_id: str) -> np.ndarray:
        """The known continuation of this request, spoilt at one position."""
        drafts = self._sequences[request_id][len(tokens) : len(tokens) + max_drafts].copy()
        wrong = self._wrong_at[request_id]
        if wrong is not None and wrong < len(drafts):
            drafts[wrong] = (drafts[wrong] + 1) % self._vocab_size
        return drafts

    def describe(self) -> dict[str, str]:
        """How much it knows."""
        return {"known requests": str(len(self._sequences)), "num_speculative_tokens": str(self.num_speculative_tokens)}


class NoiseProposer(HostProposer):
    """Drafts uniformly random ids: nearly everything is rejected."""

    name = "noise"

    def __init__(self, num_speculative_tokens: int, vocab_size: int, seed: int = 0) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self._vocab_size = vocab_size
        self._generator = np.random.default_rng(seed)

    def draft(self, tokens: np.ndarray, max_drafts: int, request_id: str) -> np.ndarray:
        """Random ids."""
        return self._generator.integers(0, self._vocab_size, max_drafts)

    def describe(self) -> dict[str, str]:
        """The range of the ids."""
        return {"ids": f"below {self._vocab_size}", "num_speculative_tokens": str(self.num_speculative_tokens)}


class CallbackProposer(HostProposer):
    """Drafts whatever a function returns: `callback(call_number, tokens, max_drafts) -> ids`."""

    name = "callback"

    def __init__(
        self, num_speculative_tokens: int, callback: Callable[[int, np.ndarray, int], Sequence[int] | np.ndarray]
    ) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self._callback = callback
        self.calls = 0

    def draft(self, tokens: np.ndarray, max_drafts: int, request_id: str) -> Sequence[int] | np.ndarray:
        """One call of the function; calls are counted from 1."""
        self.calls += 1
        return self._callback(self.calls, tokens, max_drafts)
