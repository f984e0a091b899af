"""Reading a table of tensors from a checkpoint folder: all of them, in the right shapes, or an error."""

from collections import defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from specflow.checkpoints.folder import (
    INDEX,
    PICKLED,
    PICKLED_INDEX,
    check_safetensors,
    find_index,
    read_index,
    weight_files,
)
from specflow.checkpoints.pickled import read_pickled
from specflow.errors import CheckpointError

Shapes = Mapping[str, tuple[int, ...]]
_SHOWN = 6


def read_tensors(folder: Path, shapes: Shapes, ignored: Collection[str] = ()) -> dict[str, torch.Tensor]:
    """Read every tensor that `shapes` names, on the CPU and in the dtype of the file.

    An index decides which file a tensor comes from; whatever else a file holds under that name is not read.
    ignored: names that may be there without being read.
    Raises `CheckpointError` naming missing tensors, tensors nobody asked for, wrong shapes, and missing, cut off or
    unreadable files.
    """
    files = locate_tensors(folder)
    _check_names(folder, set(shapes), set(files), set(ignored))
    by_file: dict[Path, list[str]] = defaultdict(list)
    for name in shapes:
        by_file[files[name]].append(name)
    tensors: dict[str, torch.Tensor] = {}
    for path, names in by_file.items():
        tensors |= _read_file(path, names)
    _check_shapes(folder, shapes, tensors)
    return tensors


def locate_tensors(folder: Path) -> dict[str, Path]:
    """Names of all tensors of a folder and the file each is to be read from: *.safetensors, or else
    pytorch_model.bin. Raises `CheckpointError`."""
    index = find_index(folder)
    if index:
        for path in weight_files(folder):
            if path.suffix == ".safetensors":
                check_safetensors(path)
        return {name: folder / shard for name, shard in read_index(index).items()}
    path = _single_file(folder)
    if path.suffix != ".safetensors":
        return dict.fromkeys(read_pickled(path), path)
    check_safetensors(path)
    with safe_open(path, framework="pt") as file:
        return dict.fromkeys(file.keys(), path)


def _single_file(folder: Path) -> Path:
    if (folder / "model.safetensors").exists():
        return folder / "model.safetensors"
    found = sorted(folder.glob("*.safetensors")) or sorted(folder.glob(PICKLED))
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(path.name for path in found[:_SHOWN])
        index = INDEX if found[0].suffix == ".safetensors" else PICKLED_INDEX
        raise CheckpointError(f"{folder} holds several weight files ({names}) but no {index}: copy or download it too.")
    raise CheckpointError(f"{folder} has no weights (*.safetensors or pytorch_model.bin): copy or download them.")


def _read_file(path: Path, names: Collection[str]) -> dict[str, torch.Tensor]:
    if path.suffix != ".safetensors":
        pickled = read_pickled(path)
        _check_promise(path, names, pickled)
        return {name: pickled[name] for name in names}
    try:
        with safe_open(path, framework="pt") as file:
            _check_promise(path, names, file.keys())
            return {name: file.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise CheckpointError(f"{path} cannot be read ({error}): copy or download it again.") from error


def _check_promise(path: Path, names: Collection[str], found: Collection[str]) -> None:
    """An index may say more than its files hold."""
    lacking = sorted(set(names) - set(found))
    if lacking:
        index = find_index(path.parent)
        raise CheckpointError(
            f"{index} says that {path.name} holds {_list(lacking)}, but it does not: "
            "copy or download the checkpoint again."
        )


def _check_names(folder: Path, wanted: set[str], found: set[str], ignored: set[str]) -> None:
    missing, unused = sorted(wanted - found), sorted(found - wanted - ignored)
    if missing or unused:
        parts = [f"lacks {_list(missing)}"] if missing else []
        parts += [f"has {_list(unused)} that its config does not account for"] if unused else []
        raise CheckpointError(
            f"{folder} {' and '.join(parts)}: the weights do not belong to this config.json, or are incomplete."
        )


def _check_shapes(folder: Path, shapes: Shapes, tensors: Mapping[str, torch.Tensor]) -> None:
    wrong = [
        f"{name} is {list(tensors[name].shape)} instead of {list(shape)}"
        for name, shape in shapes.items()
        if tuple(tensors[name].shape) != tuple(shape)
    ]
    if wrong:
        shown = "; ".join(wrong[:_SHOWN]) + ("; …" if len(wrong) > _SHOWN else "")
        raise CheckpointError(f"{folder} has tensors of other shapes than its config.json says: {shown}.")


def _list(names: Collection[str]) -> str:
    ordered = list(names)
    more = f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
    return f"{len(ordered)} tensor{'s' if len(ordered) > 1 else ''} ({', '.join(ordered[:_SHOWN])}{more})"
