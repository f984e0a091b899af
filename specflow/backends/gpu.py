"""What CUDA and ROCm devices have in common: torch drives both through `torch.cuda`."""

from dataclasses import dataclass

import torch

from specflow.backends.base import Backend
from specflow.backends.cpu import processor_name
from specflow.errors import ConfigError

__all__ = ["GpuBackend", "GpuOptions"]


@dataclass(frozen=True, kw_only=True)
class GpuOptions:
    """Options of both GPU backends."""

    device_index: int = 0  # which of the visible GPUs
    allow_tf32: bool = False  # faster float32 products with 10-bit mantissas; off: exact float32
    cuda_graphs: bool = True  # decode steps as graphs, the host one step behind; off: every operation by the host

    def __post_init__(self) -> None:
        if self.device_index < 0:
            raise ConfigError(f"backend.device_index={self.device_index} must be 0 or more.")


class GpuBackend(Backend):
    """One GPU. Subclasses say which torch build they need."""

    def __init__(self, options: GpuOptions, note: str = "") -> None:
        self.options = options
        self._note = note  # follows the name in `describe`
        self.device = torch.device("cuda", options.device_index)
        self.decode = "graphs" if options.cuda_graphs else "eager"

    @classmethod
    def missing(cls) -> str | None:
        """Why this backend cannot run here, or None when it can."""
        raise NotImplementedError

    def setup(self) -> None:
        """Check the device and set the precision of float32 products. Raises `ConfigError` when it is absent."""
        reason = self.missing()
        if reason is None and self.options.device_index >= torch.cuda.device_count():
            reason = f"device_index={self.options.device_index}, but torch sees {torch.cuda.device_count()} device(s)"
        if reason is not None:
            raise ConfigError(f"backend={self.name} is not available: {reason}. Use backend=cpu, or backend=auto.")
        torch.cuda.set_device(self.device)
        torch.backends.cuda.matmul.allow_tf32 = self.options.allow_tf32
        torch.backends.cudnn.allow_tf32 = self.options.allow_tf32

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self.device)

    def peak_memory_bytes(self) -> int:
        """Most memory that torch held allocated on the device."""
        return torch.cuda.max_memory_allocated(self.device)

    def reset_peak_memory(self) -> None:
        """Start a new measurement."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def kv_cache_bytes(self) -> int:
        """Half of what is free: the rest is for graphs, prompts and their logits, and whoever else uses the device."""
        return torch.cuda.mem_get_info(self.device)[0] // 2

    def describe(self) -> dict[str, str]:
        """GPU, driver interface, processor and precision."""
        properties = torch.cuda.get_device_properties(self.device)
        return {
            "backend": f"{self.name}{self._note}",
            "device": f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB",
            "processor": processor_name(),
            "threads": str(torch.get_num_threads()),
            "torch": torch.__version__,
            "gpu runtime": str(torch.version.hip or torch.version.cuda),
            "float32 matmul precision": "tf32" if self.options.allow_tf32 else "float32",
        }
