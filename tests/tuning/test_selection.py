"""Which cells are measured."""

from dataclasses import replace

import pytest

from specflow.tuning.prediction import Cell
from specflow.tuning.selection import Budget, next_cells
from specflow.tuning.summary import TuneSummary, recommend

PLAIN = Cell("plain", 0, 1, 100.0, 1.0)
CELLS = [
    PLAIN,
    Cell("a", 1, 1, 120.0, 1.5),
    Cell("a", 3, 1, 150.0, 2.0),
    Cell("b", 3, 1, 140.0, 1.9),
    Cell("b", 5, 1, 125.0, 2.0),
    Cell("a", 3, 8, 900.0, 2.0),
]


def labels(cells: list[Cell]) -> list[str]:
    return [cell.label for cell in cells]


def test_the_most_promising_within_the_margin() -> None:
    assert labels(next_cells(CELLS, 1, 3, 0.2)) == ["a K=3", "b K=3", "b K=5"]
    assert labels(next_cells(CELLS, 1, 9, 0.1)) == ["a K=3", "b K=3"]
    assert labels(next_cells(CELLS, 8, 3, 0.2)) == ["a K=3"]


def test_nothing_that_plain_decoding_beats() -> None:
    fast = [replace(PLAIN, measured=400.0), *CELLS[1:]]
    assert next_cells(fast, 1, 3, 0.2) == []


def test_what_was_measured_corrects_the_rest() -> None:
    """a turned out slower than predicted, so b and not another length of a comes next; then nothing is left."""
    cells = [PLAIN, CELLS[1], replace(CELLS[2], measured=110.0), *CELLS[3:]]
    assert labels(next_cells(cells, 1, 1, 0.2)) == ["b K=3"]
    cells[3] = replace(cells[3], measured=150.0)
    assert labels(next_cells(cells, 1, 3, 0.2)) == ["b K=5"]
    assert next_cells(cells, 1, 3, 0.1) == []


def test_what_failed_is_not_tried_again() -> None:
    cells = [PLAIN, CELLS[1], replace(CELLS[2], reason="not lossless")]
    assert labels(next_cells(cells, 1, 3, 0.5)) == ["a K=1"]


def test_the_budget() -> None:
    budget = Budget(exhaustive=100, share=0.2, used=3.5)
    assert budget.left == 16
    assert budget.used_share == pytest.approx(0.035)


def test_the_greatest_speed_up_is_recommended_and_plain_decoding_when_there_is_none() -> None:
    plain = replace(PLAIN, measured=100.0, measured_range=(98.0, 102.0), speedup=1.0)
    slow = replace(CELLS[1], measured=99.0, measured_range=(97.0, 101.0), speedup=0.99)
    fast = replace(CELLS[2], measured=130.0, measured_range=(95.0, 131.0), speedup=1.3)
    none = recommend([plain, slow, CELLS[3]], 1)
    assert not none.speculate
    assert none.sentence() == (
        "batch 1: do not speculate: plain decoding is the fastest, 100 tokens/s; within the repeats' noise of it: a K=1"
    )
    some = recommend([plain, slow, fast], 1)
    assert some.best is fast
    assert labels(list(some.close)) == ["plain", "a K=1"]
    assert some.sentence().startswith("batch 1: a K=3, 130 tokens/s (predicted 150), 1.30× plain decoding; within")


def test_the_summary_as_data() -> None:
    plain = replace(PLAIN, measured=100.0, speedup=1.0)
    fast = replace(CELLS[2], measured=130.0, measured_range=(95.0, 131.0), speedup=1.3)
    cells = [plain, CELLS[1], fast]
    summary = TuneSummary("t", cells, [recommend(cells, 1)], {"a K=3, batch 1": (0.5,)}, {}, {"c": "why"}, 50, 8.5, {})
    assert summary.to_metrics() == pytest.approx(
        {
            "recommended/batch_1/speedup": 1.3,
            "recommended/batch_1/tokens_per_second": 130.0,
            "recommended/batch_1/predicted_tokens_per_second": 150.0,
            "recommended/batch_1/num_speculative_tokens": 3.0,
            "prediction_error": 150 / 130 - 1,
            "passes": 8.5,
            "passes_of_exhaustive": 0.17,
        }
    )
    data = summary.to_dict()
    assert data["recommendations"][0]["method"] == "a"
    assert data["unusable"] == {"c": "why"}
    lines = summary.to_csv().splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("method,num_speculative_tokens,batch_size,predicted,")
    assert lines[3].endswith(",95.0,131.0")
