"""Checkpoints of a training run: everything that the next step depends on, whole or not there.

A folder `step_N` appears under its name only when all of it is on the disk. The order of the packs, the rate and the
random numbers of a step are functions of its number, so the number stands for all of them.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from specflow.capture.manifest import refuse_other_settings, storage_error
from specflow.errors import StorageError

__all__ = ["Checkpoint", "Checkpoints"]

_PARTIAL = ".partial"
_TENSORS, _FACTS = "state.pt", "state.json"


@dataclass(frozen=True)
class Checkpoint:
    """The state after a step."""

    step: int
    module: Mapping[str, Tensor]  # float32
    optimizer: Mapping[str, Any]
    head: Mapping[str, Tensor]  # `TrainableHead.state`
    window: Mapping[str, tuple[float, float]]  # sums since the last point of the curves
    seconds: float  # of training so far
    tokens: int  # trained on so far


class Checkpoints:
    """The checkpoints of one run, in one folder."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], keep: int) -> None:
        """settings: what the run depends on; a checkpoint of a run with other ones is refused."""
        self.folder, self._keep = folder, keep
        self._settings = json.loads(json.dumps(settings))

    def save(self, state: Checkpoint) -> Path:
        """Write a checkpoint, then drop those beyond the newest `keep`. Raises `StorageError`."""
        final = self.folder / f"step_{state.step}"
        partial = final.with_name(final.name + _PARTIAL)
        facts = {"step": state.step, "window": state.window, "seconds": state.seconds, "tokens": state.tokens}
        tensors = {
            "module": dict(state.module),
            "optimizer": dict(state.optimizer),
            "head": dict(state.head),
        }
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            with (partial / _TENSORS).open("wb") as file:
                torch.save(tensors, file)
                _flush(file)
            with (partial / _FACTS).open("w") as text:
                json.dump({**facts, "settings": self._settings}, text, indent=1)
                _flush(text)
            _flush_folder(partial)
            if final.exists():
                _remove(final)
            partial.rename(final)
            _flush_folder(self.folder)
            for step in self.steps()[: -self._keep]:
                _remove(self.folder / f"step_{step}")
            for left in self.folder.glob(f"*{_PARTIAL}"):  # of a process that was killed while it did this
                shutil.rmtree(left)
        except OSError as error:
            raise storage_error(error, self.folder) from error
        return final

    def steps(self) -> list[int]:
        """Steps of which there is a checkpoint, ascending."""
        names = [path.name for path in self.folder.glob("step_*") if not path.name.endswith(_PARTIAL)]
        return sorted(int(name.removeprefix("step_")) for name in names if name.removeprefix("step_").isdigit())

    def newest(self, device: torch.device) -> Checkpoint | None:
        """The last checkpoint, None when there is none.

        Raises `ConfigError` when it belongs to a run with other settings, `StorageError` when it cannot be read.
        """
        steps = self.steps()
        if not steps:
            return None
        folder = self.folder / f"step_{steps[-1]}"
        try:
            facts = json.loads((folder / _FACTS).read_text())
            refuse_other_settings(facts["settings"], self._settings, f"{self.folder} holds checkpoints of a run")
            tensors = torch.load(folder / _TENSORS, map_location=device, weights_only=True)
        except (OSError, ValueError, KeyError, RuntimeError, EOFError, UnpicklingError) as error:
            reason = type(error).__name__ if isinstance(error, UnpicklingError) else str(error).split("\n")[0]
            raise StorageError(
                f"the checkpoint {folder} cannot be read ({reason}). Delete it to go on from the one before."
            ) from error
        window = {name: (float(pair[0]), float(pair[1])) for name, pair in facts["window"].items()}
        return Checkpoint(
            step=facts["step"],
            module=tensors["module"],
            optimizer=tensors["optimizer"],
            head=tensors["head"],
            window=window,
            seconds=facts["seconds"],
            tokens=facts["tokens"],
        )


def _flush(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(folder: Path) -> None:
    """Rename first: a folder that is being deleted must not look like a checkpoint."""
    partial = folder.with_name(folder.name + _PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    folder.rename(partial)
    shutil.rmtree(partial)
