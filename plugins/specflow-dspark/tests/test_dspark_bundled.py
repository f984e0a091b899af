"""The head in this package, on the target that specflow bundles; and the command line."""

import json
from pathlib import Path

import pytest
import specflow_dspark

import specflow
from specflow import Engine, SamplingParams, cli
from specflow.testing.conformance import assert_same

FOLDER = Path(specflow_dspark.__file__).parent / "models" / "dspark"
PROMPTS = Path(specflow.__file__).parent / "workloads" / "data" / "bundled.jsonl"
GREEDY = SamplingParams(max_tokens=64)


def texts(count: int) -> list[str]:
    return [json.loads(row)["prompt"] for row in PROMPTS.read_text(encoding="utf-8").splitlines()[:count]]


def test_it_is_small() -> None:
    assert (FOLDER / "model.safetensors").stat().st_size <= 4_000_000
    assert (FOLDER / "README.md").exists()


def test_it_drafts_more_than_the_block_head_alone() -> None:
    """Measured: 3.17 tokens per round against 2.69; on 12 prompts of 96 tokens 3.74 against 3.36."""
    lengths = {}
    for proposer in ({"name": "dspark", "prefix_selection": "all"}, {"name": "dflash"}):
        engine = Engine.from_config({"proposer": proposer, "backend": {"name": "cpu"}})
        outputs = engine.generate(texts(6), GREEDY)
        rounds = sum(output.rounds for output in outputs)
        lengths[proposer["name"]] = 1 + sum(output.accepted for output in outputs) / rounds
    assert lengths["dspark"] > max(2.9, lengths["dflash"])


def test_the_length_that_pays_saves_drafts_and_loses_few_tokens() -> None:
    """Eight requests at once: what verification costs more than a single request's, so fewer drafts are worth it."""
    costs = [[1, 4.3], [8, 5.5], [16, 6.2], [32, 8.2], [64, 12.2]]  # milliseconds on one core of a server processor
    found = {}
    for selection in ("all", "cost"):
        proposer = {"name": "dspark", "prefix_selection": selection, "verify_costs": costs, "round_cost": [2.0, 0.4]}
        engine = Engine.from_config({"proposer": proposer, "backend": {"name": "cpu"}})
        found[selection] = engine.generate(texts(8), GREEDY)
    assert_same(found["all"], found["cost"])
    drafted, accepted, rounds = (
        {name: sum(getattr(output, field) for output in outputs) for name, outputs in found.items()}
        for field in ("drafted", "accepted", "rounds")
    )
    assert drafted["cost"] < 0.85 * drafted["all"]
    assert accepted["cost"] / rounds["cost"] > 0.85 * accepted["all"] / rounds["all"]


@pytest.mark.slow
def test_a_sweep_over_both_methods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    short = ["workload.limit=2", "task.batch_sizes=[1]", "task.repeats=1", "sampling.max_tokens=16", "tracking=none"]
    assert cli.main(["-m", "+proposer=dflash,dspark", "backend=cpu", *short]) == 0
    printed = capsys.readouterr().out
    assert "dflash" in printed
    assert "dspark" in printed
    assert printed.count("lossless") >= 2
