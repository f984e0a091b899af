"""Random weights where a head's would be read, to measure speed without a checkpoint."""

import torch

from specflow.checkpoints.tensors import Shapes


def random_tensors(shapes: Shapes, device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Tensors of these names and shapes, the same each time: matrices normal with 0.02, norms 1, biases 0."""
    generator = torch.Generator(device).manual_seed(0)
    tensors = {}
    for name, shape in shapes.items():
        if len(shape) > 1:
            tensors[name] = torch.empty(shape, device=device, dtype=dtype).normal_(std=0.02, generator=generator)
        else:
            tensors[name] = torch.full(shape, 0.0 if name.endswith("bias") else 1.0, device=device, dtype=dtype)
    return tensors
