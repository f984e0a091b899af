"""Runs read back from folders, the rows they make, and the answer the rows give."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from specflow.errors import StorageError
from specflow.report.answers import answers_of, slower_than_plain
from specflow.report.records import read_record, run_folders
from specflow.report.rows import Condition, ResultRow, csv_text, rows_of
from tests.report import runs, scenario


def read(folder: Path) -> list[ResultRow]:
    return rows_of([read_record(one) for one in run_folders(folder)])


def row(method: str, length: int, speed: float, batch: int = 1, noise: float = 0.01, **more: object) -> ResultRow:
    repeats = (speed * (1 - noise), speed, speed * (1 + noise))
    return ResultRow(
        run="r", method=method, num_speculative_tokens=length, batch_size=batch,
        condition=Condition("bundled", "bundled", "cpu"), tokens_per_second=speed,
        tokens_per_second_repeats=repeats, speedup=speed / 100, **more,  # type: ignore[arg-type]
    )  # fmt: skip


# -- records -------------------------------------------------------------------------------------------------------
def test_a_sweeps_folder_gives_its_jobs_by_number(tmp_path: Path) -> None:
    for number in (10, 2, 1):
        runs.write_run(tmp_path / f"{number}-ngram", runs.config("ngram"))
    assert [folder.name for folder in run_folders(tmp_path)] == ["1-ngram", "2-ngram", "10-ngram"]
    assert run_folders(tmp_path / "2-ngram") == [tmp_path / "2-ngram"]


def test_a_failure_after_the_end_of_the_run_counts(tmp_path: Path) -> None:
    job = {"status": "failed", "reason": "objective=x: the run has no such metric"}
    record = read_record(runs.write_run(tmp_path / "0-ngram", runs.config("ngram"), job=job))
    assert (record.status, record.reason) == ("failed", job["reason"])


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    folder = runs.write_run(tmp_path / "run", runs.config("ngram"))
    (folder / "summary.json").write_text(text)
    with pytest.raises(StorageError, match=r"summary\.json cannot be read"):
        read_record(folder)
    with pytest.raises(StorageError, match="holds no run"):
        read_record(tmp_path)


# -- rows ----------------------------------------------------------------------------------------------------------
def test_rows_of_a_sweep(tmp_path: Path) -> None:
    """Plain decoding that the jobs share is one row per batch size: K=0 at every batch size (C71)."""
    rows = read(runs.write_sweep(tmp_path))
    assert [(one.batch_size, one.method, one.num_speculative_tokens) for one in rows] == [
        (batch, method, length)
        for batch in (1, 8)
        for method, length in (("plain", 0), ("ngram", 3), ("ngram", 5), ("suffix", 3), ("suffix", 5))
    ]
    assert [one.speedup for one in rows if one.is_plain] == [1.0, 1.0]
    ngram = rows[1]
    assert ngram.label == "ngram K=3"
    assert ngram.condition == Condition("bundled", "bundled", "auto")
    assert ngram.speedup_range is not None
    assert ngram.speedup_range[0] < (ngram.speedup or 0) < ngram.speedup_range[1]
    assert len(ngram.acceptance_unconditional) == 4
    assert ngram.lossless == "verified"


def test_what_differs_has_its_place(tmp_path: Path) -> None:
    """Options of the method make a line of their own, everything else a condition with a baseline of its own."""
    summary = scenario.summary(("ngram",), (1,))
    wide = runs.config("ngram", proposer={"prompt_lookup_max": 5})
    runs.write_run(tmp_path / "0-a", wide, summary)
    runs.write_run(tmp_path / "1-b", runs.config("ngram", proposer={"prompt_lookup_max": 3}), summary)
    runs.write_run(tmp_path / "2-c", {**wide, "sampling": {"temperature": 0.8, "max_tokens": 16}}, summary)
    runs.write_run(tmp_path / "3-d", {**wide, "workload": {"name": "jsonl", "path": "/data/chat.jsonl"}}, summary)
    runs.write_run(tmp_path / "4-e", {**wide, "workload": {"name": "bundled", "limit": 2}}, summary)
    runs.write_run(tmp_path / "5-f", {**wide, "target": {"name": "hf", "path": "org/Model-1B"}}, summary)
    runs.write_run(tmp_path / "6-g", {**wide, "tracking": {"name": "none"}, "task": {"name": "bench"}}, summary)
    rows = [one for one in read(tmp_path) if not one.is_plain]
    by_words = {(one.condition.target, one.condition.workload, one.condition.options, one.variant) for one in rows}
    hot, cold = "sampling.temperature=0.8", "sampling.temperature=0.0"
    five = "ngram prompt_lookup_max=5"
    assert by_words == {
        ("bundled", "bundled limit=8", cold, five),
        ("bundled", "bundled limit=8", cold, "ngram prompt_lookup_max=3"),
        ("bundled", "bundled limit=8", hot, five),
        ("bundled", "chat.jsonl", cold, five),
        ("bundled", "bundled limit=2", cold, five),
        ("Model-1B", "bundled limit=8", cold, five),
    }
    assert len([one for one in read(tmp_path) if one.is_plain]) == 5, "a baseline per condition"


def test_conditions_say_what_differs() -> None:
    one, other = Condition("a", "gsm8k", "cpu"), Condition("a", "mbpp", "cpu", "seed=1")
    assert one.words([one]) == "gsm8k"
    assert one.words([one, other]) == "gsm8k"
    assert other.words([one, other]) == "mbpp · seed=1"


def test_csv_holds_every_row_and_position(tmp_path: Path) -> None:
    rows = read(runs.write_sweep(tmp_path))
    lines = list(csv.DictReader(io.StringIO(csv_text(rows))))
    assert len(lines) == len(rows)
    assert float(lines[1]["acceptance_unconditional_0"]) == rows[1].acceptance_unconditional[0]
    assert lines[0]["acceptance_unconditional_0"] == ""  # plain decoding has none
    assert float(lines[1]["tokens_per_second_slowest"]) == min(rows[1].tokens_per_second_repeats)
    assert csv_text([]) == "\n"


def test_rows_of_another_engine_stand_beside_ours() -> None:
    theirs = row("ngram", 5, 150, engine="vllm")
    assert theirs.label == "vllm ngram K=5"
    found = answers_of([row("plain", 0, 100), row("ngram", 3, 120), theirs])
    assert found[0].best is theirs


# -- answers -------------------------------------------------------------------------------------------------------
def test_the_answer_is_the_fastest_row_that_keeps_the_output() -> None:
    rows = [
        row("plain", 0, 100), row("ngram", 3, 140), row("dflash", 5, 150),
        row("typical", 5, 300, lossy=True), row("broken", 5, 400, lossless="failed"),
        row("plain", 0, 800, batch=8), row("ngram", 3, 700, batch=8),
    ]  # fmt: skip
    first, second = answers_of(rows)
    assert first.best.label == "dflash K=5"
    assert first.speculate
    assert first.plain is rows[0]
    assert first.close == ()
    assert first.sentence() == "dflash K=5, 150 tokens/s, 1.50× plain decoding"
    assert not second.speculate
    assert second.sentence() == "do not speculate: plain decoding is the fastest, 800 tokens/s"


def test_rows_within_the_noise_of_the_best_are_named() -> None:
    noisy = [row("a", 3, 100, noise=0.05), row("b", 3, 98, noise=0.05), row("c", 3, 80)]
    answer = answers_of(noisy)[0]
    assert [one.method for one in answer.close] == ["b"]
    assert answer.sentence().endswith("; within the repeats' noise of it: b K=3")
    single = [replace(one, tokens_per_second_repeats=one.tokens_per_second_repeats[:1]) for one in noisy]
    assert answers_of(single)[0].close == (), "one repeat says nothing of the noise"


def test_slower_than_plain() -> None:
    rows = [row("plain", 0, 100), row("a", 3, 99), row("b", 3, 50), row("c", 3, 101)]
    assert [one.method for one in slower_than_plain(rows)] == ["b", "a"]


def test_results_are_json(tmp_path: Path) -> None:
    """What `rows_of` needs survives the way through summary.json."""
    folder = runs.write_run(tmp_path / "r", runs.config("ngram"), scenario.summary(("ngram",)))
    assert json.loads((folder / "summary.json").read_text())["schema"] == 1
    assert [one.tokens_per_second for one in read(folder)] == [
        one.tokens_per_second for one in scenario.summary(("ngram",)).series
    ]
