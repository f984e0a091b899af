"""Plots, page, table and files of many runs."""

import io
import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from specflow.errors import StorageError
from specflow.report.figure import png_width, spread
from specflow.report.overview import Overview, write_overview
from specflow.report.overview_table import render_overview
from specflow.report.records import read_record, run_folders
from specflow.report.sweep_plots import PLOTS, _front
from tests.report import runs
from tests.report.test_rows import row


@pytest.fixture(scope="module")
def overview(tmp_path_factory: pytest.TempPathFactory) -> Overview:
    folder = runs.write_sweep(tmp_path_factory.mktemp("sweep"))
    return Overview("Sweep of 5 runs", [read_record(one) for one in run_folders(folder)], "python -m specflow -m …")


def html_of(overview: Overview, folder: Path) -> str:
    return write_overview(overview, folder).read_text(encoding="utf-8")


# -- plots ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", PLOTS)
@pytest.mark.parametrize("dark", [False, True])
def test_every_plot_is_a_picture(overview: Overview, name: str, dark: bool) -> None:
    picture = PLOTS[name][1](overview.rows, dark)
    assert picture is not None
    assert picture.startswith(b"\x89PNG")
    assert 1000 < png_width(picture) < 3200


def test_no_plot_of_what_was_not_measured(overview: Overview) -> None:
    plain = [one for one in overview.rows if one.is_plain]
    drawn = {name for name, (_, plot) in PLOTS.items() if plot(plain, False)}
    assert drawn == {"latency_and_throughput.png"}
    assert all(plot([], False) is None for _, plot in PLOTS.values())
    one_batch = [one for one in overview.rows if one.batch_size == 1]
    assert PLOTS["speedup_by_batch.png"][1](one_batch, False) is None


def test_many_methods_and_conditions_can_be_drawn() -> None:
    rows = [
        row(f"method_{index}", length, 100 + index, batch)
        for index in range(9)
        for length in (1, 2)
        for batch in (1, 2)
    ]
    for _, plot in PLOTS.values():
        assert plot([replace(one, tpot_p50=0.01, acceptance_unconditional=(0.5, 0.2)) for one in rows], False)


def test_the_front_is_what_nothing_beats_in_both() -> None:
    def point(latency: float, speed: float) -> object:
        return replace(row("a", 3, speed), tpot_p50=latency)

    rows = [point(1, 10), point(2, 30), point(2, 20), point(3, 25), point(4, 40)]
    assert [one.tpot_p50 for one in _front(rows)] == [1, 2, 4]  # type: ignore[arg-type]


@pytest.mark.parametrize("wanted", [[5, 5, 5], [0, 0.5, 9.9, 10], [10, 10], [3], [], [9, 1, 9.5, 1.2]])
def test_labels_keep_apart(wanted: list[float]) -> None:
    places = spread(wanted, 1.0, 0.0, 10.0)
    ordered = sorted(places)
    assert all(later - earlier >= 1 - 1e-9 for earlier, later in pairwise(ordered))
    assert all(-1e-9 <= place <= 10 for place in places)
    assert [places.index(place) for place in sorted(places)] == sorted(range(len(wanted)), key=lambda i: (wanted[i], i))


# -- page and table ------------------------------------------------------------------------------------------------
def test_page_is_self_contained(overview: Overview, tmp_path: Path) -> None:
    html = html_of(overview, tmp_path)
    loaded = re.findall(r"\b(?:src|href|srcset|data|action)\s*=\s*[\"']?([^\"'>\s]+)", html)
    assert len(loaded) == 2 * len(PLOTS)
    assert all(address.startswith("data:image/png;base64,") for address in loaded)
    assert not re.search(r"<script|<link|<iframe|@import|url\(", html)


