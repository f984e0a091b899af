"""Two runs side by side: settings, facts, numbers and their noise."""

import io
import json
import shutil
from dataclasses import replace
from math import comb
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from specflow.report.comparison import Comparison, Quantity, chance_of_disjoint, compare
from specflow.report.comparison_view import render_comparison
from specflow.report.records import RunRecord, read_record
from tests.report import runs, scenario


def record(tmp_path: Path, name: str, config: dict[str, Any], factor: float = 1.0) -> RunRecord:
    summary = runs.faster(scenario.summary((config["proposer"]["name"],)), factor)
    return read_record(runs.write_run(tmp_path / name, config, summary))


def printed(comparison: Comparison) -> str:
    console = Console(width=100, file=io.StringIO())
    render_comparison(comparison, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_only_what_differs_is_listed(tmp_path: Path) -> None:
    first = record(tmp_path, "a", runs.config("ngram", 3, tracking={"name": "mlflow"}))
    second = record(tmp_path, "b", runs.config("ngram", 5, seed=1, sweep={"resume": True}))
    second = replace(second, facts={**second.facts, "torch": "2.14.0", "overrides": "x"})
    found = compare(first, second)
    assert {one.name: (one.first, one.second) for one in found.settings} == {
        "proposer.num_speculative_tokens": ("3", "5"),
        "seed": ("0", "1"),
    }
    assert {one.name: (one.first, one.second) for one in found.ran} == {"torch": ("2.13.0", "2.14.0")}


def test_equal_runs_are_the_same(tmp_path: Path) -> None:
    first = record(tmp_path, "a", runs.config("ngram"))
    found = compare(first, first)
    assert not found.settings
    assert not found.ran
    assert {one.verdict for one in found.quantities} == {"same"}
    assert "asked for differently: nothing" in printed(found)


def test_a_difference_is_more_than_the_noise(tmp_path: Path) -> None:
    """The repeats of the made-up runs lie 4 % apart: 2 % more is noise, 20 % more is not."""
    first = record(tmp_path, "a", runs.config("ngram"))
    for factor, verdict in ((1.02, "within noise"), (1.2, "differs")):
        found = compare(first, record(tmp_path, f"b{factor}", runs.config("ngram"), factor))
        speeds = {one.series: one for one in found.quantities if one.name == "throughput"}
        assert speeds["plain, batch 1"].verdict == "same"
        assert speeds["ngram, batch 1"].verdict == verdict
        assert speeds["ngram, batch 1"].ratio == pytest.approx(factor)
        gains = [one for one in found.quantities if one.name == "speed-up"]
        assert [one.series for one in gains] == ["ngram, batch 1", "ngram, batch 8"]
        assert gains[0].ratio == pytest.approx(factor)
        assert any("3 and 3 repeats" in note and "10 %" in note for note in found.notes)


def test_methods_of_two_names_are_paired_by_batch_size(tmp_path: Path) -> None:
    found = compare(record(tmp_path, "a", runs.config("ngram")), record(tmp_path, "b", runs.config("suffix")))
    assert {one.series for one in found.quantities} == {
        "plain, batch 1", "ngram / suffix, batch 1", "plain, batch 8", "ngram / suffix, batch 8"
    }  # fmt: skip
    text = printed(found)
    assert max(map(len, text.splitlines())) <= 100
    assert "  acceptance length  " in text


def quantity(first: tuple[float, ...], second: tuple[float, ...]) -> Quantity:
    return Quantity("plain, batch 1", "throughput", "tokens/s", first, second)


@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [
        ((1, 2, 3), (4, 5, 6), "differs"),
        ((4, 5, 6), (1, 2, 3), "differs"),
        ((1, 2, 3), (3, 4, 5), "within noise"),
        ((2, 2, 2), (2, 2), "same"),
        ((1,), (2,), "one repeat"),
        ((1,), (1,), "same"),
        ((1, 2), (3,), "one repeat"),
    ],
)
def test_verdicts(first: tuple[float, ...], second: tuple[float, ...], verdict: str) -> None:
    assert quantity(first, second).verdict == verdict


def test_ratios_have_bounds() -> None:
    one = quantity((10, 11, 12), (20, 22, 33))
    assert one.ratio == 2
    assert one.ratio_range == (20 / 12, 33 / 10)
    assert quantity((0, 1), (1, 2)).ratio_range is None
    assert quantity((0, 0), (1, 2)).ratio is None


@pytest.mark.parametrize(("ours", "theirs"), [(3, 3), (2, 4), (1, 1)])
def test_the_chance_of_a_false_difference(ours: int, theirs: int) -> None:
    """Of all orders of the values, those with all of one run first."""
    from itertools import combinations

    places = list(combinations(range(ours + theirs), ours))
    apart = [chosen for chosen in places if chosen in (tuple(range(ours)), tuple(range(theirs, ours + theirs)))]
    assert len(places) == comb(ours + theirs, ours)
    assert chance_of_disjoint(ours, theirs) == pytest.approx(len(apart) / len(places))


def test_another_machine_is_said(tmp_path: Path) -> None:
    first = record(tmp_path, "a", runs.config("ngram"))
    summary = json.loads(json.dumps(first.summary))
    for series in summary["series"]:
        for repeat in series["repeats"]:
            repeat["tokens_per_second"] *= 2
    found = compare(first, replace(first, summary=summary))
    assert any("plain decoding itself differs (2.00×)" in note for note in found.notes)


def test_output_tokens_are_compared(tmp_path: Path) -> None:
    first = record(tmp_path, "a", runs.config("ngram"))
    rows = [vars(scenario.row("ngram", 1, number)) for number in range(4)]
    (tmp_path / "a" / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    rows[2]["token_ids"] = [1, 2, 3]
    (tmp_path / "b" / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    notes = compare(first, read_record(tmp_path / "b")).notes
    assert "output tokens: equal in 3 of 4 requests that both runs have" in notes


def test_a_run_without_results_is_said(tmp_path: Path) -> None:
    first = record(tmp_path, "a", runs.config("ngram"))
    failed = read_record(runs.write_run(tmp_path / "b", runs.config("eagle3"), status="failed", reason="no head"))
    found = compare(first, failed)
    assert not found.quantities
    assert any(note.endswith("failed: no head") for note in found.notes)
    assert any("no summary.json" in note for note in found.notes)
    assert json.dumps(found.to_dict())
