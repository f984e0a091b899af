"""Reading the tensors of a `pytorch_model.bin` without running anything that it holds."""

import re
import zipfile
from pathlib import Path

import torch

from specflow.checkpoints.folder import check_not_pointer
from specflow.errors import CheckpointError


def read_pickled(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a file that `torch.save` wrote, by name, on the CPU; read from the disk only where they are used.

    A pickle is a program. torch runs none of it here but the few steps that rebuild a table of tensors.
    Raises `CheckpointError` for a file that asks for more, that is damaged, or that holds no table of tensors.
    """
    check_not_pointer(path)
    try:
        # Files from before torch 1.6 are no zip archives, and have to be read as a whole.
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # damaged files raise whatever their bytes happen to mean
        called = re.search(r"GLOBAL (\S+)", str(error))
        if called:
            raise CheckpointError(
                f"{path} is not read: it asks for {called[1]}, which no table of tensors needs, so it may run code or "
                "be damaged. If you trust it, save its weights as model.safetensors with safetensors.torch.save_file."
            ) from error
        cause = str(error).strip().split("\n")[0] or type(error).__name__
        raise CheckpointError(f"{path} cannot be read ({cause}): copy or download it again.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__} instead of tensors by name.")
    others = [name for name, value in content.items() if not _is_tensor(value)]
    if others:
        raise CheckpointError(
            f"{path} holds {others[0]!r}, a {type(content[others[0]]).__name__}, among its tensors: save the weights "
            "alone (the model's state_dict)."
        )
    return content


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_quantized
