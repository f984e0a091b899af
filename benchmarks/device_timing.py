"""Times by events of the device, and the copy bandwidth that the kernel benchmarks compare themselves with."""

import statistics
from collections.abc import Callable

import torch


def median_microseconds(work: Callable[[], object], repeats: int, uncounted: int = 2) -> float:
    """Median over `repeats` runs, after some that do not count."""
    times = []
    for repeat in range(repeats + uncounted):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        if repeat >= uncounted:
            times.append(start.elapsed_time(end) * 1000)
    return statistics.median(times)


def copy_bandwidth(values: int, repeats: int, uncounted: int = 2) -> float:
    """Bytes per second of a device-to-device copy of so many float32 values, read plus written."""
    source = torch.randn(values, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / (median_microseconds(lambda: target.copy_(source), repeats, uncounted) * 1e-6)
