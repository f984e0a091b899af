"""Chooses between the Triton pipeline and the torch path of rejection sampling."""

from typing import TYPE_CHECKING

import torch

from specflow.kernels import triton_choice
from specflow.kernels.triton_choice import KernelChoice

if TYPE_CHECKING:
    from specflow.kernels.rejection.pipeline import RejectionPipeline

__all__ = ["KernelChoice", "check_kernels", "pipeline_for"]

_OPTION = "sampler.kernels"


def check_kernels(kernels: KernelChoice) -> None:
    """Raise `ConfigError` when the choice cannot work in this installation."""
    triton_choice.check_kernels(kernels, _OPTION)


def pipeline_for(kernels: KernelChoice, device: torch.device, noise_dtype: torch.dtype) -> "RejectionPipeline | None":
    """The Triton pipeline where it is wanted and can run on this device, else None for the torch path."""
    if not triton_choice.uses_triton(kernels, device, _OPTION):
        return None
    from specflow.kernels.rejection.pipeline import RejectionPipeline

    return RejectionPipeline(noise_dtype=noise_dtype)
