"""Every logged number is defined, and docs/metrics.md says what the code says."""

from pathlib import Path

import pytest

from specflow.metrics.definitions import DEFINITIONS, PROFILE, PROOF, SWEEP, meaning_of, with_tables
from specflow.tasks.verify import VerifySummary
from specflow.testing.proofs import LawProof
from specflow.testing.statistics import Gate
from specflow.tracking.curves import StepCurves
from tests.report import scenario

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_page_is_made_from_the_definitions() -> None:
    """If this fails: write `with_tables(text)` back to docs/metrics.md."""
    text = PAGE.read_text(encoding="utf-8")
    assert with_tables(text) == text
    assert text.count("<!-- table:") == 5
    for one in DEFINITIONS:
        assert f"| `{one.name}` |" in text


def test_an_unknown_table_of_the_page_is_an_error() -> None:
    with pytest.raises(KeyError):
        with_tables("<!-- table: nonsense -->\n<!-- end of table -->")


def test_every_metric_of_a_benchmark_is_defined() -> None:
    names = scenario.summary(("ngram",)).to_metrics()
    assert len(names) > 80
    assert [name for name in names if meaning_of(name) is None] == []


def test_every_definition_of_a_benchmark_is_logged() -> None:
    logged = {meaning_of(name) for name in scenario.summary(("ngram",)).to_metrics()}
    elsewhere = {*PROOF[1:], *PROFILE, *SWEEP}
    missing = {one.name for one in DEFINITIONS if one not in logged | elsewhere}
    assert missing == {"step_seconds"}  # of curves only


def test_every_curve_is_defined() -> None:
    curves = StepCurves(1)
    curves.start(scenario.series("ngram", 1))
    for record in scenario.steps("ngram", 1, 5):
        curves.add(record)
    names = {point.name for point in curves.take()}
    assert names
    assert [name for name in names if meaning_of(name) is None] == []


def test_every_metric_of_a_proof_is_defined() -> None:
    gate = Gate(3.0, 5, 0.7, 100, 0.01, 0.1, 1e-4)
    law = LawProof({"joint": gate}, 100, 8, 4, 1.0, 0)
    names = VerifySummary("x", laws=(law,)).to_metrics()
    assert len(names) == 4
    assert [name for name in names if meaning_of(name) is None] == []


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("ngram/batch_8/ttft_p99_seconds", "ttft_p{percent}_seconds"),
        ("x/batch_1/acceptance_conditional/position_12", "acceptance_conditional/position_{i}"),
        ("steps/ngram/batch_1/tokens_per_second", "tokens_per_second"),
        ("x/batch_1/decode_tokens_per_second", "decode_tokens_per_second"),
        ("ttft_p51_seconds", None),
        ("x/batch_1/acceptance_conditional/position_x", None),
    ],
)
def test_names_find_their_definition(name: str, found: str | None) -> None:
    one = meaning_of(name)
    assert (one.name if one else None) == found
