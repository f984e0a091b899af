"""The per-request rows of a run, one JSON object per line, kept as they finish."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from specflow.errors import StorageError
from specflow.tracking.events import RequestRow

__all__ = ["ROWS_FILE", "RowWriter"]

ROWS_FILE = "requests.jsonl"


class RowWriter:
    """Appends finished requests to OUTPUT_DIR/requests.jsonl. Every line reaches the system at once, so whatever ends
    the run, finished rows stay.
    """

    def __init__(self, output_dir: Path) -> None:
        self.path = output_dir / ROWS_FILE
        self._file: TextIO | None = None

    def write(self, row: RequestRow) -> None:
        """Append one row; the file is made by the first. Raises `StorageError`."""
        try:
            if self._file is None:
                self._file = self.path.open("a", encoding="utf-8")
            self._file.write(json.dumps(asdict(row), ensure_ascii=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise StorageError(
                f"cannot write the request rows: {self.path}: {error.strerror or error}\n"
                "Free space or rights there, or choose another folder: hydra.run.dir=FOLDER"
            ) from error

    def close(self) -> None:
        """Close the file; harmless when nothing was written."""
        if self._file is not None:
            self._file.close()
            self._file = None
