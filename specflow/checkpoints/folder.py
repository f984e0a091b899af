"""Is a checkpoint folder complete? Answered from its file headers, before anything is read into memory."""

import json
from pathlib import Path

from specflow.errors import CheckpointError

INDEX = "model.safetensors.index.json"
PICKLED = "pytorch_model*.bin"
PICKLED_INDEX = "pytorch_model.bin.index.json"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_LFS_MARK = b"version https://git-lfs"


def read_json(path: Path) -> dict[str, object]:
    """A JSON object from a file of a checkpoint. Raises `CheckpointError` naming the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}: it is not a complete checkpoint folder.") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): copy or download the checkpoint again.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} does not hold a JSON object: copy or download the checkpoint again.")
    return content


def check_folder(folder: Path, *, weights: bool = True, tokenizer: bool = True) -> None:
    """Check a Hugging Face style folder: config, weights (every shard, at full length) and tokenizer files.

    Raises `CheckpointError` that names the first file which is missing, half-written or only a placeholder.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder: give the folder that holds config.json.")
    read_json(folder / "config.json")
    if weights:
        for path in weight_files(folder):
            check_safetensors(path) if path.suffix == ".safetensors" else check_not_pointer(path)
    if tokenizer and not has_tokenizer(folder):
        raise CheckpointError(
            f"{folder} has no tokenizer (none of {', '.join(_TOKENIZERS)}): save one there with "
            "tokenizer.save_pretrained, or name another folder in target.tokenizer."
        )


def has_tokenizer(folder: Path) -> bool:
    """Whether any file of a tokenizer is there."""
    return any((folder / name).exists() for name in _TOKENIZERS)


def weight_files(folder: Path) -> list[Path]:
    """All weight files of a folder; every shard that an index lists must exist. Raises `CheckpointError`."""
    index = find_index(folder)
    if index:
        shards = sorted({folder / shard for shard in read_index(index).values()})
        missing = [shard.name for shard in shards if not shard.exists()]
        if missing:
            raise CheckpointError(
                f"{folder} lacks {missing[0]}, one of the {len(missing)} of {len(shards)} weight files that "
                f"{index.name} lists but that are not there: copy or download them."
            )
        return shards
    found = sorted(folder.glob("*.safetensors")) or sorted(folder.glob(PICKLED))
    if not found:
        raise CheckpointError(f"{folder} has no weights (*.safetensors or pytorch_model.bin): copy or download them.")
    return found


def find_index(folder: Path) -> Path | None:
    """The file that says which weight file each tensor is in; safetensors files go before pickled ones."""
    if (folder / INDEX).exists():
        return folder / INDEX
    pickled = folder / PICKLED_INDEX
    return pickled if pickled.exists() and not any(folder.glob("*.safetensors")) else None


def read_index(index: Path) -> dict[str, str]:
    """Names of tensors and the weight file each is in. Raises `CheckpointError`."""
    mapping = read_json(index).get("weight_map")
    if not isinstance(mapping, dict):
        raise CheckpointError(f"{index} has no weight_map: copy or download the checkpoint again.")
    return {str(name): str(file) for name, file in mapping.items()}


def check_safetensors(path: Path) -> None:
    """Compare a file's length with what its header promises. Raises `CheckpointError`."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        header_size = int.from_bytes(prefix, "little")
        if prefix == _LFS_MARK[:8]:
            _raise_pointer(path)
        if len(prefix) < 8 or header_size > size - 8:
            raise CheckpointError(f"{path} is cut off ({size} bytes): copy or download it again.")
        try:
            header = json.loads(file.read(header_size))
            end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{path} is not a safetensors file: copy or download it again.") from error
    if size != 8 + header_size + end:
        raise CheckpointError(
            f"{path} is half-written: it has {size} bytes and its header promises {8 + header_size + end}. "
            "Copy or download it again."
        )


def check_not_pointer(path: Path) -> None:
    """Raise `CheckpointError` for a file that only stands for the one that `git lfs` would fetch."""
    with path.open("rb") as file:
        if file.read(len(_LFS_MARK)) == _LFS_MARK:
            _raise_pointer(path)


def _raise_pointer(path: Path) -> None:
    raise CheckpointError(f"{path} is only a Git LFS pointer, not the weights: run `git lfs pull` where it came from.")
