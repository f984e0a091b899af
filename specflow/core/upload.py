"""What the host has planned, on its way to the device."""

import numpy as np
import torch


def to_device(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """The same values on the device, without waiting for it; on a CPU the same memory.

    They pass through page-locked memory: CUDA copies from any other only after everything before has run.
    """
    tensor = torch.from_numpy(values)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
