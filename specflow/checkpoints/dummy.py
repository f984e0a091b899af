"""Random weights where those of a model or head would be read, to measure speed without a checkpoint.

All numbers are uniform within 0.001 of 0, norms and biases too: what vLLM's `load_format=dummy` draws. It matters for
more than the comparison of the two. How fast a GPU multiplies large matrices depends on the numbers, by the power that
they take; and with weights like these a token's hidden state is little more than its embedding, in both.
"""

from collections.abc import Iterable

import torch

from specflow.checkpoints.tensors import Shapes

_LARGEST = 1e-3


def random_tensors(shapes: Shapes, device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Tensors of these names and shapes, the same each time."""
    tensors = {name: torch.empty(shape, device=device, dtype=dtype) for name, shape in shapes.items()}
    draw_weights(tensors.values(), device)
    return tensors


@torch.no_grad()
def draw_weights(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Give tensors on a device their random numbers, in place; the same each time."""
    generator = torch.Generator(device).manual_seed(0)
    for tensor in tensors:
        tensor.uniform_(-_LARGEST, _LARGEST, generator=generator)
