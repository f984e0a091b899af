"""Top-k, top-p and min-p of many requests at once, for drafters: a draft the target would never say is wasted.

The rules are those of `samplers.processors`, where the target's rows are filtered, so a drafter that is the target
itself draws from the very law that verifies it.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RowFilters:
    """The filters of R requests, device tensors; neutral where a request has none."""

    top_k: torch.Tensor  # [R] int64; 0 or less = all
    top_p: torch.Tensor  # [R] float32; 1 = all
    min_p: torch.Tensor  # [R] float32; 0 = all

    def of(self, rows: torch.Tensor) -> "RowFilters":
        """The filters of some of the requests; rows is [R'] int64."""
        return RowFilters(self.top_k[rows], self.top_p[rows], self.min_p[rows])


def filter_rows(logits: torch.Tensor, filters: RowFilters) -> torch.Tensor:
    """Mask what each row's filters leave out: min-p, then the k likeliest, then the fewest whose mass reaches top_p.

    logits [R, V] float32, scaled by temperature; a new tensor of the same shape comes back. Of equal logits the lowest
    ids are kept.
    """
    masked = float("-inf")
    least = logits.amax(-1, keepdim=True) + torch.log(filters.min_p).unsqueeze(1)
    ordered, ids = torch.sort(logits.masked_fill(logits < least, masked), dim=-1, descending=True, stable=True)
    ranks = torch.arange(logits.shape[1], device=logits.device)
    top_k = torch.where(filters.top_k > 0, filters.top_k, logits.shape[1]).unsqueeze(1)
    ordered = ordered.masked_fill(ranks >= top_k, masked)
    mass = torch.softmax(ordered, -1)
    top_p = torch.where(filters.top_p < 1, filters.top_p, 2.0).unsqueeze(1)  # rounding must not cut at top_p = 1
    ordered = ordered.masked_fill(mass.cumsum(-1) - mass >= top_p, masked)
    return torch.empty_like(logits).scatter_(1, ids, ordered)
