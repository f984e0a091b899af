"""The configuration tree: every file composes, and says exactly what the options dataclasses say."""

import dataclasses
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from specflow.composition import composer, plain_config
from specflow.core.sampling_params import SamplingParams
from specflow.options import build_options
from specflow.paths import config_root
from specflow.plugins.component import Kind
from specflow.plugins.registry import load_plugins

ROOT = Path(__file__).parents[1]
FILES = sorted(config_root().glob("*/*.yaml"))
COMPONENTS = [
    (kind, name) for kind in Kind for name, item in load_plugins(only="").components(kind).items()
]  # imports no model library


def words_for(file: Path) -> str:
    """The word that chooses a file of the tree."""
    group = file.parent.name
    plus = "+" if group in ("proposer", "experiment") else ""
    return f"{plus}{group}={file.stem}"


def plain(value: Any) -> Any:
    """A default as YAML would hold it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return dict(value)
    return str(value) if isinstance(value, Path) else value


def defaults(schema: type) -> dict[str, Any]:
    """Every option with its default; `...` where it has none."""
    found = {}
    for field in dataclasses.fields(schema):
        if field.default is not dataclasses.MISSING:
            found[field.name] = plain(field.default)
        elif field.default_factory is not dataclasses.MISSING:
            found[field.name] = plain(field.default_factory())
        else:
            found[field.name] = ...
    return found


@pytest.mark.parametrize("file", FILES, ids=words_for)
def test_every_file_composes(file: Path) -> None:
    with composer(load_plugins(only="")) as compose:
        cfg = compose.compose([words_for(file)])
    if file.parent.name in list(Kind):
        assert cfg[file.parent.name].name == file.stem


@pytest.mark.parametrize(("kind", "name"), COMPONENTS, ids=lambda value: str(value))
def test_every_component_has_a_file_with_its_options_and_defaults(kind: Kind, name: str) -> None:
    file = config_root() / kind / f"{name}.yaml"
    with composer(load_plugins(only="")) as compose:
        cfg = compose.compose([words_for(file)])
    values = plain_config(cfg)[kind]  # resolved: a seed may be the run's
    assert values.pop("name") == name
    schema = load_plugins(only="").get(kind, name).load_options()
    expected = defaults(schema)
    assert set(values) == set(expected)
    given = {key: value for key, value in values.items() if expected[key] is not ...}
    assert given == {key: value for key, value in expected.items() if value is not ...}


def test_the_file_tree_holds_no_component_that_is_not_registered() -> None:
    known = {(kind, name) for kind, name in COMPONENTS}
    assert {(Kind(file.parent.name), file.stem) for file in FILES if file.parent.name in list(Kind)} == known


def test_the_sampling_node_is_the_sampling_dataclass() -> None:
    values = yaml.safe_load((config_root() / "config.yaml").read_text())["sampling"]
    assert values == defaults(SamplingParams)
    assert plain(build_options(SamplingParams, values, "sampling")) == plain(SamplingParams())


@pytest.mark.parametrize("file", [*FILES, config_root() / "config.yaml"], ids=lambda file: file.stem)
def test_every_option_has_a_comment(file: Path) -> None:
    if file.parent.name == "experiment":
        assert "\n# " in file.read_text(), "an experiment says what it is for"
        return
    for line in file.read_text().splitlines():
        option = re.match(r"^ *([a-z_]\w*): *[^ #]", line)
        if option and option[1] not in ("name", "dir", "subdir"):
            assert "# " in line, f"{file.name}: {option[1]} needs a comment that says what happens when it is changed"


def commands(text: str) -> list[list[str]]:
    """The words after `specflow` of every command line in a text."""
    lines = re.findall(r"^\s*\$?\s*(?:python -m specflow|specflow)((?: .*)?)$", text, flags=re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]


def documented() -> list[list[str]]:
    """Command lines of the README, of the pages in docs and of `--help`."""
    from specflow.help_text import _HEAD

    texts = [re.sub(r" {3,}.*", "", line) for line in _HEAD.splitlines() if line.startswith("  python")]
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    # Every fence is matched, whatever its language: skipping one would shift all pairs behind it.
    fence = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
    fences = [found for page in pages for found in fence.findall(page.read_text())]
    blocks = [text for language, text in fences if language in ("", "bash", "sh", "console")]
    return [words for text in [*texts, *blocks] for words in commands(text.replace("\\\n", " "))]


@pytest.mark.parametrize("words", documented(), ids=" ".join)
def test_every_documented_command_composes(words: list[str]) -> None:
    overrides = [word for word in words if not word.startswith("-")]
    if "-m" in words:  # the first job of a sweep
        overrides = [word.split(",")[0] for word in overrides]
    if "--help" in words or "--version" in words:
        return
    with composer(load_plugins(only="")) as compose:
        compose.compose(overrides)


def test_the_documented_commands_are_found() -> None:
    assert ["+proposer=draft_model"] in documented()
    assert ["+proposer=suffix"] in documented()  # behind the table, which is a fence of another kind
    assert any("-m" in words for words in documented())
    assert ["+proposer=eagle3", "proposer.path=runs/train/eagle3/head"] in documented()  # of docs/proposers.md


PROPOSERS = [name for kind, name in COMPONENTS if kind == Kind.PROPOSER and name != "extract_hidden_states"]


@pytest.mark.parametrize("name", PROPOSERS)
def test_every_proposer_has_a_section_with_its_options_and_a_command(name: str) -> None:
    """C55: what docs/proposers.md says of an option is what happens."""
    page = (ROOT / "docs" / "proposers.md").read_text()
    section = re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE)
    assert section, f"docs/proposers.md has no section {name}"
    assert any(f"+proposer={name}" in words for words in commands(section[1]))
    rows = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", section[1], re.MULTILINE))
    expected = defaults(load_plugins(only="").get(Kind.PROPOSER, name).load_options())
    assert {key: yaml.safe_load(value) for key, value in rows.items()} == expected
