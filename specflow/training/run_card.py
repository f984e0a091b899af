"""What a training run leaves behind besides weights: its curve while it goes on, and a card at the end."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specflow.capture.manifest import storage_error, write_atomically

__all__ = ["CARD", "CurveFile", "read_card", "read_curve", "write_card"]

CARD = "training.json"
_CURVE = "curve.jsonl"


class CurveFile:
    """Points of all curves, one line per step and source."""

    def __init__(self, folder: Path, last_step: int) -> None:
        """Go on behind `last_step`: later points are of steps that are trained again, and are dropped."""
        self.path = folder / _CURVE
        try:
            kept = [point for point in read_curve(folder) if point["step"] <= last_step]
            content = "".join(f"{json.dumps(point)}\n" for point in kept)
            write_atomically(self.path, content.encode())
        except OSError as error:
            raise storage_error(error, folder) from error

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Append one point of every given curve."""
        with self.path.open("a") as file:
            file.write(f"{json.dumps({'step': step, **values})}\n")


def read_curve(folder: Path) -> list[dict[str, float]]:
    """All points, oldest first; a last line that was cut off is left out."""
    path = folder / _CURVE
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def write_card(folder: Path, card: Mapping[str, Any]) -> None:
    """`training.json`: everything needed to judge the head, or to train it again. Raises `StorageError`."""
    try:
        write_atomically(folder / CARD, (json.dumps(card, indent=1, ensure_ascii=False, default=str) + "\n").encode())
    except OSError as error:
        raise storage_error(error, folder) from error


def read_card(folder: Path) -> dict[str, Any] | None:
    """The card of a folder, None when training has not ended there."""
    path = folder / CARD
    return dict(json.loads(path.read_text())) if path.exists() else None
