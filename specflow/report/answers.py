"""What a table of results says: which method at which length, or none at all."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from specflow.report import wording
from specflow.report.rows import Condition, ResultRow

__all__ = ["Answer", "answers_of", "slower_than_plain"]


@dataclass(frozen=True)
class Answer:
    """The fastest row of one condition at one batch size."""

    condition: Condition
    batch_size: int
    best: ResultRow
    plain: ResultRow | None
    close: tuple[ResultRow, ...]  # rows whose fastest repeat is at least as fast as the best row's slowest

    @property
    def speculate(self) -> bool:
        """False when plain decoding is the fastest: an answer like any other."""
        return not self.best.is_plain

    def sentence(self) -> str:
        """The answer in words."""
        speed = f"{wording.count(self.best.tokens_per_second)} tokens/s"
        if not self.speculate:
            return f"do not speculate: plain decoding is the fastest, {speed}{self._close()}"
        gain = "" if self.best.speedup is None else f", {wording.times(self.best.speedup)} plain decoding"
        found = self.best.speedup_range
        spread = f" ({found[0]:.2f}–{found[1]:.2f} between repeats)" if found else ""
        return f"{self.best.label}, {speed}{gain}{spread}{self._close()}"

    def _close(self) -> str:
        if not self.close:
            return ""
        labels = list(dict.fromkeys(row.label for row in self.close))
        named = ", ".join(labels[:3])
        more = f" and {len(labels) - 3} more" if len(labels) > 3 else ""
        return f"; within the repeats' noise of it: {named}{more}"


def answers_of(rows: Sequence[ResultRow]) -> list[Answer]:
    """One answer per condition and batch size. A row from a sampler that may change the output is never the best."""
    return list(_answers(sorted(rows, key=lambda row: (row.condition, row.batch_size))))


def _answers(rows: Sequence[ResultRow]) -> Iterator[Answer]:
    for (condition, batch_size), group in groupby(rows, key=lambda row: (row.condition, row.batch_size)):
        fair = [row for row in group if row.tokens_per_second is not None and _keeps_output(row)]
        if fair:
            best = max(fair, key=_speed)
            close = [row for row in fair if row is not best and _overlaps(row, best)]
            plain = max((row for row in fair if row.is_plain), key=_speed, default=None)
            yield Answer(condition, batch_size, best, plain, tuple(sorted(close, key=_speed, reverse=True)))


def slower_than_plain(rows: Sequence[ResultRow]) -> list[ResultRow]:
    """Rows that lose against plain decoding at their batch size, the worst first."""
    return sorted(
        (row for row in rows if row.speedup is not None and row.speedup < 1), key=lambda row: row.speedup or 0
    )


def _keeps_output(row: ResultRow) -> bool:
    return not row.lossy and row.lossless != "failed"


def _speed(row: ResultRow) -> float:
    return row.tokens_per_second or 0.0


def _overlaps(row: ResultRow, best: ResultRow) -> bool:
    return row.range is not None and best.range is not None and row.range[1] >= best.range[0]
