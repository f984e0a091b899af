"""The folder of an extraction: what it was made with, which requests are done, and nobody else writing to it.

extract.json holds the settings, manifest.jsonl one line per finished file. A line is appended, and synchronised to the
disk, only when its file is complete under its final name: so a request without a line is redone, and one with a line is
not, whenever and however the run before ended.
"""

import hashlib
import json
import os
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from specflow.errors import ConfigError, StorageError
from specflow.plugins.relay import is_disk_full

__all__ = [
    "MANIFEST",
    "SETTINGS",
    "Entry",
    "Manifest",
    "file_name",
    "hash_ids",
    "pin_settings",
    "read_entries",
    "refuse_other_settings",
    "storage_error",
    "write_atomically",
]

SETTINGS = "extract.json"
MANIFEST = "manifest.jsonl"
LOCK = ".lock"
PARTIAL = ".partial"
FORMAT = 1


@dataclass(frozen=True)
class Entry:
    """One line of the manifest."""

    request_id: str
    file: str  # name in the folder
    hidden_states: tuple[int, int, int]  # shape [T, L, E]
    token_ids: tuple[int]  # shape [T]
    dtype: str
    layers: tuple[int, ...]  # of the second axis
    first_position: int  # of row 0 in the request: 0, or the prompt's length when only generated tokens are kept
    prompt_tokens: int
    prompt_sha256: str  # of the prompt's token ids
    target: str  # hash of the target's weights
    bytes: int
    sha256: str  # of the file
    last_hidden: bool = False  # the file also holds the states after the final norm, [T, E]


def file_name(request_id: str) -> str:
    """A file name for any request id: itself where it can be, else a readable part and a hash."""
    plain = re.sub(r"[^A-Za-z0-9_.\-#=+@]", "_", request_id)[:120].lstrip(".")
    if plain and plain == request_id:
        return f"{plain}.safetensors"
    return f"{plain or 'request'}-{hashlib.sha256(request_id.encode()).hexdigest()[:10]}.safetensors"


def hash_ids(ids: Sequence[int]) -> str:
    """SHA-256 of token ids, first 32 hex digits."""
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:32]


def storage_error(error: OSError, folder: Path, done: int | None = None) -> StorageError:
    """A write that failed, with the folder and what is kept."""
    what = "the disk is full" if is_disk_full(error) else f"cannot write ({error.strerror or error})"
    kept = "" if done is None else f" The {done} requests finished so far are kept."
    return StorageError(
        f"{what}: {folder}.{kept} Free space or rights there and run the same command again: it goes on where it "
        "stopped. Or choose another folder: task.output=FOLDER"
    )


def read_entries(folder: Path) -> dict[str, Entry]:
    """Request id -> entry of every whole line; a last line that was cut off is left out.

    Raises `StorageError`, with the line number, for a line that is no entry.
    """
    path = folder / MANIFEST
    if not path.exists():
        return {}
    entries = {}
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            row = json.loads(line)
            sizes = {key: tuple(row[key]) for key in ("hidden_states", "token_ids", "layers")}
            entry = Entry(**{**row, **sizes})
        except (ValueError, TypeError, KeyError) as error:
            raise StorageError(
                f"{path}:{number} is damaged ({error}). Delete this line to have its request redone, or choose "
                "another folder: task.output=FOLDER"
            ) from None
        entries[entry.request_id] = entry
    return entries


