"""The corpus of the bundled models: the source code of the Python standard library.

It is on every machine that runs Python, it is licensed (PSF-2.0) and it is real text, so the bundled models can be
retrained anywhere without a download. A short list of modules and their tests is held out: it enters neither the
training of the tokenizer nor that of a model, and the bundled prompts are cut from it.
"""

import ast
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from specflow.errors import ConfigError

HELD_OUT_MODULES = (
    "bisect",
    "cmd",
    "colorsys",
    "configparser",
    "csv",
    "fractions",
    "heapq",
    "queue",
    "sched",
    "shlex",
    "statistics",
    "textwrap",
)

# Not code-like (generated tables), not UTF-8 on purpose, or dependent on the machine that built Python.
EXCLUDED = (
    "site-packages/*",
    "dist-packages/*",
    "config-*",
    "_sysconfigdata*",
    "encodings/*",
    "pydoc_data/topics.py",
    "stringprep.py",
    "html/entities.py",
    "lib2to3/tests/data/*",
    "*/bad_coding*.py",
    "*/badsyntax_*.py",
    "*/encoded_modules/*",
    "*/__pycache__/*",
)

PROMPT_MIN_CHARACTERS = 320
PROMPT_MAX_CHARACTERS = 640


@dataclass(frozen=True)
class Documents:
    """Decoded source files.

    texts: one string per file, in the order of the sorted paths.
    undecodable: how many files were left out because they are not UTF-8.
    """

    texts: list[str]
    undecodable: int

    @property
    def total_bytes(self) -> int:
        """Size of all texts in UTF-8, in bytes."""
        return sum(len(text.encode()) for text in self.texts)


def standard_library(root: Path | str | None = None) -> Path:
    """The folder of the standard library: `root`, or that of the running Python. ConfigError when it is no folder."""
    folder = Path(root) if root is not None else Path(sysconfig.get_paths()["stdlib"])
    if not folder.is_dir():
        raise ConfigError(f"corpus root {folder} is not a folder; name one that holds Python source files")
    return folder


def training_files(root: Path | str | None = None) -> list[Path]:
    """All source files that training may read, sorted by their path below the root."""
    folder = standard_library(root)
    held_out = set(held_out_files(folder))
    return [path for path in _source_files(folder) if path not in held_out]


def held_out_files(root: Path | str | None = None) -> list[Path]:
    """The held-out modules and their tests, as far as this Python has them, in the order of HELD_OUT_MODULES."""
    folder = standard_library(root)
    names = [name for module in HELD_OUT_MODULES for name in (f"{module}.py", f"test/test_{module}.py")]
    return [folder / name for name in names if (folder / name).is_file()]


def read_source(path: Path) -> str:
    """The text of one file, every character kept (newlines too). UnicodeDecodeError when it is not UTF-8."""
    return path.read_bytes().decode("utf-8")


def read_documents(paths: Iterable[Path]) -> Documents:
    """Read many files; those that are not UTF-8 or empty are left out, the former counted."""
    texts: list[str] = []
    undecodable = 0
    for path in paths:
        try:
            text = read_source(path)
        except UnicodeDecodeError:
            undecodable += 1
            continue
        if text.strip():
            texts.append(text)
    return Documents(texts, undecodable)


def bundled_prompts(root: Path | str | None = None) -> list[dict[str, Any]]:
    """The prompts of the bundled workload: two for each held-out module, of either kind.

    Each is a dict with `id`, `prompt`, `source` (file name), `kind` ("docstring": ends after a function's docstring or,
    in a module without any, its first statement; "body": ends in the middle of a function's body) and `line` (the last
    line of the prompt, from 1).
    The same root gives the same prompts.
    """
    folder = standard_library(root)
    modules = [_prompts_of_module(path) for path in held_out_files(folder) if path.parent == folder]
    first = [prompts[number % len(prompts)] for number, prompts in enumerate(modules) if prompts]
    # Every module once before any comes again: a run of the first few prompts sees many modules and both kinds.
    return first + [prompt for prompts in modules for prompt in prompts if prompt not in first]


def _source_files(folder: Path) -> list[Path]:
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.py"))
    return [folder / name for name in names if not any(fnmatch(name, pattern) for pattern in EXCLUDED)]


def _prompts_of_module(path: Path) -> list[dict[str, Any]]:
    source = read_source(path)
    starts = _definition_starts(source)
    prompts: list[dict[str, Any]] = []
    for kind, ends in (("docstring", _docstring_ends(source)), ("body", _body_middles(source))):
        taken = {prompt["line"] for prompt in prompts}
        usable = [(end, text) for end in ends if end not in taken and (text := _text_before(source, starts, end))]
        if usable:
            # Away from both ends of the file, so that the prompts are neither all first nor all last words.
            end, text = usable[len(usable) // 2]
            prompts.append(
                {"id": f"{path.stem}-{kind}", "prompt": text, "source": path.name, "kind": kind, "line": end}
            )
    return prompts


def _functions(source: str) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            yield node


def _definition_starts(source: str) -> set[int]:
    """First lines (from 1, decorators included) of all functions and classes."""
    definitions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return {min([node.lineno, *(item.lineno for item in node.decorator_list)]) for node in definitions}


def _docstring_ends(source: str) -> list[int]:
    """Last lines of the docstrings of functions that have a body after it; where there is none, of first statements."""
    functions = [node for node in _functions(source) if len(node.body) > 1]
    documented = [node for node in functions if ast.get_docstring(node)]
    return sorted(node.body[0].end_lineno or node.lineno for node in documented or functions)


def _body_middles(source: str) -> list[int]:
    """Last lines of the middle statement of functions with at least four statements."""
    functions = [node for node in _functions(source) if len(node.body) >= 4]
    return sorted(node.body[len(node.body) // 2 - 1].end_lineno or node.lineno for node in functions)


def _text_before(source: str, starts: set[int], end: int) -> str | None:
    """The lines up to `end` (inclusive) as a prompt, or None when no definition starts at a fitting distance.

    The prompt starts with the nearest definition that makes it long enough, and has no final newline: the tokenizer
    joins a newline with the indentation that follows it, which is for the model to choose.
    """
    lines = source.split("\n")
    for start in sorted(starts & set(range(1, end + 1)), reverse=True):
        text = "\n".join(lines[start - 1 : end])
        if len(text) >= PROMPT_MIN_CHARACTERS:
            return text if len(text) <= PROMPT_MAX_CHARACTERS else None
    return None
