"""A short hash of weights in memory, to tell which checkpoint really ran."""

import hashlib
from collections.abc import Mapping

import torch

_SAMPLES = 1024
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def weights_hash(weights: Mapping[str, torch.Tensor]) -> str:
    """16 hexadecimal digits over names, shapes, dtypes, the sum of all raw values and evenly spaced samples.

    The sum notices a single changed value anywhere, the samples notice moved ones. Costs about one read of memory.
    Tensors without plain storage (some quantised formats) count by name, shape and dtype only.
    """
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(weights):
        tensor = weights[name].detach()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())
        raw = _raw(tensor)
        if raw is not None and raw.numel():
            step = -(-raw.numel() // _SAMPLES)
            digest.update(raw.sum(dtype=torch.int64).cpu().numpy().tobytes())
            digest.update(raw[::step].contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()


def _raw(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor's bits as a flat tensor of integers, None where they cannot be read so."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_meta or tensor.layout != torch.strided:
        return None
    integers = _INTEGERS.get(tensor.element_size())
    if integers is None or tensor.is_quantized:
        return None
    return tensor.contiguous().view(-1).view(integers)
