"""Chooses between the Triton pipeline and the torch path of rejection sampling."""

import os
from typing import TYPE_CHECKING, Literal

import torch

from specflow.errors import ConfigError
from specflow.kernels.rejection import triton_available

if TYPE_CHECKING:
    from specflow.kernels.rejection.pipeline import RejectionPipeline

KernelChoice = Literal["auto", "torch", "triton"]


def check_kernels(kernels: KernelChoice) -> None:
    """Raise `ConfigError` when the choice cannot work in this installation."""
    if kernels == "triton" and not triton_available():
        raise ConfigError(
            "sampler.kernels=triton needs the package triton, which is not installed. "
            "Install it, or use sampler.kernels=auto or torch."
        )


def pipeline_for(kernels: KernelChoice, device: torch.device, noise_dtype: torch.dtype) -> "RejectionPipeline | None":
    """The Triton pipeline where it is wanted and can run on this device, else None for the torch path.

    A torch device of type "cuda" is an NVIDIA or an AMD GPU; the same kernels run on both.
    """
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    runs_here = triton_available() and (device.type == "cuda" or (interpreted and kernels == "triton"))
    if kernels == "triton" and not runs_here:
        raise ConfigError(
            f"sampler.kernels=triton cannot run on the device {device}: Triton kernels need a GPU. "
            "Use sampler.kernels=auto or torch, or another backend."
        )
    if kernels == "torch" or not runs_here:
        return None
    from specflow.kernels.rejection.pipeline import RejectionPipeline

    return RejectionPipeline(noise_dtype=noise_dtype)