def test_page_says_the_answer_what_failed_and_what_ran(overview: Overview, tmp_path: Path) -> None:
    html = html_of(overview, tmp_path)
    assert "suffix K=5" in html[html.index("The answer") : html.index("All results")]
    assert "1 without a result:</b> no head is bundled.\nTrain one." in html
    assert "name=eagle3 num_speculative_tokens=3" in html
    assert "float32" in html[html.index("What really ran") :]
    assert "0123456789abcdef" in html
    assert html.count("the baseline") == 2


def test_warnings_stand_beside_the_numbers(overview: Overview) -> None:
    first, *others = overview.rows
    changed = replace(
        others[0], lossless="failed", speedup=0.9, tokens_per_second_repeats=(50.0, 100.0), method="broken"
    )
    lossy = replace(others[1], lossy=True, method="typical")
    warned = " ".join(
        replace(overview, records=(), more_rows=[first, changed, lossy], notes=["mind the gap"]).warnings()
    )
    assert "output differs from plain decoding: broken K=3, batch 1" in warned
    assert "lossy by design, so never the answer: typical K=5" in warned
    assert "slower than plain: broken K=3, batch 1 (0.90×)" in warned
    assert "more than 1.3×): broken K=3" in warned
    assert "mind the gap" in warned


def test_jobs_that_shared_a_machine_are_said(overview: Overview) -> None:
    def job(host: str, started: float, finished: float) -> dict[str, object]:
        return {"host": host, "started": started, "finished": finished}

    def warned(*jobs: dict[str, object]) -> list[str]:
        records = [replace(overview.records[0], job=one) for one in jobs]
        return [text for text in Overview("x", records).warnings() if "at the same time" in text]

    assert warned(job("a", 0, 10), job("a", 10, 20), job("b", 5, 15)) == []
    assert warned(job("a", 0, 10), job("a", 9, 20)) == ["jobs ran at the same time on a: they slowed each other down"]


def test_table_fits_and_ends_with_the_answer(overview: Overview) -> None:
    """C71: K=0 at every batch size, the best K named."""
    console = Console(width=100, file=io.StringIO())
    render_overview(overview, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= 100
    assert re.search(r"plain +0 +1 +\d+ +\d+–\d+ +1\.00×", text)
    assert re.search(r"plain +0 +8 ", text)
    assert re.search(r"\nbatch 1: suffix K=5, \d+ tokens/s, [\d.]+× plain decoding", text)
    assert re.search(r"\nbatch 8: suffix K=5", text)
    assert "1 without a result: no head is bundled." in text


def test_slower_is_said_in_the_table() -> None:
    """C71."""
    console = Console(width=100, file=io.StringIO())
    render_overview(Overview("x", (), more_rows=[row("plain", 0, 100), row("ngram", 3, 80)]), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "slower than plain: ngram K=3, batch 1 (0.80×)" in text
    assert "batch 1: do not speculate: plain decoding is the fastest, 100 tokens/s" in text


def test_files(overview: Overview, tmp_path: Path) -> None:
    write_overview(overview, tmp_path / "new" / "report")
    names = {file.name for file in (tmp_path / "new" / "report").iterdir()}
    assert names == {*PLOTS, "results.html", "results.csv", "results.json"}
    data = json.loads((tmp_path / "new" / "report" / "results.json").read_text())
    assert [one["best"] for one in data["answers"]] == ["suffix K=5", "suffix K=5"]
    assert [one["status"] for one in data["runs"]] == ["finished"] * 4 + ["failed"]
    assert data["rows"][1]["condition"]["workload"] == "bundled"


def test_a_smaller_report_leaves_no_plot_of_a_larger_one(overview: Overview, tmp_path: Path) -> None:
    write_overview(overview, tmp_path)
    write_overview(replace(overview, records=overview.records[-1:]), tmp_path)
    assert not set(PLOTS) & {file.name for file in tmp_path.iterdir()}


def test_a_folder_that_cannot_be_written(overview: Overview, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write the report"):
        write_overview(overview, tmp_path / "file" / "report")
