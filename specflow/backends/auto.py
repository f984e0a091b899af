"""The fastest device at hand, and a record of which one that was."""

from dataclasses import dataclass

from specflow.backends.base import Backend
from specflow.backends.cpu import CpuBackend, CpuOptions
from specflow.backends.cuda import CudaBackend, CudaOptions
from specflow.backends.rocm import RocmBackend, RocmOptions

__all__ = ["AutoOptions", "auto_backend"]

_NOTE = " (chosen by backend=auto)"


@dataclass(frozen=True, kw_only=True)
class AutoOptions:
    """Options of `backend=auto`; name a backend to set the options that only it has."""

    threads: int | None = None  # processor threads, if the processor is chosen; None = torch's own choice

    def __post_init__(self) -> None:
        CpuOptions(threads=self.threads)  # the same rule


def auto_backend(options: AutoOptions) -> Backend:
    """CUDA if torch has it and a device, else ROCm, else the processor. `describe` says that it was chosen here."""
    if CudaBackend.missing() is None:
        return CudaBackend(CudaOptions(), note=_NOTE)
    if RocmBackend.missing() is None:
        return RocmBackend(RocmOptions(), note=_NOTE)
    return CpuBackend(CpuOptions(threads=options.threads), note=_NOTE)