class Manifest:
    """The open folder of one extraction. `add` may be called from several threads."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], resume: bool) -> None:
        """Open or make the folder, and drop what a killed run left half-done.

        Raises `ConfigError` when the folder was made with other settings, or holds results and resume is False;
        `StorageError` when it cannot be written, or another process writes to it.
        """
        self.folder = folder
        self._mutex = threading.Lock()
        self._file: BinaryIO | None = None
        self._lock: BinaryIO | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(folder)
            self._check_settings({"format": FORMAT, **settings}, resume)
            self.entries = self._recover()
            self._file = (folder / MANIFEST).open("ab", buffering=0)
        except OSError as error:
            self.close()
            raise storage_error(error, folder) from error
        except BaseException:
            self.close()
            raise

    def _check_settings(self, settings: Mapping[str, Any], resume: bool) -> None:
        path = self.folder / SETTINGS
        if not path.exists() and (self.folder / MANIFEST).exists():
            raise ConfigError(f"task.output={self.folder}: there is a {MANIFEST}, but no {SETTINGS} beside it.")
        if path.exists() and not resume:
            raise ConfigError(
                f"task.output={self.folder} already holds an extraction and task.resume=false. Delete the folder, "
                "choose another one, or go on with task.resume=true."
            )
        pin_settings(path, settings, f"task.output={self.folder} holds an extraction")

    def _recover(self) -> dict[str, Entry]:
        """Entries whose files are there; the manifest is written anew when it holds anything else."""
        for left in self.folder.glob(f"*{PARTIAL}"):
            left.unlink()
        path = self.folder / MANIFEST
        entries = {name: entry for name, entry in read_entries(self.folder).items() if self._is_there(entry)}
        content = b"".join(_line(entry) for entry in entries.values())
        if path.exists() and path.read_bytes() != content:
            write_atomically(path, content)
        return entries

    def _is_there(self, entry: Entry) -> bool:
        path = self.folder / entry.file
        return path.is_file() and path.stat().st_size == entry.bytes

    def add(self, entry: Entry) -> None:
        """Append a line and wait until the disk has it. A line that cannot be written whole is taken back."""
        assert self._file is not None, "the manifest is closed"
        line = _line(entry)
        with self._mutex:
            size = os.fstat(self._file.fileno()).st_size
            try:
                if self._file.write(line) != len(line):
                    raise OSError(28, "No space left on device")
                os.fsync(self._file.fileno())
            except OSError:
                os.ftruncate(self._file.fileno(), size)
                raise
            self.entries[entry.request_id] = entry

    def close(self) -> None:
        """Close the file and let others write; safe to call twice."""
        for file in (self._file, self._lock):
            if file is not None:
                file.close()
        self._file = self._lock = None


def _line(entry: Entry) -> bytes:
    return (json.dumps(asdict(entry), ensure_ascii=False) + "\n").encode()


def pin_settings(path: Path, settings: Mapping[str, Any], holds: str) -> None:
    """Write the settings that all results of a folder share, or compare them with those it was begun with.

    holds: beginning of the message, for instance "task.output=FOLDER holds an extraction".
    Raises `ConfigError` naming every setting that differs, `StorageError` for a damaged file.
    """
    settings = json.loads(json.dumps(settings))
    if not path.exists():
        write_atomically(path, (json.dumps(settings, indent=1, ensure_ascii=False) + "\n").encode())
        return
    try:
        found = dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError):
        raise StorageError(f"{path} is damaged: choose another folder, task.output=FOLDER.") from None
    refuse_other_settings(found, settings, holds)


def refuse_other_settings(found: Mapping[str, Any], wanted: Mapping[str, Any], holds: str) -> None:
    """Raise `ConfigError` naming every setting in which the two differ; `holds` begins the message."""
    keys = [key for key in {**found, **wanted} if found.get(key) != wanted.get(key)]
    if keys:
        lines = "".join(f"  {key}: {found.get(key)} there, {wanted.get(key)} now\n" for key in keys)
        raise ConfigError(
            f"{holds} with other settings, and mixing them would spoil it:\n{lines}"
            "Choose another folder with task.output=FOLDER, delete this one, or set the options as they were."
        )


def _locked(folder: Path) -> BinaryIO:
    """A file that only one process holds; the system lets go of it however that process ends."""
    file = (folder / LOCK).open("ab")
    try:
        import fcntl
    except ImportError:  # a system without it
        return file
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise StorageError(
            f"another process is extracting to {folder}. Wait for its end, or choose another folder: task.output=FOLDER"
        ) from None
    return file


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, and have it on the disk before its name."""
    partial = path.with_name(path.name + PARTIAL)
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
