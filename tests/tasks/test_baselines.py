"""Plain decoding measured once: what is kept, for whom, and when it no longer holds."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specflow.engine.engine import Engine
from specflow.errors import StorageError
from specflow.tasks import bench as bench_module
from specflow.tasks.baselines import MOST_DRIFT, Baseline, Baselines
from specflow.tasks.bench import BenchOptions, BenchTask
from specflow.testing.proposers import NoiseProposer
from tests.tasks.helpers import make_context

VOCABULARY = 384


@pytest.fixture(autouse=True)
def pulse(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The machine's pulse, one value after the other; the last one stays."""
    beats = [1.0]
    monkeypatch.setattr(bench_module, "feel_pulse", lambda engine: beats.pop(0) if len(beats) > 1 else beats[0])
    return beats


def context(folder: Path, out: Path, job: str, proposer: Any = "noise", **sampling: Any) -> Any:
    made = NoiseProposer(3, VOCABULARY) if proposer == "noise" else proposer
    made = make_context(folder, out, made, **sampling)
    return replace(made, baselines=Baselines(out / "baselines", job))


def run(context: Any, **options: Any) -> tuple[Any, list[tuple[str, int]]]:
    """The summary, and what was measured: method and batch size of every pass that was no warm-up."""
    done = BenchTask(BenchOptions(**{"batch_sizes": (1, 2), "repeats": 2, "cost_curve": False, **options})).run(context)
    series = context.hooks.of("specflow_series_started")
    return done.summary, [(one.method, one.batch_size) for one in series if not one.warmup]


def test_the_second_job_measures_its_proposer_only(llama_folder: Path, tmp_path: Path) -> None:
    first, measured = run(context(llama_folder, tmp_path, "0-noise"))
    assert measured.count(("plain", 1)) == measured.count(("plain", 2)) == 2
    second, again = run(context(llama_folder, tmp_path, "1-noise"))
    assert again == [("noise", 1)] * 2 + [("noise", 2)] * 2
    assert [one.label for one in second.series] == [one.label for one in first.series]
    for before, after in zip(first.series, second.series, strict=True):
        if before.is_plain:
            assert after == before
    assert second.lossless.status == "verified"
    assert second.lossless.compared_tokens == first.lossless.compared_tokens > 0
    assert second.series[1].speedup == pytest.approx(
        second.series[1].tokens_per_second / first.series[0].tokens_per_second
    )
    assert "measured by 0-noise at 20" in second.really_ran["run"]["plain decoding"]
    assert "plain decoding" not in first.really_ran["run"]


def test_plain_decoding_alone_is_kept_too(llama_folder: Path, tmp_path: Path) -> None:
    run(context(llama_folder, tmp_path, "0-plain", None))
    _, measured = run(context(llama_folder, tmp_path, "1-plain", None))
    assert measured == []


def test_a_wrong_output_is_seen_against_a_kept_baseline(llama_folder: Path, tmp_path: Path) -> None:
    """The kept outputs are compared token by token like fresh ones."""
    run(context(llama_folder, tmp_path, "0-noise"))
    for file in (tmp_path / "baselines").glob("*.json"):
        text = file.read_text()
        file.write_text(text.replace('"token_ids": [', '"token_ids": [7, '))
    summary, _ = run(context(llama_folder, tmp_path, "1-noise"))
    assert summary.lossless.status == "failed"


@pytest.mark.parametrize("change", ["sampling", "repeats", "seed"])
def test_what_plain_decoding_depends_on_makes_another_baseline(llama_folder: Path, tmp_path: Path, change: str) -> None:
    run(context(llama_folder, tmp_path, "0-noise"))
    sampling = {"max_tokens": 8} if change == "sampling" else {}
    other = context(llama_folder, tmp_path, "1-noise", **sampling)
    if change == "seed":
        other = replace(other, config={**other.config, "seed": 4})
    _, measured = run(other, **({"repeats": 1} if change == "repeats" else {}))
    assert ("plain", 1) in measured


def test_a_machine_that_changed_measures_again(llama_folder: Path, tmp_path: Path, pulse: list[float]) -> None:
    run(context(llama_folder, tmp_path, "0-noise"))
    pulse[:] = [1.2 * MOST_DRIFT]
    _, measured = run(context(llama_folder, tmp_path, "1-noise"))
    assert measured.count(("plain", 1)) == 2
    _, measured = run(context(llama_folder, tmp_path, "2-noise"))
    assert ("plain", 1) not in measured, "the newer baseline holds now"


def test_a_drift_during_the_measurement_is_said(llama_folder: Path, tmp_path: Path, pulse: list[float]) -> None:
    run(context(llama_folder, tmp_path, "0-noise"), batch_sizes=(1,))
    pulse[:] = [1.0, 1.5]
    summary, measured = run(context(llama_folder, tmp_path, "1-noise"), batch_sizes=(1,))
    assert ("plain", 1) not in measured
    text = "batch 1: the speed-up is not to be trusted: a target pass takes 1.50 times as long as when 0-noise measured"
    assert summary.really_ran["run"]["drift"].startswith(text)
    assert any(note.startswith(text) for note in summary.notes)


@pytest.mark.parametrize(
    ("then", "now", "holds"), [(1, 1.09, True), (1, 1.11, False), (1, 0.9, False), (None, 5, True)]
)
def test_when_a_baseline_holds(then: float | None, now: float, holds: bool) -> None:
    assert Baseline((), then, "job", "now").still_holds(now) is holds
    assert Baseline((), then, "job", "now").still_holds(None)


def test_a_job_that_failed_leaves_no_baseline(llama_folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    def broken(self: Engine, *arguments: Any, **named: Any) -> Any:
        raise RuntimeError("no")

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "generate", broken)
        with pytest.raises(RuntimeError):
            run(context(llama_folder, tmp_path, "0-noise"))
    assert not list((tmp_path / "baselines").glob("*.json"))
    _, measured = run(context(llama_folder, tmp_path, "1-noise"))
    assert ("plain", 1) in measured, "and its claim is free"


def test_one_job_at_a_time_holds_a_claim(tmp_path: Path) -> None:
    baselines, order = Baselines(tmp_path, "a"), []

    def second() -> None:
        with Baselines(tmp_path, "b").claim({"x": 1}) as claim:
            order.append("second")
            assert claim.load() is not None

    with baselines.claim({"x": 1}) as claim:
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(0.3)
        order.append("first")
        claim.save([], 1.0)
    thread.join(10)
    assert order == ["first", "second"]
    with baselines.claim({"x": 2}) as claim:
        assert claim.load() is None


def test_a_damaged_baseline_is_named(tmp_path: Path) -> None:
    with Baselines(tmp_path, "a").claim({}) as claim:
        claim.file.write_text("{")
        with pytest.raises(StorageError, match=r"cannot be read: .* Remove it"):
            claim.load()
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot keep the baseline"), Baselines(tmp_path / "file", "a").claim({}):
        pass
