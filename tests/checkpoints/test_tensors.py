"""Reading tensors from checkpoint folders: everything that is named, from the right file, or a clear error."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from specflow.checkpoints.tensors import INDEX, locate_tensors, read_tensors
from specflow.errors import CheckpointError

TENSORS = {name: torch.randn(3, 4) for name in ("a", "b", "c")}
SHAPES = dict.fromkeys(TENSORS, (3, 4))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """One tensor a file, with an index."""
    files = {name: f"model-{number}.safetensors" for number, name in enumerate(TENSORS, start=1)}
    for name, file in files.items():
        save_file({name: TENSORS[name]}, tmp_path / file)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": files}))
    return tmp_path


def check_equal(folder: Path) -> None:
    found = read_tensors(folder, SHAPES)
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], TENSORS[name]) for name in TENSORS)


def test_single_file_under_any_name(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "weights.safetensors")
    check_equal(tmp_path)
    save_file(TENSORS, tmp_path / "model.safetensors")
    check_equal(tmp_path)


def test_all_shards_are_read(sharded: Path) -> None:
    check_equal(sharded)


def test_the_index_wins_over_a_stale_copy(sharded: Path) -> None:
    """C45: shard 3 also holds `a`, which the index assigns to shard 1."""
    save_file({"c": TENSORS["c"], "a": torch.zeros(3, 4)}, sharded / "model-3.safetensors")
    check_equal(sharded)


def test_missing_shard_is_named(sharded: Path) -> None:
    (sharded / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-2\.safetensors"):
        read_tensors(sharded, SHAPES)


def test_shard_without_its_tensor(sharded: Path) -> None:
    save_file({"other": TENSORS["b"]}, sharded / "model-2.safetensors")
    with pytest.raises(CheckpointError, match=r"model-2\.safetensors holds 1 tensor \(b\)"):
        read_tensors(sharded, SHAPES)


def test_missing_and_unused_tensors_are_named(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    wanted = {"a": (3, 4), "b": (3, 4), "d": (3, 4)}
    with pytest.raises(CheckpointError, match=r"lacks 1 tensor \(d\) and has 1 tensor \(c\)"):
        read_tensors(tmp_path, wanted)
    with pytest.raises(CheckpointError, match=r"has 1 tensor \(c\)"):
        read_tensors(tmp_path, {"a": (3, 4), "b": (3, 4)})
    assert read_tensors(tmp_path, {"a": (3, 4), "b": (3, 4)}, ignored={"c"}).keys() == {"a", "b"}


def test_wrong_shape_is_named(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"b is \[3, 4\] instead of \[4, 3\]"):
        read_tensors(tmp_path, SHAPES | {"b": (4, 3)})


def test_truncated_file(sharded: Path) -> None:
    path = sharded / "model-3.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=r"model-3\.safetensors is half-written"):
        read_tensors(sharded, SHAPES)


def test_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no weights"):
        locate_tensors(tmp_path)


def test_shards_without_an_index(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    with pytest.raises(CheckpointError, match=INDEX.replace(".", r"\.")):
        locate_tensors(sharded)
