"""`task=new-plugin`: what it writes passes its own tests and runs, under names that are checked."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from specflow import cli
from specflow.errors import ConfigError
from specflow.paths import example_plugin
from specflow.tasks.new_plugin import NewPluginOptions, copy_example

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package from the command line."""
    folder = tmp_path_factory.mktemp("new")
    assert cli.main(["task=new-plugin", "task.package=specflow-my-method", f"task.output={folder}"]) == 0
    return folder / "specflow-my-method"


@pytest.fixture(scope="module")
def environment(package: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The package installed into a folder of its own, which an interpreter with this environment finds."""
    site = tmp_path_factory.mktemp("site")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(site), str(package)]
    subprocess.run(command, check=True, timeout=120)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]), "OMP_NUM_THREADS": "1"}


def test_the_files_hold_the_new_names_only(package: Path) -> None:
    files = sorted(str(file.relative_to(package)) for file in package.rglob("*") if file.is_file())
    assert files == [
        "README.md",
        "pyproject.toml",
        "specflow_my_method/__init__.py",
        "specflow_my_method/conf/proposer/my_method.yaml",
        "specflow_my_method/proposer.py",
        "tests/test_my_method.py",
    ]
    text = "".join((package / file).read_text() for file in files)
    for old in ("custom", "phrase_lookup", "PhraseLookup", "of the example only"):
        assert old not in text
    assert "class MyMethodProposer(HostProposer)" in text


def test_its_own_tests_pass(package: Path, environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    done = subprocess.run(
        command, cwd=package, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_its_proposer_runs(environment: dict[str, str], tmp_path: Path) -> None:
    words = ["task=generate", "+proposer=my_method", "task.prompts=[import]", "sampling.max_tokens=8", "tracking=none"]
    command = [sys.executable, "-m", "specflow", *words]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "my_method" in done.stderr
    wrong = subprocess.run(
        [*command, "proposer.max_phras=3"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert wrong.returncode == 2
    assert "max_phrase" in wrong.stderr


def test_the_example_is_a_copy_of_itself(tmp_path: Path) -> None:
    """Under its own names nothing changes but the note that it is an example."""
    copied = copy_example(
        tmp_path / "copy", NewPluginOptions(package="specflow-custom-class", proposer="phrase_lookup")
    )
    for file in copied:
        original = (example_plugin() / file.relative_to(tmp_path / "copy")).read_text()
        assert original.startswith(file.read_text())
        assert file.name == "README.md" or original == file.read_text()


def test_an_existing_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "specflow-foo").mkdir()
    assert cli.main(["task=new-plugin", "task.package=specflow-foo", f"task.output={tmp_path}"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert list((tmp_path / "specflow-foo").iterdir()) == []


def test_a_folder_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert cli.main(["task=new-plugin", "task.package=specflow-foo", f"task.output={tmp_path}/file"]) == 1
    assert "cannot write" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "task.package must be set"),
        ({"package": "Specflow_Foo"}, "Write specflow-foo"),
        ({"package": "specflow--foo"}, "Write specflow-foo"),
        ({"package": "1st"}, "a letter first"),
        ({"package": "-foo"}, "a letter first"),
        ({"package": "../foo"}, "normalised package name"),
        ({"package": "foo bar"}, "normalised package name"),
        ({"package": "specflow"}, "Python has 'specflow' already"),
        ({"package": "json"}, "Python has 'json' already"),
        ({"package": "lambda"}, "Python has 'lambda' already"),
        ({"package": "specflow-foo", "proposer": "my-method"}, "task.proposer=my-method must be"),
        ({"package": "specflow-foo", "proposer": "for"}, "no word of Python"),
        ({"package": "specflow-2d"}, "task.proposer=2d must be"),
    ],
)
def test_names_are_checked(options: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        NewPluginOptions(**options)


def test_a_name_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["task=new-plugin", "task.package=specflow-ngram"]) == 2
    assert "builtin (specflow" in capsys.readouterr().err
