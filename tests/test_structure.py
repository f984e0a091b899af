"""The habits of the code base, checked: sizes, direction of imports, one border between device and host."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "specflow"
FILES = sorted(PACKAGE.rglob("*.py"))
MOST_LINES_OF_A_FILE = 400
MOST_LINES_OF_A_FUNCTION = 60

# Bottom first: a room imports only from rooms named before it.
ROOMS = [
    "errors", "words", "paths", "zoo", "options", "core", "kernels", "heads", "plugins", "backends", "checkpoints",
    "targets", "samplers", "schedulers", "proposers", "tracking", "engine", "capture", "metrics", "workloads",
    "peers", "training", "report", "testing", "tasks", "sweep", "diagnosis", "help_text", "interrupts", "composition",
    "runner", "tuning", "multirun", "cli", "__main__", "__init__",
]  # fmt: skip

# On the decode path values are read back in `engine/border.py`; the others run before or after decoding.
HOST_READS_ALLOWED = {
    "engine/border.py", "engine/losslessness.py", "targets/proof.py", "targets/probe.py", "targets/hf.py",
}  # fmt: skip


def room_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else path.stem


def imported_rooms(path: Path) -> Iterator[str]:
    """Rooms that a file really imports; what only type checkers read does not count."""
    tree = ast.parse(path.read_text())
    for node in _without_type_checking(tree):
        modules: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module:
            modules = [node.module]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        for module in modules:
            parts = module.split(".")
            if parts[0] == "specflow" and len(parts) > 1:
                yield parts[1]


def _without_type_checking(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and getattr(child.test, "id", "") == "TYPE_CHECKING":
            continue
        yield child
        yield from _without_type_checking(child)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path: Path) -> None:
    own = ROOMS.index(room_of(path))
    for room in imported_rooms(path):
        assert ROOMS.index(room) <= own, f"{path.relative_to(PACKAGE)} imports the higher room {room!r}"


def test_proposers_meet_only_in_shared_modules() -> None:
    """A drafting method never imports another one."""
    methods = {path.stem for path in (PACKAGE / "proposers").glob("*.py") if "class" in path.read_text()}
    methods = {
        name for name in methods if f"{_camel(name)}Proposer" in (PACKAGE / "proposers" / f"{name}.py").read_text()
    }
    assert {"ngram", "draft_model"} <= methods
    for name in methods:
        text = (PACKAGE / "proposers" / f"{name}.py").read_text()
        for other in methods - {name}:
            assert f"specflow.proposers.{other} " not in text, f"{name} imports {other}"


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_sizes(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= MOST_LINES_OF_A_FILE
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            assert length <= MOST_LINES_OF_A_FUNCTION, f"{node.name} has {length} lines"


@pytest.mark.parametrize("room", ["engine", "samplers", "proposers", "kernels", "targets"])
def test_values_cross_to_the_host_in_one_place(room: str) -> None:
    for path in (PACKAGE / room).rglob("*.py"):
        if str(path.relative_to(PACKAGE)) in HOST_READS_ALLOWED:
            continue
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            assert ".item(" not in line, f"{path.name}:{number} reads a value back"
            assert ".cpu(" not in line, f"{path.name}:{number} reads a value back"


def test_every_public_class_and_function_has_a_docstring() -> None:
    missing = []
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            public = isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
            if public and ast.get_docstring(node) is None:
                missing.append(f"{path.relative_to(PACKAGE)}:{node.name}")
    assert not missing
