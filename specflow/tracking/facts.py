"""Facts of a run that its results cannot be understood without: commits, versions, platform, command."""

import os
import platform
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import specflow
from specflow.plugins.source import Source

__all__ = ["collect_facts", "git_commit"]

_PACKAGES = ("torch", "transformers", "numpy")
_GIT_SECONDS = 5  # a slow network folder must not hold up a run


def collect_facts(sources: Iterable[Source], launch_dir: Path, overrides: Iterable[str] = ()) -> dict[str, str]:
    """Strings by name; what cannot be found out is left out. Nothing is imported for it.

    sources: the plugins in use; launch_dir: where the command was started; overrides: its words.
    """
    facts = {"specflow": specflow.__version__, "python": platform.python_version(), "platform": platform.platform()}
    facts |= {name: found for name in _PACKAGES if (found := _version(name))}
    for source in sources:
        if source.distribution != "specflow":
            facts[f"plugin {source.distribution}"] = source.version
    facts["cpus"] = str(os.cpu_count())
    facts["launch_dir"] = str(launch_dir)
    facts["overrides"] = " ".join(overrides)
    facts |= _commit("commit", launch_dir)
    checkout = Path(specflow.__file__).parents[1]
    if (checkout / ".git").exists():  # an installed package may lie in a repository that is not its own
        facts |= _commit("specflow commit", checkout)
    return facts


def git_commit(folder: Path) -> tuple[str, bool] | None:
    """Commit of the repository that holds the folder, and whether files of it were changed; None outside of one."""
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return None
    return commit, bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))


def _commit(name: str, folder: Path) -> dict[str, str]:
    found = git_commit(folder)
    return {name: found[0], f"{name} dirty": str(found[1]).lower()} if found else {}


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
