"""The benchmark scripts: they run, and what they write is what was measured."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from specflow.metrics.verdict import LosslessVerdict
from specflow.proposers.suffix import SuffixProposer
from specflow.zoo.bundle import model_folder

SCRIPTS = Path(__file__).parents[1] / "benchmarks"
CODE = "def add(first, second):\n    return first + second\n\n\ndef sub"


@pytest.fixture
def model_free(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import model_free

    return model_free


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Invented prompts; the second of humaneval does not fit."""
    folder = tmp_path / "data"
    folder.mkdir()
    humaneval = [{"turns": [text]} for text in (CODE, CODE * 40, "import os\n\nclass Path", "never reached")]
    spec_bench = [
        {"question_id": number, "category": category, "turns": [f"{category} {number}: " + CODE, "and again"]}
        for number, category in enumerate(("writing", "writing", "stem", "qa"))
    ]
    for name, rows in (("humaneval", humaneval), ("spec-bench", spec_bench)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def run(model_free: Any, data: Path, *words: str) -> tuple[int, Path]:
    """Exit code and page of a short run on the bundled target."""
    page = data.parent / "docs" / "page.md"
    fixed = ["--target", str(model_folder("target")), "--name", "little", "--data", str(data), "--output", str(page)]
    sizes = ["--prompts", "2", "--max-tokens", "24", "--max-model-len", "160", "--device", "cpu"]
    return model_free.main([*fixed, *sizes, *words]), page


def test_model_free(model_free: Any, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every method on every group, a second pass for the one that learns, and prompts that were left out."""
    forgot: list[int] = []
    reset = SuffixProposer.reset
    monkeypatch.setattr(SuffixProposer, "reset", lambda one: (forgot.append(len(one.cache.cached)), reset(one)))
    groups = ("--groups", "humaneval", "mt_bench")
    code, page = run(model_free, data, *groups, "--methods", "ngram", "suffix", "--batch-sizes", "1", "2")
    assert code == 0
    assert forgot == [1] * 4  # the warm-up, before each first pass
    text = page.read_text()
    assert re.search(r"\| humaneval \| .*no chat template.* \| 2 \| 2 \| 1 \|", text)
    assert "- target: little, 7,345,408 parameters" in text
    assert "![Mean acceptance length and speed-up by kind of prompt](page.png)" in text
    assert str(data.parent) not in text
    for batch in (1, 2):
        assert f"## Batch {batch}\n" in text
    line = r"^\| (humaneval|spec_bench: mt_bench|\*\*all\*\*) \| suffix \| .* equal \|$"
    assert len(re.findall(line, text, re.M)) == 3 * 2 * 2  # groups, batch sizes, passes
    assert page.with_suffix(".png").read_bytes().startswith(b"\x89PNG")

    content = page.with_suffix(".json").read_text()
    assert str(data.parent) not in content
    rows = json.loads(content)["rows"]
    kinds = [(row["method"], row["memory"]) for row in rows]
    assert kinds == [("plain", "cold"), ("ngram", "cold"), ("suffix", "cold"), ("suffix", "second pass")] * 4
    assert all(row["lossless"].startswith("lossless: verified (2 requests") for row in rows if row["method"] != "plain")
    plain, _, first, second = rows[:4]
    assert plain["tokens_per_step"] == 1
    assert second["tokens_per_step"] > 1.5 * first["tokens_per_step"]
    assert first["speedup"] == pytest.approx(first["tokens_per_second"][0] / plain["tokens_per_second"][0])
    assert first["drafting_us"] > 0


def test_categories_take_turns(model_free: Any, data: Path) -> None:
    """MT-Bench's file has one category after the other; the first two prompts are of two."""
    words = ["--target", str(model_folder("target")), "--data", str(data), "--output", "unused.md", "--prompts", "2"]
    bench = model_free.Bench(model_free.parse([*words, "--groups", "mt_bench", "--methods", "ngram"]))
    assert [prompt.category for prompt in bench.group("mt_bench").prompts] == ["writing", "stem"]


def test_what_cannot_run_is_one_error(model_free: Any, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (("--methods", "sufix"), "Did you mean suffix?"),
        (("--groups", "swe_bench"), "swe-bench.jsonl does not exist"),
        (("--groups", "humaneval", "--methods", "ngram", "--max-tokens", "160"), "no prompt of humaneval fits"),
    ):
        code, page = run(model_free, data, *words)
        assert code == 2
        assert said in " ".join(capsys.readouterr().err.split())
        assert not page.exists()


def test_a_difference_is_loud(model_free: Any) -> None:
    """In the row, in the row of all groups, and for ties by another word."""
    from model_free_page import Group, Row, page

    def row(group: str, method: str, **verdict: Any) -> Row:
        checked = LosslessVerdict(verdict.get("status", "verified"), 2, 8, differences=verdict.get("differences", 0))
        one = Row(
            group, method, 1, speedup=2.0, tokens_per_second=[1.0], output_tokens=8, wall_seconds=4, verdict=checked
        )
        one.acceptance.add(4, 2)
        return one

    rows = [row(group, "plain") for group in ("a", "b")]
    rows += [row("a", "x", status="failed", differences=1), row("b", "x", status="verified_up_to_ties", differences=2)]
    text = page({}, [Group("a", [], 0), Group("b", [], 0)], rows, "p.png")
    assert re.search(r"\| a \| x \| 3\.00 \| 50\.0% .* DIFFERENT \(1 of 2\) \|", text)
    assert re.search(r"\| b \| x \| .* equal but for ties \(2 of 2\) \|", text)
    assert re.search(r"\| \*\*all\*\* \| x \| 3\.00 .* 2\.00 \| 1\.00× \| .* DIFFERENT \(3 of 4\) \|", text)
    assert "Learning" not in text


def test_trained_heads(monkeypatch: pytest.MonkeyPatch, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tables of every file and of all, between the marks and nowhere else; a page without marks stays as it is."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import trained_heads

    page = data.parent / "page.md"
    page.write_text(f"# Mine\n\n{trained_heads.BEGIN}\nold\n{trained_heads.END}\n\nmy words\n")
    head, files = (
        f"dflash={model_folder('dflash')}",
        [str(data / f"{name}.jsonl") for name in ("humaneval", "spec-bench")],
    )
    words = ["--target", str(model_folder("target")), "--head", head, "--files", *files, "--output", str(page)]
    sizes = ["--prompts", "1", "--max-tokens", "16", "--max-model-len", "160", "--device", "cpu"]
    assert trained_heads.main([*words, *sizes]) == 0
    text = page.read_text()
    assert text.startswith("# Mine\n")
    assert text.endswith("\nmy words\n")
    assert "old" not in text
    assert str(data.parent) not in text
    for name in ("humaneval", "spec-bench", r"\*\*all\*\*"):
        assert re.search(rf"^\| {name} \| dflash \| \d\.\d\d \| .* equal \|$", text, re.M)
        assert re.search(rf"^\| {name} \| dflash \|( \d+\.\d% \|){{7}}$", text, re.M)

    page.write_text("no marks\n")
    assert trained_heads.main([*words, *sizes]) == 2
    assert "add them" in " ".join(capsys.readouterr().err.split())
    assert page.read_text() == "no marks\n"


@pytest.mark.slow
def test_engines(llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both engines at batch 1, the other one alone at batch 2: one page, each plain decoding its own baseline."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.chdir(tmp_path)
    import engines

    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "a rose is a rose is a rose"}) + "\n")
    words = ["workload=jsonl", "workload.path=prompts.jsonl", "tracking=none", "target.prove=false"]
    words += ["task.cost_curve=false", "sampling.ignore_eos=true", "scheduler.max_model_len=128", "backend=cpu"]
    sizes = ["--batch-sizes", "1", "2", "--repeats", "2", "--max-tokens", "12"]
    page = tmp_path / "docs" / "page.md"
    fixed = ["--target", str(llama_folder), "--output", str(page), "--engines", "specflow", "transformers"]
    assert engines.main([*fixed, *sizes, *words]) == 0
    lines = [line.strip("| ").split(" | ") for line in page.read_text().splitlines() if line.startswith("| ")]
    table = {(int(line[0]), line[1], line[2]): line[3:] for line in lines if line[0].isdigit()}
    assert list(table) == [
        (1, "specflow", "plain"), (1, "specflow", "ngram"), (1, "transformers", "plain"), (1, "transformers", "ngram"),
        (2, "specflow", "plain"), (2, "specflow", "ngram"),
    ]  # fmt: skip
    assert table[1, "specflow", "plain"][2] == table[1, "transformers", "plain"][2] == "1.00×"
    assert table[1, "transformers", "ngram"][-1] == table[1, "transformers", "plain"][-1] == "equal"
    assert "- transformers " in page.read_text()


@pytest.mark.slow
def test_adaptive_length(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every kind of work for every runner, and verdicts by the interval."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import adaptive_length

    output = tmp_path / "out.json"
    words = ["--methods", "ngram", "--lengths", "1", "3", "--rounds", "2", "--prompts", "2", "--max-tokens", "4"]
    assert adaptive_length.main([*words, "--output", str(output)]) in (0, 1)
    works = json.loads(output.read_text())["methods"]["ngram"]
    assert set(works) == {"alone", "busy", "changing"}
    for found in works.values():
        assert set(found["tokens_per_second"]) == {"plain", "K=0", "K=1", "K=3", "adaptive"}
        assert all(len(values) == 2 and min(values) > 0 for values in found["tokens_per_second"].values())
        assert found["best"].startswith("K=")

    speeds = {"plain": [90.0] * 5, "K=3": [100.0, 100, 101, 99, 100], "adaptive": [98.0, 98, 98, 98, 98]}
    found = adaptive_length.compare(speeds)
    assert (found["best"], round(found["ratio"], 2)) == ("K=3", 0.98)
    for work, ratios, said in (
        ("alone", (0.98, 0.99), "holds"), ("alone", (0.90, 0.96), "refuted"),
        ("alone", (0.96, 0.99), "within the noise"),
        ("changing", (1.01, 1.2), "holds"), ("changing", (0.97, 0.99), "refuted"),
    ):  # fmt: skip
        assert adaptive_length.verdict(work, {"low": ratios[0], "high": ratios[1]}) == said


@pytest.mark.slow
def test_tune_against_sweep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every cell in every round; a share of passes that is too large fails."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import tune_against_sweep

    output = tmp_path / "out.json"
    words = ["--methods", "ngram", "--lengths", "1", "3", "--batch-sizes", "1", "--repeats", "2", "--limit", "1"]
    assert tune_against_sweep.main([*words, "--max-tokens", "4", "--output", str(output)]) == 1
    record = json.loads(output.read_text())
    assert set(record["sweep"]["1"]) == {"plain", "ngram K=1", "ngram K=3"}
    assert all(len(values) == 2 for values in record["sweep"]["1"].values())
    assert record["passes"]["share"] > 0.2  # three cells are too few to save anything

    speeds = {("plain", 0): [50.0, 52.0, 51.0], ("a", 3): [100.0, 104.0, 102.0], ("b", 5): [99.0, 101.0, 100.0]}
    found = tune_against_sweep.compare(speeds, ("b", 5))
    assert found["best"] == "a K=3"
    assert found["ratio"] == pytest.approx(100 / 102)
    assert found["low"] <= found["ratio"] <= found["high"] < 1
