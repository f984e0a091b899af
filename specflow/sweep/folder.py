"""The folder of a sweep: which one a command goes on with, and that one process at a time writes it."""

import fcntl
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specflow.errors import ConfigError, StorageError

__all__ = ["SWEEP_FILE", "SweepFolder", "open_folder", "without_resume"]

SWEEP_FILE = "sweep.json"
_LOCK_FILE = ".sweep.lock"


@dataclass
class SweepFolder:
    """A folder with its record."""

    path: Path
    words: tuple[str, ...]  # the command without sweep.resume
    run_id: str | None = None  # of the tracker
    started: float = 0.0  # seconds since 1970, of the first attempt
    resumed: bool = False  # an earlier process began it

    def save(self, status: str) -> None:
        """Write sweep.json whole or not at all. Raises `OSError`."""
        record = {"words": self.words, "status": status, "run_id": self.run_id, "started": self.started}
        partial = self.path / f".{SWEEP_FILE}.partial"
        partial.write_text(json.dumps(record, indent=1, ensure_ascii=False), encoding="utf-8")
        partial.replace(self.path / SWEEP_FILE)


def without_resume(words: Sequence[str]) -> tuple[str, ...]:
    """Overrides without the one that says how to begin: the same sweep has the same words."""
    return tuple(word for word in words if not word.lstrip("+").startswith("sweep.resume"))


@contextmanager
def open_folder(path: Path, template: str, words: Sequence[str], resume: bool) -> Iterator[SweepFolder]:
    """The sweep's folder, for this process alone during the block.

    path: for a new sweep. template: the same as the options have it, which tells where sweeps of other times lie.
    With `resume` the newest folder whose sweep had the same words is opened; a new one when there is none.
    Raises `ConfigError` when the folder holds another sweep or another process runs it; `OSError` when it cannot be
    made.
    """
    own = without_resume(words)
    found = _newest(template, path, own) if resume else None
    if found is None and (path / SWEEP_FILE).exists():
        held = _read(path / SWEEP_FILE)
        if not resume or tuple(held["words"]) != own:
            remedy = "choose another folder" if resume else "add sweep.resume=true to go on with it"
            raise ConfigError(f"hydra.sweep.dir={path} holds the sweep {' '.join(held['words'])!r} already: {remedy}.")
        found = path
    folder = SweepFolder(found or path, own, started=time.time())
    folder.path.mkdir(parents=True, exist_ok=True)
    with (folder.path / _LOCK_FILE).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another process runs the sweep in {folder.path} at this moment.") from None
        if found is not None:
            record = _read(found / SWEEP_FILE)
            folder.run_id, folder.started, folder.resumed = record["run_id"], record["started"], True
        folder.save("running")
        yield folder


def _newest(template: str, path: Path, words: tuple[str, ...]) -> Path | None:
    """The newest sweep of these words, whether or not it was finished; the part of the template before what changes
    with time says where to look."""
    fixed = template.partition("${")[0]
    if fixed == template:
        return None  # one place for all: `path`
    root = Path(fixed if fixed.endswith("/") else str(Path(fixed).parent))
    # The lock beside it tells a sweep's folder from a copy of the record, such as a tracker may keep.
    locks = [lock for depth in ("*", "*/*", "*/*/*") for lock in root.glob(f"{depth}/{_LOCK_FILE}")]
    files = [file for lock in locks if (file := lock.with_name(SWEEP_FILE)).exists()]
    records = [(record["started"], file) for file in files if tuple((record := _read(file))["words"]) == words]
    return max(records)[1].parent.absolute() if records else None


def _read(file: Path) -> dict[str, Any]:
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        if not {"words", "run_id", "started"} <= set(record):
            raise ValueError("keys are missing")
    except (OSError, ValueError) as error:
        raise StorageError(f"{file} cannot be read: {error}") from error
    return dict(record)
