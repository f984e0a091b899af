"""Pickled weights: read where they are nothing but tensors, refused where they would run code."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from specflow.checkpoints.folder import PICKLED_INDEX, check_folder
from specflow.checkpoints.pickled import read_pickled
from specflow.checkpoints.tensors import locate_tensors, read_tensors
from specflow.errors import CheckpointError

TENSORS = {"a": torch.randn(3, 4), "b": torch.randn(5, dtype=torch.bfloat16), "c": torch.arange(6) * 7}
SHAPES = {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}


class Intruder:
    """Leaves a file when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.trace),)


def check_equal(folder: Path) -> None:
    found = read_tensors(folder, SHAPES)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


@pytest.mark.parametrize("zipped", [True, False])
def test_tensors_are_read(tmp_path: Path, zipped: bool) -> None:
    """C45: files of today and those from before torch 1.6."""
    torch.save(TENSORS, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    check_equal(tmp_path)


def test_shards(tmp_path: Path) -> None:
    """C45: the index decides, a missing shard is named, and so is a tensor that its shard lacks."""
    files = {name: f"pytorch_model-{number}-of-3.bin" for number, name in enumerate(TENSORS, start=1)}
    for name, file in files.items():
        torch.save({name: TENSORS[name], "a": TENSORS["a"] if name == "a" else torch.zeros(3, 4)}, tmp_path / file)
    with pytest.raises(CheckpointError, match=f"several weight files.*{PICKLED_INDEX}"):
        locate_tensors(tmp_path)
    (tmp_path / PICKLED_INDEX).write_text(json.dumps({"weight_map": files}))
    check_equal(tmp_path)
    torch.save({"a": TENSORS["a"]}, tmp_path / files["b"])
    with pytest.raises(CheckpointError, match=rf"{PICKLED_INDEX} says that {files['b']} holds 1 tensor \(b\)"):
        read_tensors(tmp_path, SHAPES)
    (tmp_path / files["c"]).unlink()
    with pytest.raises(CheckpointError, match=f"lacks {files['c']}"):
        read_tensors(tmp_path, SHAPES)


def test_the_same_demands_as_for_safetensors(tmp_path: Path) -> None:
    torch.save(TENSORS, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"lacks 1 tensor \(d\) and has 1 tensor \(c\)"):
        read_tensors(tmp_path, {"a": (3, 4), "b": (5,), "d": (1,)})
    with pytest.raises(CheckpointError, match=r"b is \[5\] instead of \[6\]"):
        read_tensors(tmp_path, SHAPES | {"b": (6,)})


def test_safetensors_go_first(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    (tmp_path / PICKLED_INDEX).write_text(json.dumps({"weight_map": {"a": "pytorch_model-1-of-2.bin"}}))
    (tmp_path / "config.json").write_text("{}")
    save_file(TENSORS, tmp_path / "model.safetensors")
    check_equal(tmp_path)
    check_folder(tmp_path, tokenizer=False)


@pytest.mark.parametrize("zipped", [True, False])
def test_code_is_refused_and_not_run(tmp_path: Path, zipped: bool) -> None:
    """C45: loads or refuses clearly."""
    content = {**TENSORS, "d": Intruder(tmp_path / "trace")}
    torch.save(content, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is not read: it asks for \w+\.mkdir.*safetensors"):
        read_tensors(tmp_path, SHAPES)
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_damaged_files(tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save(TENSORS, path, _use_new_zipfile_serialization=zipped)
    whole = path.read_bytes()
    for part in (whole[:-4], whole[: len(whole) // 2], whole[:1], b""):
        path.write_bytes(part)
        with pytest.raises(CheckpointError, match=r"pytorch_model\.bin (cannot be read \(.+\): copy|.* be damaged)"):
            read_tensors(tmp_path, SHAPES)


def test_placeholder_of_git_lfs(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(CheckpointError, match="git lfs pull"):
        read_tensors(tmp_path, SHAPES)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.zeros(1)], "holds a list instead of tensors by name"),
        ({"state_dict": TENSORS, "step": 3}, "'state_dict', a dict, among its tensors"),
        ({"a": torch.zeros(2, 2).to_sparse()}, "'a', a Tensor, among its tensors"),
    ],
)
def test_something_else_than_tensors(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save(content, path)
    with pytest.raises(CheckpointError, match=message):
        read_pickled(path)
