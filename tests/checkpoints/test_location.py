"""Finding checkpoint folders."""

from pathlib import Path

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
