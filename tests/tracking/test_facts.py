"""Facts of a run: commit, dirty flag, versions."""

import subprocess
from pathlib import Path

import pytest

import specflow
from specflow.plugins.registry import Source
from specflow.tracking import facts as facts_module
from specflow.tracking.facts import collect_facts, git_commit


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.com"]
    done = subprocess.run(["git", "-C", str(folder), *identity, *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one commit."""
    git(tmp_path, "init", "-q")
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-q", "-m", "first")
    return tmp_path


def test_commit_and_dirty_flag(repository: Path) -> None:
    commit = git(repository, "rev-parse", "HEAD")
    assert git_commit(repository) == (commit, False)
    (repository / "untracked").write_text("results")
    assert git_commit(repository) == (commit, False)
    (repository / "file").write_text("two")
    assert git_commit(repository) == (commit, True)


def test_outside_of_a_repository(tmp_path: Path) -> None:
    assert git_commit(tmp_path) is None
    assert "commit" not in collect_facts([], tmp_path)


def test_without_git(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert git_commit(repository) is None


def test_versions_plugins_and_command(repository: Path) -> None:
    facts = collect_facts([Source("p", "their-pack", "3.1"), Source("builtin", "specflow", "0")], repository, ["a=1"])
    assert facts["specflow"] == specflow.__version__
    assert facts["plugin their-pack"] == "3.1"
    assert "plugin specflow" not in facts
    assert facts["overrides"] == "a=1"
    assert facts["launch_dir"] == str(repository)
    assert facts["commit dirty"] == "false"
    assert {"torch", "transformers", "python", "platform", "cpus"} <= set(facts)
    assert all(isinstance(value, str) for value in facts.values())


def test_an_installed_package_does_not_claim_its_surroundings(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = repository / "site-packages" / "specflow"
    package.mkdir(parents=True)
    monkeypatch.setattr(facts_module.specflow, "__file__", str(package / "__init__.py"))
    assert "specflow commit" not in collect_facts([], repository)
