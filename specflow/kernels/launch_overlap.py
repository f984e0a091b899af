"""Launch parameters by which a kernel may start before the one before it has ended."""

from typing import Any

import torch

from specflow.kernels.rejection.workspace import can_overlap


def early_start(device: torch.device) -> dict[str, Any]:
    """For a kernel that calls `wait_for_previous` before it reads results; empty where the device has no such launch.

    Its kernel takes OVERLAP=bool(...) of this.
    """
    return {"launch_pdl": True} if can_overlap(device) else {}
