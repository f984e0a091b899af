"""`task=tune` from the command line, on the bundled target."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from specflow.cli import main
from specflow.tracking.mlflow_run import connect, search_runs

SMALL = ["workload.limit=2", "sampling.max_tokens=12", "scheduler.max_model_len=512", "scheduler.max_num_seqs=2"]
TASK = [
    "task=tune", "task.methods=[ngram,draft_model]", "task.num_speculative_tokens=[1,3]", "task.batch_sizes=[1,2]",
    "task.repeats=1", "task.finalists=1", "task.share=1.0", "task.margin=0.9",
]  # fmt: skip


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A launch folder with one tuning in `run`, tracked by MLflow."""
    folder = tmp_path_factory.mktemp("tune")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        assert main([*TASK, *SMALL, "hydra.run.dir=run"]) == 0
    return folder


def results(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "run" / "tune.json").read_text())
    assert isinstance(found, dict)
    return found


def test_files_and_numbers(tuned: Path) -> None:
    data = results(tuned)
    cells = {(cell["method"], cell["num_speculative_tokens"], cell["batch_size"]): cell for cell in data["cells"]}
    assert set(cells) == {
        (method, length, batch)
        for batch in (1, 2)
        for method, length in [("plain", 0), *((name, k) for name in ("ngram", "draft_model") for k in (1, 3))]
    }
    assert all(cell["predicted"] > 0 for cell in cells.values())
    assert all(cells["plain", 0, batch]["measured"] > 0 for batch in (1, 2))
    assert sum(cell["measured"] is not None for cell in cells.values()) == 4  # plain and one finalist, twice
    # A chain of one draft cannot emit more than two tokens, and more drafts never emit fewer.
    lengths = [cells["draft_model", k, 1]["acceptance_length"] for k in (1, 3)]
    assert 1 < lengths[0] < 2
    assert lengths[0] < lengths[1] < 4
    assert [one["batch_size"] for one in data["recommendations"]] == [1, 2]
    # Plain, two methods, two batch sizes; a short pass each at K=1; plain and a finalist measured.
    assert data["passes"]["exhaustive"] == 10
    assert 10 < data["passes"]["used"] < 16
    assert data["costs"]["draft_model"]["verify_costs"].startswith("[[1, ")
    assert (tuned / "run" / "tune.png").read_bytes().startswith(b"\x89PNG")
    assert len((tuned / "run" / "tune.csv").read_text().splitlines()) == 11
    assert "finalists of a tuning" in (tuned / "run" / "results.html").read_text()


def test_finalists_are_runs_below_the_tuning(tuned: Path) -> None:
    client = connect(f"sqlite:///{tuned}/runs/mlflow.db")
    experiment = client.get_experiment_by_name("specflow")
    runs = search_runs(client, experiment.experiment_id, "")
    (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    children = [run for run in runs if run is not parent]
    assert {run.data.tags["mlflow.parentRunId"] for run in children} == {parent.info.run_id}
    assert len(children) == 2
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert parent.data.metrics["recommended/batch_1/tokens_per_second"] > 0
    assert parent.data.metrics["passes_of_exhaustive"] > 1
    names = {run.info.run_name.partition(",")[0] for run in children}
    measured = {f"{cell['method']} K={cell['num_speculative_tokens']}" for cell in results(tuned)["cells"]
                if cell["measured"] and cell["num_speculative_tokens"]}  # fmt: skip
    assert names == measured
    kept = json.loads((tuned / "run" / "run.json").read_text())
    assert (kept["task"], kept["status"]) == ("tune", "finished")  # not those of a run inside


def test_the_recommendation_runs(tuned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tuned)
    words = ["--config-dir", "run/recommended", "+experiment=recommended", "tracking=none", "workload.limit=1"]
    sizes = ["task.batch_sizes=[1]", "task.repeats=1", "task.cost_curve=false", "hydra.run.dir=again"]
    assert main([*words, *sizes]) == 0
    (best, _) = results(tuned)["recommendations"]
    config = yaml.safe_load((tuned / "again" / "config.yaml").read_text())
    assert config["sampling"]["max_tokens"] == 12
    assert config["scheduler"]["max_num_seqs"] == 2
    if best["speculate"]:
        assert config["proposer"]["name"] == best["method"]
        assert config["proposer"]["num_speculative_tokens"] == best["num_speculative_tokens"]
    else:
        assert config["proposer"] is None
    assert (tuned / "run" / "recommended" / "experiment" / "recommended_batch_2.yaml").is_file()
    assert main([*best["command"].split()[3:], "tracking=none", "task.repeats=1", "hydra.run.dir=pasted"]) == 0


@pytest.mark.slow
def test_methods_that_cannot_be_used_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All methods, little of each: heads that are not there, one that needs a class, and a K that is too large."""
    monkeypatch.chdir(tmp_path)
    words = ["task=tune", "task.num_speculative_tokens=[2,9]", "task.batch_sizes=[1]", "task.repeats=1"]
    few = ["task.finalists=1", "task.warmup_requests=0", "workload.limit=1", "sampling.max_tokens=6"]
    assert main([*words, *few, "tracking=none", "hydra.run.dir=run", *SMALL[2:]]) == 0
    data = results(tmp_path)
    assert "custom_class" in data["unusable"]
    assert "extract_hidden_states" in data["unusable"]
    tried = {cell["method"] for cell in data["cells"]}
    assert {"plain", "ngram", "suffix", "draft_model", "pard", "dflash"} <= tried
    lengths = {cell["num_speculative_tokens"] for cell in data["cells"] if cell["method"] == "dflash"}
    assert lengths == {2}  # trained for seven


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["task.methods=[ngramm]"], "Did you mean ngram"),
        (["task.methods=[custom_class]"], "custom_class"),
        (["task.methods=[]"], "must be different methods"),
        (["task.num_speculative_tokens=[0,3]"], "task.num_speculative_tokens=[0, 3]"),
        (["task.batch_sizes=[]"], "task.batch_sizes=[]"),
        (["task.share=0"], "task.share=0"),
        (["task.margin=1.5"], "task.margin=1.5"),
        (["task.finalists=0"], "task.finalists=0"),
        (["task.methods=[ngram]", "task.options.ngram.prompt_lookup_mx=3"], "prompt_lookup_max"),
        (["task.options.ngram=3"], "task.options.ngram"),
        (["scheduler=adaptive"], "scheduler=continuous"),
        (["engine=transformers"], "engine=transformers"),
        (["workload.request_rate=2.0"], "workload.request_rate=null"),
    ],
)
def test_what_cannot_be_tuned(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["task=tune", "tracking=none", *words]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "runs").exists()
