"""Which cells to measure, and how many passes over the workload that may take."""

from collections.abc import Sequence
from dataclasses import dataclass

from specflow.tuning.prediction import Cell, corrected

__all__ = ["Budget", "next_cells"]


@dataclass
class Budget:
    """Passes over the workload: those of measuring everything, those allowed, those used."""

    exhaustive: int
    share: float
    used: float = 0.0

    @property
    def left(self) -> int:
        """Passes that may still be made."""
        return int(self.share * self.exhaustive - self.used)

    @property
    def used_share(self) -> float:
        """Of measuring everything."""
        return self.used / self.exhaustive


def next_cells(cells: Sequence[Cell], batch_size: int, most: int, margin: float) -> list[Cell]:
    """At most `most` cells of a batch size that are worth measuring, the most promising first.

    What was measured corrects the rest. A cell is promising when it may be the fastest: predicted within the margin of
    the best, measured or predicted, plain decoding included, which is measured anyway.
    """
    here = [cell for cell in corrected(cells) if cell.batch_size == batch_size and cell.num_speculative_tokens]
    measured = [cell.measured for cell in here if cell.measured is not None]
    plain = [cell.measured or cell.predicted or 0.0 for cell in cells
             if cell.batch_size == batch_size and not cell.num_speculative_tokens]  # fmt: skip
    open_cells = [cell for cell in here if cell.measured is None and cell.reason is None and cell.predicted]
    open_cells.sort(key=lambda cell: -(cell.predicted or 0.0))
    if not open_cells:
        return []
    best = max([*measured, *plain, open_cells[0].predicted or 0.0])
    return [cell for cell in open_cells if (cell.predicted or 0.0) >= (1 - margin) * best][:most]
