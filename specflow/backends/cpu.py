"""The processor as a device."""

import platform
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from specflow.backends.base import Backend
from specflow.errors import ConfigError

__all__ = ["CpuBackend", "CpuOptions"]

_PROC = Path("/proc")


@dataclass(frozen=True, kw_only=True)
class CpuOptions:
    """Options of `backend=cpu`."""

    threads: int | None = None  # threads of one matrix product; None leaves torch's choice
    run_ahead: bool = False  # decode as a GPU does, the host one step behind: for tests, it saves no time here

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"backend.threads={self.threads} must be 1 or more, or null for torch's own choice.")


class CpuBackend(Backend):
    """Runs on the processor; memory is the process's resident set."""

    name = "cpu"
    device = torch.device("cpu")

    def __init__(self, options: CpuOptions, note: str = "") -> None:
        self.options = options
        self._note = note  # follows the name in `describe`
        self.decode = "ahead" if options.run_ahead else "eager"

    def setup(self) -> None:
        """Set the number of threads."""
        if self.options.threads is not None:
            torch.set_num_threads(self.options.threads)

    def synchronize(self) -> None:
        """Nothing runs behind the caller's back on a processor."""

    def peak_memory_bytes(self) -> int:
        """Peak resident set since the last reset; on systems without /proc, since the process began."""
        status = _PROC / "self" / "status"
        if status.exists():
            for line in status.read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux kibibytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def reset_peak_memory(self) -> None:
        """Reset the kernel's high-water mark where it can be."""
        try:
            (_PROC / "self" / "clear_refs").write_text("5")
        except OSError:
            return  # no such file, or not allowed: the peak stays that of the whole process

    def describe(self) -> dict[str, str]:
        """Processor, threads, torch and matmul precision."""
        return {
            "backend": f"{self.name}{self._note}",
            "device": processor_name(),
            "threads": str(torch.get_num_threads()),
            "torch": torch.__version__,
            "float32 matmul precision": torch.get_float32_matmul_precision(),
        }


def processor_name() -> str:
    """The processor's name as the system tells it."""
    try:
        lines = (_PROC / "cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
