"""What a head measures while it learns, as sums that packs and processes can be added up in."""

from collections.abc import Mapping

import torch
from torch import Tensor

from specflow.training.objective import LossParts
from specflow.training.processes import Processes

__all__ = ["MeasureSums", "simulated_acceptance_length"]

_LOSS = "loss"


class MeasureSums:
    """Sums and counts by name, on the device until they are read. `loss` is the weighted mean loss."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[str, Tensor] = {}  # name -> [2] float64: sum, count

    def add(self, parts: LossParts) -> None:
        """Count one pack."""
        self._add(_LOSS, parts.total, parts.weight)
        for name, (total, count) in parts.measures.items():
            self._add(name, total, count)

    def _add(self, name: str, total: Tensor, count: Tensor) -> None:
        pair = torch.stack([total.detach().double().to(self._device), count.detach().double().to(self._device)])
        self._sums[name] = self._sums[name] + pair if name in self._sums else pair

    def load(self, sums: Mapping[str, tuple[float, float]]) -> None:
        """Go on from sums that were read before."""
        self._sums = {name: torch.tensor(pair, dtype=torch.float64, device=self._device) for name, pair in sums.items()}

    def read(self, processes: Processes) -> dict[str, tuple[float, float]]:
        """The sums over all processes, which must have the same names; waits for the device."""
        names = sorted(self._sums)
        if not names:
            return {}
        joined = torch.stack([self._sums[name] for name in names])
        processes.add_up(joined)
        return {name: (row[0], row[1]) for name, row in zip(names, joined.tolist(), strict=True)}

    def means(self, processes: Processes) -> dict[str, float]:
        """Sum over count by name, over all processes; names without a count are left out. Starts anew."""
        sums = self.read(processes)
        self._sums = {}
        return {name: total / count for name, (total, count) in sums.items() if count}


def simulated_acceptance_length(means: Mapping[str, float], kind: str = "accuracy") -> float | None:
    """1 + a0 + a0 a1 + …: tokens per round, the bonus token included, if position i is accepted with probability a_i
    whatever came before. None without `kind/0`.

    A product of averages, and with gold tokens before every draft: an indication, while the engine measures.
    """
    length, chance, position = 1.0, 1.0, 0
    while f"{kind}/{position}" in means:
        chance *= means[f"{kind}/{position}"]
        length += chance
        position += 1
    return length if position else None
