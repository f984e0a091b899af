"""Choosing drafts from a drafter's logits, and remembering the law they were drawn from."""

from typing import TYPE_CHECKING, Literal

import torch

from specflow.core.limits import EngineLimits
from specflow.kernels.argmax import leading_finite, top_entries
from specflow.kernels.noise import gumbel_argmax, gumbel_noise
from specflow.samplers.filters import filter_rows

if TYPE_CHECKING:
    from specflow.proposers.base import ProposeContext

SampleMethod = Literal["greedy", "probabilistic"]


class DraftSampler:
    """Draws the K drafts of a round, one call per position or one for all.

    greedy: the highest logit, the lowest id among equals; the law is one-hot and not stored.
    probabilistic: softmax(logits / temperature), the request's filters applied, by Gumbel argmax with noise that is a
    function of (seed, position) alone; requests with temperature 0 take the highest logit. What is stored is the very
    tensor that was sampled from.
    """

    def __init__(self, method: SampleMethod, limits: EngineLimits, num_drafts: int) -> None:
        """The stored logits have a column per id of the target; those that the drafter's logits lack stay at -inf."""
        self._probabilistic = method == "probabilistic"
        self._shape, self._device = (limits.max_num_seqs + 1, num_drafts, limits.vocab_size), limits.device
        self._num_cut = torch.zeros((), dtype=torch.int64, device=limits.device)
        self._store: torch.Tensor | None = None  # made in the first round that keeps the law

    def begin(self, context: "ProposeContext") -> None:
        """Start a round of the R requests of a context."""
        temperature = context.temperature
        self._peaks: list[torch.Tensor] = []  # [R, drafts] each
        self._sampled = self._probabilistic and not context.all_greedy
        self._keeps, self._filters = self._sampled and context.keep_law, context.filters
        self._seeds, self._num_tokens, self._domain = context.seeds, context.num_tokens, context.noise_domain
        if self._keeps and self._store is None:
            self._store = torch.full(self._shape, float("-inf"), dtype=torch.float32, device=self._device)
        if self._sampled:
            self._greedy_rows = (temperature == 0).unsqueeze(1)
            self._divisor = torch.where(self._greedy_rows, 1.0, temperature.unsqueeze(1))

    def choose(self, index: int, logits: torch.Tensor) -> torch.Tensor:
        """Draft number `index` (from 0) of each request, [R] int64, from logits [R, V'] with V' <= V.

        Rows with NaN or infinite logits get some id; `usable` excludes them.
        """
        peak, best = top_entries(logits)
        self._peaks.append(peak.unsqueeze(1))
        if not self._sampled:
            return best
        scaled = logits.float() / self._divisor
        if self._filters is not None:
            scaled = filter_rows(scaled, self._filters)
        noise = gumbel_noise(self._seeds, self._num_tokens + index, self._domain, logits.shape[1])
        ids = torch.where(self._greedy_rows.squeeze(1), best, gumbel_argmax(scaled, noise))
        if self._keeps:
            assert self._store is not None
            one_hot = torch.full_like(scaled, float("-inf")).scatter_(1, best.unsqueeze(1), 0.0)
            self._store[: len(ids), index, : logits.shape[1]] = torch.where(self._greedy_rows, one_hot, scaled)
        return ids

    def choose_all(self, logits: torch.Tensor) -> torch.Tensor:
        """All drafts of each request at once, [R, K] int64, from logits [R, K, V'] that depend on no draft."""
        if not self._sampled:
            peaks, best = top_entries(logits)
            self._peaks.append(peaks)
            return best
        # One column after the other: the noise of a single one takes several times the memory of its logits.
        return torch.stack([self.choose(index, column) for index, column in enumerate(logits.unbind(1))], 1)

    def usable(self) -> torch.Tensor:
        """Leading drafts of each request whose logits were finite at the top, [R] int64. Once per round: it counts."""
        peaks = self._peaks[0] if len(self._peaks) == 1 else torch.cat(self._peaks, 1)
        return leading_finite(peaks, self._num_cut)

    @property
    def num_cut(self) -> int:
        """Rounds of a request, so far, that were cut short because logits were not finite."""
        return int(self._num_cut)

    @property
    def sampled(self) -> bool:
        """Whether this round's drafts are drawn at random, so that their law matters."""
        return self._sampled

    def law(self) -> torch.Tensor | None:
        """Logits of the sampled law, [R, K, V] float32, valid until the next round; None when one-hot or not kept."""
        if not self._keeps or self._store is None:
            return None
        return self._store[: len(self._seeds)]
