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
        self._packs: list[tuple[tuple[str, ...], Tensor]] = []  # not yet in them: names, [names * 2]

    def add(self, parts: LossParts) -> None:
        """Count one pack: few launches, since dozens of numbers are added up only when they are read."""
        named = {_LOSS: (parts.total, parts.weight), **parts.measures}
        numbers = torch.stack([number.detach() for pair in named.values() for number in pair])
        self._packs.append((tuple(named), numbers.to(self._device)))

    def _add_up(self) -> None:
        for names, numbers in self._packs:
            for name, pair in zip(names, numbers.double().view(-1, 2).unbind(0), strict=True):
                self._sums[name] = self._sums[name] + pair if name in self._sums else pair
        self._packs = []

    def load(self, sums: Mapping[str, tuple[float, float]]) -> None:
        """Go on from sums that were read before."""
        self._packs = []
        self._sums = {name: torch.tensor(pair, dtype=torch.float64, device=self._device) for name, pair in sums.items()}

    def read(self, processes: Processes) -> dict[str, tuple[float, float]]:
        """The sums over all processes, which must have the same names; waits for the device."""
        self._add_up()
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
