"""From what the confidence head says to a chance that holds.

The head is trained on the overlap of target and draft distribution, which is the chance of acceptance when both are
sampled at temperature 1. A greedy draft behind a greedy target is accepted when both most likely tokens agree, which
happens more often. So each way of decoding has its own line through the head's logit, per draft of the block; order
among the rounds of one draft is kept.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_WAYS = ("sampled", "greedy")


@dataclass(frozen=True)
class Calibration:
    """Scale and shift, [J] float32 each, of the logits of draft 0 … J-1."""

    sampled: tuple[Tensor, Tensor]
    greedy: tuple[Tensor, Tensor]

    def as_json(self) -> dict[str, list[list[float]]]:
        """For config.json."""
        return {way: [[round(float(x), 5) for x in row] for row in getattr(self, way)] for way in _WAYS}

    def stacked(self, device: torch.device) -> Tensor:
        """[2 ways (sampled, greedy), 2 (scale, shift), J] float32."""
        return torch.stack([torch.stack(getattr(self, way)) for way in _WAYS]).to(device)


def read_calibration(raw: Any, drafts: int) -> Calibration:
    """From config.json; logits are taken as they are where it has none. Raises `ValueError` for a wrong shape."""
    if raw is None:
        plain = (torch.ones(drafts), torch.zeros(drafts))
        return Calibration(plain, plain)
    if not isinstance(raw, Mapping):
        raise ValueError("not an object")
    pairs: list[tuple[Tensor, Tensor]] = []
    for way in _WAYS:
        rows: Sequence[Any] = raw.get(way) or ()
        scale, shift = (torch.tensor(row, dtype=torch.float32) for row in rows)
        if scale.shape != (drafts,) or shift.shape != (drafts,):
            raise ValueError(f"{way} is not two lists of {drafts} numbers")
        pairs.append((scale, shift))
    return Calibration(*pairs)
