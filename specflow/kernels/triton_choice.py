"""Where kernels written in Triton run. Nothing here imports Triton, which need not be installed."""

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal

import torch

from specflow.errors import ConfigError

KernelChoice = Literal["auto", "torch", "triton"]


def triton_available() -> bool:
    """True when triton can be imported; says nothing about a device."""
    return find_spec("triton") is not None


def check_kernels(kernels: KernelChoice, option: str) -> None:
    """Raise `ConfigError` when the choice cannot work in this installation; option: its name, "sampler.kernels"."""
    if kernels == "triton" and not triton_available():
        raise ConfigError(
            f"{option}=triton needs the package triton, which is not installed. "
            f"Install it, or use {option}=auto or torch."
        )


def uses_triton(kernels: KernelChoice, device: torch.device, option: str) -> bool:
    """True for the Triton kernels, False for the torch path. Raises `ConfigError` for triton on a wrong device.

    A torch device of type "cuda" is an NVIDIA or an AMD GPU; the same kernels run on both. On a CPU only Triton's
    interpreter runs them, and only when they are asked for by name: it is for tests.
    """
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    runs_here = triton_available() and (device.type == "cuda" or (interpreted and kernels == "triton"))
    if kernels == "triton" and not runs_here:
        raise ConfigError(
            f"{option}=triton cannot run on the device {device}: Triton kernels need a GPU. "
            f"Use {option}=auto or torch, or another backend."
        )
    return runs_here and kernels != "torch"


@cache
def has_group_products(device: torch.device) -> bool:
    """Whether the device has the matrix instructions of four warps, and Triton the language that gives them."""
    if device.type != "cuda" or torch.version.hip is not None or find_spec("triton.experimental.gluon") is None:
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


@cache
def device_sizes(device: torch.device) -> tuple[int, int]:
    """Processors and bytes of shared memory that one program can have; 1 and 0 for the interpreter."""
    if device.type != "cuda":
        return 1, 0
    known: Any = torch.cuda.get_device_properties(device)
    shared = 0 if torch.version.hip else known.shared_memory_per_block_optin
    return known.multi_processor_count, shared


def device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the one that holds the tensors."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
