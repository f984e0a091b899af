"""One AMD GPU."""

from dataclasses import dataclass

import torch

from specflow.backends.gpu import GpuBackend, GpuOptions

__all__ = ["RocmBackend", "RocmOptions"]


@dataclass(frozen=True, kw_only=True)
class RocmOptions(GpuOptions):
    """Options of `backend=rocm`."""


class RocmBackend(GpuBackend):
    """Runs on one AMD GPU, which torch drives through its CUDA interface."""

    name = "rocm"

    @classmethod
    def missing(cls) -> str | None:
        """Why ROCm cannot be used here, or None."""
        if torch.version.hip is None:
            return f"this torch ({torch.__version__}) is built without ROCm"
        if not torch.cuda.is_available():
            return f"torch {torch.__version__} (ROCm {torch.version.hip}) finds no GPU or no driver"
        return None
