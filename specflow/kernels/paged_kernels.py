"""What reads and writes the pages of keys and values: plain torch anywhere, Triton on a GPU."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from specflow.core.limits import PagedKernelsName
from specflow.kernels import paged_attention as reference
from specflow.kernels.triton_choice import KernelChoice, uses_triton


@dataclass(frozen=True)
class PagedKernels:
    """Three functions over pages, each documented where plain torch has it: `specflow.kernels.paged_attention`."""

    name: str  # for reports
    attend: Callable[..., torch.Tensor]  # paged_attention
    write: Callable[..., None]  # write_keys_values
    rotate_and_write: Callable[..., torch.Tensor]


TORCH = PagedKernels("plain torch", reference.paged_attention, reference.write_keys_values, reference.rotate_and_write)


def steps_by(fused: bool, kernels: PagedKernels) -> str:
    """What runs the layers of a drafter, for reports; fused: in few calls, by kernels for what its device is."""
    if fused:
        return "fused CPU kernels" if kernels is TORCH else "fused, joined weights"
    return TORCH.name if kernels is TORCH else f"torch, attention by {kernels.name}"


def choose_paged_kernels(choice: KernelChoice, device: torch.device, option: str) -> PagedKernelsName:
    """What a choice means on a device. Raises `ConfigError` for triton on a wrong one; option: "target.attention"."""
    return "triton" if uses_triton(choice, device, option) else "torch"


def paged_kernels(name: PagedKernelsName) -> PagedKernels:
    """The functions; "triton" imports it."""
    if name == "torch":
        return TORCH
    from specflow.kernels import paged_attention_triton, paged_write_triton

    return PagedKernels(
        "Triton",
        paged_attention_triton.paged_attention,
        paged_write_triton.write_keys_values,
        paged_write_triton.rotate_and_write,
    )
