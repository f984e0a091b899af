"""`task=train` from the command line: what is refused before anything is loaded, and what the trackers get."""

import json
from pathlib import Path
from typing import Any

import pytest

from specflow import cli
from specflow.composition import composer, plain_config
from specflow.errors import ConfigError
from specflow.options import build_options
from specflow.plugins.component import TRAINABLE_HEAD
from specflow.plugins.registry import Registry, load_plugins
from specflow.runner import check
from specflow.tasks.plugins import component_table
from tests.training.runs import fake_registry


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return fake_registry(tmp_path / "conf")


def checked(registry: Registry, *words: str) -> Any:
    with composer(registry) as compose:
        return check(plain_config(compose.compose(["task=train", "tracking=none", *words])), registry)


def refused(registry: Registry, *words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        checked(registry, *words)
    return str(caught.value)


# -- refused beforehand ----------------------------------------------------------------------------------------------
def test_no_proposer(registry: Registry) -> None:
    assert "needs a head to train: add +proposer=NAME, one of: dflash, eagle3, fake." in refused(registry)


def test_a_proposer_that_nobody_trains(registry: Registry) -> None:
    text = refused(registry, "+proposer=ngram")
    assert "+proposer=ngram: task=train cannot train it." in text
    assert "It trains: dflash, eagle3, fake." in text


def test_options_of_the_head_are_checked_by_its_own_schema(registry: Registry) -> None:
    text = refused(registry, "+proposer=fake", "task.head.layr=1")
    assert "task.head.layr=1: task.head has no option 'layr'. Did you mean layer?" in text
    assert "layer (int)" in text
    assert "task.head.layer=x is not valid: it must be int." in refused(registry, "+proposer=fake", "task.head.layer=x")
    assert "task.head: dropout=-1" in refused(registry, "+proposer=fake", "task.head.dropout=-1")


def test_options_of_the_proposer_are_checked_too(registry: Registry) -> None:
    text = refused(registry, "+proposer=fake", "proposer.num_speculative_tokens=x")
    assert "proposer.num_speculative_tokens=x is not valid" in text


def test_options_of_the_task(registry: Registry) -> None:
    assert "task.held_out=1.5 is out of range: it must be a share" in refused(
        registry, "+proposer=fake", "task.held_out=1.5"
    )
    assert "task.capture=never is not valid: it must be online | offline | hybrid" in refused(
        registry, "+proposer=fake", "task.capture=never"
    )
    assert "steps" in refused(registry, "+proposer=fake", "task.steps=0")


def test_all_problems_are_told_at_once(registry: Registry) -> None:
    text = refused(registry, "+proposer=fake", "task.head.layr=1", "workload.limit=0")
    assert "task.head.layr" in text
    assert "workload.limit=0" in text


def test_options_of_a_head_need_no_plus_and_may_replace_those_of_a_recipe(registry: Registry) -> None:
    plan = checked(registry, "+proposer=fake", "task.head.layer=1", "task.head.noise=0.5")
    assert plan.config["task"]["head"] == {"layer": 1, "noise": 0.5}
    plan = checked(registry, "+proposer=fake", "task.head={layer: 3}", "task.head.layer=0")
    assert plan.config["task"]["head"] == {"layer": 0}
    with composer(registry) as compose, pytest.raises(ConfigError, match="no option 'heads'"):
        compose.compose(["task=train", "task.heads.layer=1"])


def test_another_task_has_no_head(registry: Registry) -> None:
    with composer(registry) as compose:
        config = plain_config(compose.compose(["tracking=none", "task.head.layer=1"]))
    with pytest.raises(ConfigError, match="task=bench has no option 'head'"):
        check(config, registry)


def test_builtin_heads_are_registered_with_their_proposers() -> None:
    registry = load_plugins(only="")
    heads = registry.components(TRAINABLE_HEAD)
    assert {"eagle3", "dflash"} <= set(heads)
    for name, item in heads.items():
        assert item.source.distribution == "specflow"
        assert callable(item.load_factory())
        assert build_options(item.load_options(), {}, "task.head") is not None, name
    with pytest.raises(ConfigError, match="Did you mean eagle3"):
        registry.get(TRAINABLE_HEAD, "eagle")


def test_trainable_heads_are_listed(registry: Registry) -> None:
    columns = [list(column.cells) for column in component_table(registry).columns]
    rows = [row for row in zip(*columns, strict=True) if row[0] == TRAINABLE_HEAD]
    assert {"dflash", "eagle3", "fake"} <= {row[1] for row in rows}
    assert ("fake", "fake-pack 1", "yes") in [(row[1], row[3], row[4]) for row in rows]


# -- a whole run -----------------------------------------------------------------------------------------------------
def test_the_command_line_and_the_tracker(
    registry: Registry, llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from mlflow import MlflowClient

    monkeypatch.chdir(tmp_path)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": f"p{index}", "prompt": f"x{index} ab"}) + "\n" for index in range(20)))
    words = [
        *("task=train", "+proposer=fake", "target=hf", f"target.path={llama_folder}", "target.prove=false"),
        *("workload=jsonl", f"workload.path={prompts}", "scheduler.max_model_len=128", "backend=cpu"),
        *("task.head.layer=1", "task.response_tokens=16", "task.held_out=0.3", "task.pack_length=96", "task.steps=8"),
        *("task.log_every=2", "task.packs_per_step=2", "task.bf16=false", "task.evaluate_every=4"),
        *(f"tracking.uri=sqlite:///{tmp_path / 'm.db'}", f"hydra.run.dir={tmp_path / 'run'}"),
    ]
    assert cli.main(words, registry) == 0
    shown = capsys.readouterr().err
    assert "20 responses (0 were there)" in shown
    assert f"head saved in {tmp_path / 'runs/train/fake/head'}" in shown
    client = MlflowClient(f"sqlite:///{tmp_path / 'm.db'}")
    (run,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted({point.step for point in history if point.step}) == [2, 4, 6, 8]
    assert {"engine/rounds", "held_out/accuracy/0", "train/simulated_acceptance_length", "parameters"} <= set(
        run.data.metrics
    )
    assert {point.step for point in client.get_metric_history(run.info.run_id, "held_out/loss")} >= {4, 8}
    assert run.data.params["task.head.layer"] == "1"
    # The same command again finds everything done.
    assert cli.main(words, registry) == 0
    shown = capsys.readouterr().err
    assert "20 responses (20 were there)" in shown
    assert "going on after step 8" in shown


@pytest.mark.slow
@pytest.mark.parametrize("method", ["eagle3", "dflash"])
def test_the_recipes_of_the_bundled_heads_run(method: str, tmp_path: Path, capsys: Any) -> None:
    """On a small part of their data."""
    words = [
        *(f"+experiment=zoo_{method}", "workload.num_prompts=40", "task.response_tokens=16", "task.held_out=0.3"),
        *("task.epochs=1", "task.pack_length=512", "task.packs_per_step=2", "task.evaluate_prompts=4", "backend=cpu"),
        *("scheduler.max_num_seqs=40", "scheduler.kv_cache_memory_gib=1", "tracking=none", "task.bf16=false"),
        *(f"task.output={tmp_path / 'out'}", f"hydra.run.dir={tmp_path / 'run'}"),
    ]
    assert cli.main(words, load_plugins(only="")) == 0, capsys.readouterr().err
    card = json.loads((tmp_path / "out" / "training.json").read_text())
    assert card["method"] == method
    assert (tmp_path / "out" / "head" / "model.safetensors").stat().st_size < 4_000_000
    assert card["metrics"]["engine/rounds"] > 0
