"""Seconds of the parts of a step."""

import time

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
