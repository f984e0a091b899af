"""Reading an extraction back, for training and for tools."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load

from specflow.capture.checks import CaptureError, check_last_hidden, check_states
from specflow.capture.manifest import SETTINGS, Entry, read_entries
from specflow.errors import StorageError

__all__ = ["Extraction", "Record"]


@dataclass(frozen=True)
class Record:
    """One request as it was saved."""

    entry: Entry
    hidden_states: torch.Tensor  # [T, L, E]
    token_ids: torch.Tensor  # [T] int64
    last_hidden: torch.Tensor | None = None  # [T, E] after the final norm, where it was asked for


class Extraction:
    """A folder written by `task=extract`: its settings, its entries in the order they were finished, its records."""

    def __init__(self, folder: Path | str) -> None:
        """Read settings and manifest. Raises `StorageError` for a folder that is no extraction."""
        self.folder = Path(folder)
        try:
            self.settings: dict[str, Any] = json.loads((self.folder / SETTINGS).read_bytes())
        except (OSError, ValueError) as error:
            raise StorageError(f"{self.folder} holds no extraction: {SETTINGS} cannot be read ({error}).") from None
        self.entries = read_entries(self.folder)

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Record]:
        for name in self.entries:
            yield self.read(name)

    def read(self, request_id: str, verify: bool = True) -> Record:
        """Load one request. Raises `StorageError` when its file is not what was written, `CaptureError` when its states
        cannot be right.

        verify=False only looks at the shape, for a file that was read before.
        """
        entry = self.entries[request_id]
        path = self.folder / entry.file
        try:
            content = path.read_bytes()
        except OSError as error:
            raise StorageError(f"request {request_id!r}: {path} cannot be read: {error.strerror}.") from error
        if verify and hashlib.sha256(content).hexdigest() != entry.sha256:
            raise StorageError(
                f"request {request_id!r}: {path} is not the file that was written (its SHA-256 differs). Delete it and "
                "run task=extract again: only this request is redone."
            )
        tensors = load(content)
        if tuple(tensors["hidden_states"].shape) != entry.hidden_states:
            raise CaptureError(f"request {request_id!r}: {path} does not have the shape of its manifest line.")
        last_hidden = tensors["last_hidden"] if entry.last_hidden else None
        if verify:
            check_states(request_id, tensors["hidden_states"], tensors["token_ids"], entry.layers)
            if last_hidden is not None:
                check_last_hidden(request_id, last_hidden, tensors["token_ids"])
        return Record(entry, tensors["hidden_states"], tensors["token_ids"], last_hidden)
