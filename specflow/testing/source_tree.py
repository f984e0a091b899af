"""A plugin package that is not installed, made visible: its entry points are found as if it were."""

import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

__all__ = ["is_installed", "show_package"]


def is_installed(folder: Path) -> bool:
    """Whether the package of this source folder is installed, so that showing it would register everything twice."""
    try:
        distribution(_project(folder)["name"])
    except PackageNotFoundError:
        return False
    return True


def show_package(folder: Path, site: Path) -> list[str]:
    """What to put in front of sys.path (or into PYTHONPATH) to use the package in folder without installing it.

    site: an existing folder, which receives what an installer would write of name, version and entry points.
    """
    project = _project(folder)
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    lines = []
    for group, points in project.get("entry-points", {}).items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return [str(site), str(folder)]


def _project(folder: Path) -> dict:
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
