"""`task=new-plugin`: a plugin package to start from, which passes its own tests and runs as it comes out.

It is a copy of the example in `plugins/specflow-custom-class` under other names, so there is one text to keep right.
"""

import keyword
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from specflow.errors import ConfigError, StorageError
from specflow.paths import example_plugin
from specflow.plugins.component import Kind
from specflow.plugins.registry import Registry
from specflow.tasks.base import Task, TaskContext
from specflow.tracking.events import RunFinished

__all__ = ["NewPluginOptions", "NewPluginTask", "copy_example"]

# The names in the example, and what makes them from the new package's and proposer's.
_PACKAGE, _MODULE, _PROPOSER, _CLASS = "specflow-custom-class", "specflow_custom_class", "phrase_lookup", "PhraseLookup"
_ONLY_IN_EXAMPLE = "\n<!-- of the example only -->"
_FILES = (".toml", ".md", ".py", ".yaml")


@dataclass(frozen=True, kw_only=True)
class NewPluginOptions:
    """Options of `task=new-plugin`. Raises `ConfigError` for names that Python or an installer could not use."""

    package: str = ""  # name of the new package, such as specflow-foo; has to be given
    proposer: str | None = None  # name of its drafting method; None: the package's without specflow-
    output: Path = Path()  # folder that receives the package's folder

    def __post_init__(self) -> None:
        if not self.package:
            raise ConfigError("task.package must be set: the name of the new package, such as specflow-foo.")
        normal = re.sub(r"[-_.]+", "-", self.package).lower()
        if self.package != normal or not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", normal):
            hint = f" Write {normal}." if re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", normal) else ""
            raise ConfigError(
                f"task.package={self.package} must be a normalised package name: a letter first, then lower-case "
                f"letters and digits, words joined by single dashes.{hint}"
            )
        if keyword.iskeyword(self.module) or self.module in {*sys.stdlib_module_names, "specflow"}:
            raise ConfigError(f"task.package={self.package}: Python has {self.module!r} already. Choose another name.")
        if not re.fullmatch(r"[a-z][a-z0-9_]*", self.method) or keyword.iskeyword(self.method):
            raise ConfigError(
                f"task.proposer={self.method} must be a name of lower-case letters, digits and underscores, as in "
                "+proposer=NAME, a letter first, and no word of Python."
            )

    @property
    def module(self) -> str:
        """Name of the package in Python."""
        return self.package.replace("-", "_")

    @property
    def method(self) -> str:
        """Name of the proposer."""
        return self.proposer if self.proposer is not None else self.module.removeprefix("specflow_")


class NewPluginTask(Task):
    """Writes the package; refuses to touch a folder that exists."""

    name = "new-plugin"
    tracked = False

    def __init__(self, options: NewPluginOptions) -> None:
        self.options = options

    def check(self, config: Mapping[str, object], registry: Registry) -> None:
        """See `Task.check`: the proposer's name must be free."""
        taken = registry.components(Kind.PROPOSER).get(self.options.method)
        if taken is not None:
            raise ConfigError(
                f"task.proposer={self.options.method}: {taken.source} has a proposer of this name. Choose another one."
            )

    def run(self, context: TaskContext) -> RunFinished:
        """See `Task.run`. Raises `ConfigError` when the folder exists and `StorageError` when it cannot be written."""
        folder = self.options.output / self.options.package
        if folder.exists():
            raise ConfigError(f"{folder} exists already. Choose another task.output or task.package.")
        try:
            files = copy_example(folder, self.options)
        except OSError as error:
            raise StorageError(f"cannot write {folder}: {error.strerror or error}.") from error
        print("\n".join([*(str(file) for file in files), "", *_next_steps(folder, self.options.method)]))
        return RunFinished("finished", metrics={"files": float(len(files))})


def copy_example(folder: Path, options: NewPluginOptions) -> list[Path]:
    """Write the example under the new names; returns the files. folder must not exist."""
    example, written = example_plugin(), []
    names = {
        _PACKAGE: options.package,
        _MODULE: options.module,
        _PROPOSER: options.method,
        _CLASS: _camel(options.method),
    }
    for source in sorted(example.rglob("*")):
        relative = source.relative_to(example)
        if source.suffix not in _FILES or any(part.startswith(".") for part in relative.parts):
            continue
        file = folder / _renamed(str(relative), names)
        file.parent.mkdir(parents=True, exist_ok=True)
        text = source.read_text(encoding="utf-8").partition(_ONLY_IN_EXAMPLE)[0]
        file.write_text(_renamed(text, names), encoding="utf-8")
        written.append(file)
    return written


def _renamed(text: str, names: Mapping[str, str]) -> str:
    """All names replaced at once, so that a new name may hold an old one."""
    return re.sub("|".join(map(re.escape, names)), lambda found: names[found[0]], text)


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def _next_steps(folder: Path, method: str) -> list[str]:
    return [
        f"cd {folder} && pip install -e '.[test]' && pytest",
        f"python -m specflow +proposer={method}",
        "The method is in proposer.py; the guide is docs/plugins.md of specflow.",
    ]
