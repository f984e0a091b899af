"""Packages that are used without being installed."""

from importlib.metadata import entry_points
from pathlib import Path

import pytest

from specflow.testing.source_tree import is_installed, show_package

PROJECT = '[project]\nname = "nobody-has-this"\nversion = "1.2"\n[project.entry-points.specflow]\nmine = "my_module"\n'


def test_a_source_folder_is_seen_like_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "site").mkdir()
    (tmp_path / "source" / "pyproject.toml").write_text(PROJECT)
    assert not is_installed(tmp_path / "source")
    for entry in show_package(tmp_path / "source", tmp_path / "site"):
        monkeypatch.syspath_prepend(entry)
    (point,) = entry_points(group="specflow", name="mine")
    assert (point.value, point.dist.name, point.dist.version) == ("my_module", "nobody-has-this", "1.2")
    assert is_installed(tmp_path / "source")
