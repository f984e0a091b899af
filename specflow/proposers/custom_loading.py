"""From `package.module.Class` or `path/to/file.py:Class` to the class itself, with errors that say what is missing."""

import ast
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from specflow.errors import ConfigError
from specflow.words import did_you_mean

__all__ = ["LoadedClass", "load_class", "user_line"]

_FORMS = "Write proposer.path=package.module.Class or proposer.path=path/to/file.py:Class."


@dataclass(frozen=True)
class LoadedClass:
    """A user's class and where it came from."""

    cls: type
    file: Path | None  # None: no source file, for instance a class made in a notebook
    digest: str  # first 12 hex digits of the file's SHA-256

    @property
    def name(self) -> str:
        """`Class (file)`, for messages."""
        return f"{self.cls.__name__} ({self.file or self.cls.__module__})"


def load_class(path: str) -> LoadedClass:
    """Import a class by dotted path or from a plain file, relative to the folder the command was started in.

    Raises `ConfigError` for a path of neither form, an import that fails, a name that is absent or no class.
    """
    head, colon, name = path.rpartition(":")
    if colon and name.isidentifier():
        module = _import_file(path, head)
    elif path.endswith(".py") or "/" in path or "\\" in path:
        raise ConfigError(f"proposer.path={path} names no class. {_file_hint(path)}")
    else:
        head, dot, name = path.rpartition(".")
        if not dot or not all(part.isidentifier() for part in path.split(".")):
            raise ConfigError(f"proposer.path={path} is neither a dotted path nor a file with a class. {_FORMS}")
        module = _import_dotted(path, head)
    cls = _attribute(path, module, name)
    source = inspect.getsourcefile(module) or getattr(module, "__file__", None)
    file = Path(source).resolve() if source else None
    return LoadedClass(cls, file, _digest(file))


def _digest(file: Path | None) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:12] if file and file.is_file() else "no source file"


def _launch_folder() -> Path:
    from hydra.utils import to_absolute_path  # here: a class by API needs no Hydra

    return Path(to_absolute_path("."))


def _find_file(text: str) -> Path:
    file = Path(text).expanduser()
    return file if file.is_absolute() else _launch_folder() / file


def _file_hint(text: str) -> str:
    """The right spelling, with a class of the file where it has one."""
    file = _find_file(text)
    if not file.is_file():
        return f"{_FORMS} (There is no file {file} either.)"
    names = _class_names(file) or ["Class"]
    return f"Write the class behind a colon: {' or '.join(f'proposer.path={text}:{name}' for name in names)}."


def _class_names(file: Path) -> list[str]:
    try:
        return [node.name for node in ast.parse(file.read_bytes()).body if isinstance(node, ast.ClassDef)]
    except SyntaxError:
        return []


def _import_file(path: str, text: str) -> ModuleType:
    """Run a file as a module of its own. Modules beside it can be imported, as when Python runs the file itself."""
    file = _find_file(text).resolve()
    if not file.is_file():
        what = "is a folder, not a file" if file.is_dir() else "does not exist"
        raise ConfigError(f"proposer.path={path}: {file} {what}. Relative paths start in {_launch_folder()}.")
    name = f"specflow_custom_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"proposer.path={path}: {file.name} is no Python file; its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look a class's module up there
    with _importing(path, file.parent):
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return module


def _import_dotted(path: str, module: str) -> ModuleType:
    with _importing(path, _launch_folder()):
        return importlib.import_module(module)


@contextmanager
def _importing(path: str, folder: Path) -> Iterator[None]:
    """Modules of `folder` can be imported, from now on and after all others; failures become `ConfigError`."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"proposer.path={path}: there is no module {error.name!r}{_imported_from(error)}. Install it, or start "
            f"specflow in the folder that holds it (now {folder}), or give the file: path/to/file.py:Class."
        ) from error
    except Exception as error:
        raise ConfigError(
            f"proposer.path={path}: importing it failed with {type(error).__name__}: {error}{_imported_from(error)}."
        ) from error


def _imported_from(error: Exception) -> str:
    line = user_line(error)
    return f" ({line})" if line else ""


def user_line(error: BaseException) -> str:
    """`FILE:LINE` of the innermost frame in a file of the user's own, or nothing."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    own = str(Path(__file__).resolve().parents[1])
    found, trace = "", error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if not name.startswith((own, "<")) and "importlib" not in name and "site-packages" not in name:
            found = f"{name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def _attribute(path: str, module: ModuleType, name: str) -> type:
    found: Any = getattr(module, name, None)
    if inspect.isclass(found):
        return found
    classes = [
        key for key, value in vars(module).items() if inspect.isclass(value) and value.__module__ == module.__name__
    ]
    own = f" Classes there: {', '.join(classes)}." if classes else " It defines no class."
    where = getattr(module, "__file__", None) or module.__name__
    if found is not None:
        raise ConfigError(f"proposer.path={path}: {name} in {where} is a {type(found).__name__}, not a class.{own}")
    raise ConfigError(f"proposer.path={path}: there is no {name!r} in {where}.{did_you_mean(name, classes)}{own}")
