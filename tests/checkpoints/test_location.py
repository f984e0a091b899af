"""Finding checkpoint folders."""

import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from specflow.checkpoints.location import find_folder
from specflow.errors import CheckpointError, ConfigError


def test_local_folder(tmp_path: Path) -> None:
    assert find_folder(str(tmp_path), None, "proposer.path") == tmp_path


def test_bundled_name() -> None:
    assert find_folder("zoo:draft", None, "proposer.path").name == "draft"
    with pytest.raises(ConfigError, match="no bundled model"):
        find_folder("zoo:nothing", None, "proposer.path")


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no folder .*absent.*proposer\.path"):
        find_folder(str(tmp_path / "absent"), None, "proposer.path")


def test_file_instead_of_a_folder(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.touch()
    with pytest.raises(CheckpointError, match="is a file"):
        find_folder(str(path), None, "proposer.path")


def test_revision_of_a_local_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="revision"):
        find_folder(str(tmp_path), "main", "proposer.path")


def test_hub_id_while_offline() -> None:
    """The tests run with the hub switched off."""
    with pytest.raises(CheckpointError, match=r"proposer\.path=nobody/nothing.*HF_HUB_OFFLINE"):
        find_folder("nobody/nothing", None, "proposer.path")


@pytest.mark.parametrize(
    ("weights", "fetched"),
    [
        (["model.safetensors", "pytorch_model.bin"], ["model.safetensors"]),
        (["pytorch_model.bin", "optimizer.bin"], ["pytorch_model.bin"]),
        (["pytorch_model-1-of-2.bin", "pytorch_model-2-of-2.bin"],) * 2,
    ],
)
def test_pickled_weights_only_where_there_are_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: list[str], fetched: list[str]
) -> None:
    """C45: heads of EAGLE's own repository are only there as pytorch_model.bin."""

    def snapshot(hub_id: str, revision: str | None, allow_patterns: list[str]) -> str:
        for name in ("config.json", *weights):
            if any(fnmatch.fnmatch(name, pattern) for pattern in allow_patterns):
                (tmp_path / name).touch()
        return str(tmp_path)

    patched: Any = snapshot
    monkeypatch.setattr(huggingface_hub, "snapshot_download", patched)
    folder = find_folder("somebody/head", None, "proposer.path")
    assert sorted(path.name for path in folder.iterdir()) == sorted(["config.json", *fetched])
