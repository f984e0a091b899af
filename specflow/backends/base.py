"""Contract of a backend: the device a run uses and what may be measured on it."""

from abc import ABC, abstractmethod
from typing import Literal

import torch

KV_CACHE_BYTES = 2 * 2**30  # where no device says how much it has


class Backend(ABC):
    """A device with its settings. Built from its options; `setup` fails clearly when the device is absent."""

    name: str = "backend"
    device: torch.device
    # How decode steps run: each by the host; ahead of it, call by call; ahead of it, as device graphs.
    decode: Literal["eager", "ahead", "graphs"] = "eager"

    @abstractmethod
    def setup(self) -> None:
        """Check that the device exists and apply the settings (threads, matmul precision). Raises `ConfigError`."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device is idle."""

    @abstractmethod
    def peak_memory_bytes(self) -> int:
        """Most memory in use since `reset_peak_memory`: device memory, or the process's resident set on a CPU."""

    @abstractmethod
    def reset_peak_memory(self) -> None:
        """Start a new measurement, as far as the platform allows."""

    def kv_cache_bytes(self) -> int:
        """Most memory for the pages of keys and values where the user names none; asked when weights are loaded."""
        return KV_CACHE_BYTES

    @abstractmethod
    def describe(self) -> dict[str, str]:
        """Device name, threads, versions; shown in the report and tagged in the tracker."""
