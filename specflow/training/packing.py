"""Documents side by side in packs of fixed length, without any state.

Pack n of a run is a function of the seed, of n and of the documents' lengths alone. So a run that goes on needs one
number to know where it was, and any number of processes can share the packs by counting.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Pack", "Packs"]

_OPEN = 16  # packs that a document may still go into; more fill better and shuffle less


@dataclass(frozen=True)
class Pack:
    """Which documents stand in one pack, in their order."""

    number: int  # in the whole run
    epoch: int
    documents: tuple[int, ...]  # indices
    seed: int  # of everything random in it


class Packs:
    """All packs of a run, epoch after epoch. Lengths must not exceed the pack's."""

    def __init__(self, lengths: Sequence[int], pack_length: int, seed: int) -> None:
        if not lengths or min(lengths) < 1 or max(lengths) > pack_length:
            raise ValueError(f"{len(lengths)} documents must have 1 to {pack_length} tokens each")
        self._lengths, self._pack_length, self._seed = list(lengths), pack_length, seed
        self._epoch = -1
        self._packs: list[tuple[int, ...]] = []
        self._starts = [0]  # first pack of every epoch that was looked at, and of the next

    def __getitem__(self, number: int) -> Pack:
        """Pack `number` of the run, from 0."""
        while self._starts[-1] <= number:
            self._starts.append(self._starts[-1] + len(self.epoch(len(self._starts) - 1)))
        epoch = next(index for index, start in enumerate(self._starts[1:]) if number < start)
        seed = int(np.random.SeedSequence([self._seed, 1, number]).generate_state(1, np.uint64)[0] >> np.uint64(2))
        return Pack(number, epoch, self.epoch(epoch)[number - self._starts[epoch]], seed)

    def epoch(self, epoch: int) -> list[tuple[int, ...]]:
        """Documents of each pack of an epoch: every document once, in random order, into the first pack with room."""
        if epoch != self._epoch:
            order = np.random.default_rng([self._seed, 0, epoch]).permutation(len(self._lengths))
            self._packs, self._epoch = _fill(order.tolist(), self._lengths, self._pack_length), epoch
        return self._packs

    def count(self, epochs: float) -> int:
        """Packs of so many epochs; a part of an epoch gives that part of its packs, rounded up."""
        whole = int(epochs)
        total = sum(len(self.epoch(epoch)) for epoch in range(whole))
        part = epochs - whole
        return total + (int(np.ceil(part * len(self.epoch(whole)))) if part else 0)


def _fill(order: Sequence[int], lengths: Sequence[int], capacity: int) -> list[tuple[int, ...]]:
    packs: list[list[int]] = []
    room: list[int] = []
    for index in order:
        length = lengths[index]
        first = max(0, len(packs) - _OPEN)
        place = next((number for number in range(first, len(packs)) if room[number] >= length), None)
        if place is None:
            place = len(packs)
            packs.append([])
            room.append(capacity)
        packs[place].append(index)
        room[place] -= length
    return [tuple(pack) for pack in packs]
