"""Table, plots, page, progress and the listener that writes them."""

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from specflow.errors import StorageError
from specflow.metrics.acceptance import AcceptanceCounts
from specflow.metrics.summary import BenchSummary
from specflow.report import progress as progress_module
from specflow.report import wording
from specflow.report.html import Page, render_page
from specflow.report.listener import ReportWriter
from specflow.report.plots import acceptance_plot, throughput_plot
from specflow.report.progress import ProgressDisplay
from specflow.report.table import render_summary
from specflow.tracking.events import RunFinished
from tests.report import scenario


@pytest.fixture(scope="module")
def summary() -> BenchSummary:
    return scenario.summary()


def printed(summary: BenchSummary, width: int = 100) -> str:
    console = Console(width=width, file=io.StringIO())
    render_summary(summary, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def without_drafts(summary: BenchSummary) -> BenchSummary:
    """The same run by a proposer that never had anything to propose."""
    ngram = replace(summary.series[1], acceptance=AcceptanceCounts(), macro_acceptance_rate=None, speedup=0.9)
    return replace(summary, series=[summary.series[0], ngram])


# -- table ---------------------------------------------------------------------------------------------------------
def test_table(summary: BenchSummary) -> None:
    text = printed(summary)
    assert max(map(len, text.splitlines())) <= 100
    assert re.search(r"ngram +8 +\d+ +1\.\d\d× +\d\d\.\d% +2\.\d\d +15/75/10 +16\.5 +7\.00 / 7\.00 +310 MiB", text)
    assert "lossless: verified (24 requests, 3072 tokens equal to plain decoding)" in text
    assert re.search(r"ngram per position: conditional \d\d \d\d \d\d \d\d · unconditional", text)
    assert "cost of verifying N tokens, against one: 1: 1.00×" in text
    assert re.search(r"target +model bundled", text)
    assert "slower than plain" not in text
    assert "LOSSY" not in text


def test_lossy_is_said_everywhere() -> None:
    lossy = scenario.summary(("draft_model",), lossy=True)
    text = printed(lossy)
    assert text.count("LOSSY") == 1 + 2
    assert "not checked (the sampler is lossy)" in text
    assert render_page(Page(lossy)).count(">LOSSY<") == 1 + 2


def test_slower_than_plain_and_nothing_drafted(summary: BenchSummary) -> None:
    """C71 and C07."""
    text = printed(without_drafts(summary))
    assert "ngram, batch 1: slower than plain (0.90×)" in text
    assert re.search(r"ngram +1 +\d+ +0\.90× +n/a +n/a", text)
    assert "nan" not in text.lower().replace("ngram", "")


def test_unsteady_machine_is_said(summary: BenchSummary) -> None:
    first = summary.series[0]
    slow = replace(first.repeats[0], tokens_per_second=1.0)
    text = printed(replace(summary, series=[replace(first, repeats=(slow, *first.repeats[1:])), *summary.series[1:]]))
    assert re.search(r"plain, batch 1: repeats between 1\.00–\d+ tokens/s; the machine was not steady", text)
    assert "not steady" not in printed(summary)


def test_what_a_proposer_learns_between_repeats_is_shown(summary: BenchSummary) -> None:
    """The mean acceptance length of each repeat, where they differ."""
    assert "by repeat" not in printed(summary)
    plain, ngram = summary.series[:2]
    better = replace(ngram.repeats[2], acceptance=AcceptanceCounts())
    better.acceptance.add_all((4, 4), (4, 3))
    learnt = replace(summary, series=[plain, replace(ngram, repeats=(*ngram.repeats[:2], better))])
    first = f"{ngram.acceptance.mean_acceptance_length:.2f}"
    assert f"ngram, batch 1: acceptance length by repeat {first} · {first} · 4.50" in printed(learnt)
    assert f"Length by repeat, batch 1: {first} · {first} · 4.50" in render_page(Page(learnt))
    repeats = learnt.to_dict()["series"][1]["repeats"]
    assert [round(one["acceptance"]["mean_acceptance_length"], 2) for one in repeats[1:]] == [float(first), 4.5]


def test_narrow_terminal_keeps_numbers_whole(summary: BenchSummary) -> None:
    text = printed(summary, 80)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text


@pytest.mark.parametrize(
    ("value", "text"), [(None, "n/a"), (0.123, "0.12"), (12.34, "12.3"), (1234.5, "1234"), (123456.0, "123 456")]
)
def test_counts(value: float | None, text: str) -> None:
    assert wording.count(value) == text


# -- plots and page ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("plot", [acceptance_plot, throughput_plot])
def test_plots_are_pictures(plot, summary: BenchSummary) -> None:
    for dark in (False, True):
        assert plot(summary, dark).startswith(b"\x89PNG")


def test_no_plot_of_nothing(summary: BenchSummary) -> None:
    assert acceptance_plot(without_drafts(summary)) is None
    assert throughput_plot(replace(summary, series=[])) is None


def test_page_is_self_contained(summary: BenchSummary, tmp_path: Path) -> None:
    rows = tmp_path / "requests.jsonl"
    row = json.dumps(vars(replace(scenario.row("ngram", 1), text="<script>alert('http://x')</script>")))
    rows.write_text(row + "\n")
    html = render_page(Page(summary, {"tracking": {"uri": "http://server"}}, scenario.FACTS, rows))
    loaded = re.findall(r"\b(?:src|href|srcset|data|action)\s*=\s*[\"']?([^\"'>\s]+)", html)
    assert len(loaded) == 4
    assert all(address.startswith("data:image/png;base64,") for address in loaded)
    assert not re.search(r"<script|<link|<iframe|@import|url\(", html)
    assert "lossless: verified" in html
    assert "0123456789abcdef" in html
    assert "5f0c" * 16 in html
    assert "uri: http://server" in html
    assert "heapq-0" in html
    assert html.count("data:image/png;base64,") == 4


def test_page_of_a_poor_run(summary: BenchSummary) -> None:
    """Without config, rows, cost curve, facts or drafts."""
    poor = replace(without_drafts(summary), cost_curve=None, really_ran={}, workload={}, notes=["17 ids were invalid"])
    html = render_page(Page(poor))
    assert "n/a" in html
    assert "slower than plain" in html
    assert "17 ids were invalid" in html
    assert "Cost of verifying" not in html


# -- listener ------------------------------------------------------------------------------------------------------
def test_record_of_a_run_is_complete(tmp_path: Path) -> None:
    """C66: everything needed to repeat the run and compare it with another."""
    console = Console(width=100, file=io.StringIO())
    for _ in scenario.play(ReportWriter(console), tmp_path):
        pass
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {
        "acceptance.png", "config.yaml", "metrics.prom", "report.html", "requests.jsonl", "run.json", "summary.json",
        "throughput.png",
    }  # fmt: skip
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["status"] == "finished"
    assert (run["warmup_series"], run["warmup_requests"]) == (1, 4)
    assert {"torch", "transformers", "python", "specflow", "commit", "commit dirty"} <= set(run["facts"])
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["really_ran"]["backend"] == {"device": "cpu", "threads": "2"}
    assert summary["really_ran"]["target"]["dtype"] == "float32"
    assert summary["workload"]["sha256"]
    assert summary["workload"]["prompts"] == "4 of 16"
    assert "num_speculative_tokens: 4" in (tmp_path / "config.yaml").read_text()
    served = 'vllm:request_success_total{model_name="bundled",engine="0",method="ngram",batch_size="1",'
    assert f'{served}finished_reason="length"}} 12' in (tmp_path / "metrics.prom").read_text()
    rows = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert len(rows) == 24  # two methods, three repeats, four requests; the warm-up is no result
    assert {"token_ids", "accepted", "text"} <= set(rows[0])
    assert "report: report.html" in console.file.getvalue()  # type: ignore[attr-defined]


def test_interrupted_run_keeps_its_rows(tmp_path: Path) -> None:
    writer = ReportWriter(Console(file=io.StringIO()))
    parts = scenario.play(writer, tmp_path)
    for _ in range(3):
        next(parts)
    writer.specflow_run_finished(RunFinished("killed", "interrupted"))
    assert len((tmp_path / "requests.jsonl").read_text().splitlines()) == 4
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "killed"
    assert not (tmp_path / "report.html").exists()


def test_report_that_cannot_be_written(tmp_path: Path, summary: BenchSummary) -> None:
    writer = ReportWriter(Console(file=io.StringIO()))
    writer.specflow_run_started(scenario.started(tmp_path))
    (tmp_path / "summary.json").mkdir()
    with pytest.raises(StorageError, match=r"cannot write the report: .*summary\.json"):
        writer.specflow_run_finished(RunFinished("finished", summary=summary))
    assert not list(tmp_path.glob(".*partial"))


# -- progress ------------------------------------------------------------------------------------------------------
def shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, terminal: bool, quiet: float) -> str:
    monkeypatch.setattr(progress_module, "_QUIET_SECONDS", quiet)
    monkeypatch.setattr(progress_module, "_REFRESH_SECONDS", 0.0)
    console = Console(width=100, file=io.StringIO(), force_terminal=terminal)
    for _ in scenario.play(ProgressDisplay(console), tmp_path):
        pass
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = shown(monkeypatch, tmp_path, terminal=True, quiet=0.0)
    assert "ngram, batch 1" in text
    assert "accepted" in text


def test_progress_elsewhere_is_a_line_per_series(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines = shown(monkeypatch, tmp_path, terminal=False, quiet=0.0).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["plain, batch 1", "ngram, batch 1"]
    assert re.fullmatch(r"ngram, batch 1: \d+ tok/s · \d\d\.\d% accepted", lines[1])


@pytest.mark.parametrize("terminal", [True, False])
def test_short_runs_show_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, terminal: bool) -> None:
    assert shown(monkeypatch, tmp_path, terminal, quiet=60.0) == ""
