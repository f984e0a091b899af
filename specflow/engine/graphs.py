"""Device graphs of decode steps: captured once for each variant, replayed from then on."""

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch

V = TypeVar("V", bound=Hashable)
R = TypeVar("R")

_WARM_UPS = 2  # calls before a capture: they compile kernels and make what is made once


class Calls(Generic[V, R]):
    """Runs a step as it is, call by call. The place of graphs where there are none, on a CPU."""

    def __init__(self, step: Callable[[V], R]) -> None:
        self._step = step

    def ready(self, variant: V) -> bool:
        """Whether the variant can be run."""
        return True

    def prepare(self, variant: V) -> None:
        """Make the variant ready to run."""

    def run(self, variant: V) -> R:
        """Run the step."""
        return self._step(variant)


class Graphs(Calls[V, R]):
    """Captures a step when a variant is first prepared; all graphs share one pool of memory, since one runs at a time.

    What a step returns is kept with its graph: tensors that every replay writes again.
    """

    def __init__(self, step: Callable[[V], R], device: torch.device) -> None:
        super().__init__(step)
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[V, tuple[torch.cuda.CUDAGraph, R]] = {}

    def ready(self, variant: V) -> bool:
        """Whether the variant is captured."""
        return variant in self._graphs

    def prepare(self, variant: V) -> None:
        """Capture. The step is run as well, so nothing that counts may hang on it.

        Raises whatever the step raises, or CUDA where it does something that a graph cannot hold.
        """
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                self._step(variant)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = self._step(variant)
        self._graphs[variant] = graph, result

    def run(self, variant: V) -> R:
        """Replay a prepared variant."""
        graph, result = self._graphs[variant]
        graph.replay()
        return result


def batch_buckets(most: int) -> tuple[int, ...]:
    """Sizes that batches are padded to: 1, 2, 4, 8, then steps of half a power of two, up to `most`."""
    sizes = {1, 2, 4, 8, most}
    power = 16
    while power < most:
        sizes |= {power, power * 3 // 2}
        power *= 2
    return tuple(sorted(size for size in sizes if size <= most))
