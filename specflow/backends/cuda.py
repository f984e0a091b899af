"""One NVIDIA GPU."""

from dataclasses import dataclass

import torch

from specflow.backends.gpu import GpuBackend, GpuOptions

__all__ = ["CudaBackend", "CudaOptions"]


@dataclass(frozen=True, kw_only=True)
class CudaOptions(GpuOptions):
    """Options of `backend=cuda`."""


class CudaBackend(GpuBackend):
    """Runs on one NVIDIA GPU."""

    name = "cuda"

    @classmethod
    def missing(cls) -> str | None:
        """Why CUDA cannot be used here, or None."""
        if torch.version.cuda is None:
            return f"this torch ({torch.__version__}) is built without CUDA"
        if not torch.cuda.is_available():
            return f"torch {torch.__version__} (CUDA {torch.version.cuda}) finds no GPU or no driver"
        return None
