"""Seconds of the parts of a step."""

import time
from itertools import pairwise

import torch

from specflow.backends.base import Backend


class PhaseClock:
    """Marks the ends of a step's phases; waits for the device at each mark, which costs nothing on a CPU."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.seconds: dict[str, float] = {}
        self._started = self._last = time.perf_counter()

    def mark(self, phase: str) -> None:
        """End the current phase under this name."""
        self._backend.synchronize()
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now

    @property
    def total(self) -> float:
        """Seconds from the first moment to the last mark."""
        return self._last - self._started


class PartClock:
    """Seconds of the parts of a step that runs on the device, by marks inside it; they survive capture in a graph.

    On a GPU the marks are events of the device, so that nothing waits and the host's time is not in them.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[str, float | torch.cuda.Event]] = []

    def mark(self, part: str) -> None:
        """End a part under this name; "" begins a step."""
        if not part:
            self._marks.clear()
        if not self._on_gpu:
            self._marks.append((part, time.perf_counter()))
            return
        event = torch.cuda.Event(enable_timing=True, external=True)
        event.record()
        self._marks.append((part, event))

    def read(self) -> dict[str, float]:
        """Seconds by part of the step that ran last; waits for it."""
        if self._on_gpu:
            torch.cuda.synchronize()
        seconds: dict[str, float] = {}
        for (_, before), (part, after) in pairwise(self._marks):
            if isinstance(before, torch.cuda.Event) and isinstance(after, torch.cuda.Event):
                passed = before.elapsed_time(after) / 1000
            else:
                assert isinstance(before, float)
                assert isinstance(after, float)
                passed = after - before
            seconds[part] = seconds.get(part, 0.0) + passed
        return seconds
