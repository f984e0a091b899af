"""Stages of `task=train`: each resumable, exact however a run ends, and honest about what came out."""

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from specflow.checkpoints.trained_on import trained_on_chat
from specflow.errors import ConfigError, StorageError
from tests.models import tiny_llama
from tests.training.fake_head import FakeTraining
from tests.training.runs import SMALL, checkpoint, curve, in_process, make_run, steps, train


@pytest.fixture(scope="module")
def whole(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing interrupted. Read only."""
    output = tmp_path_factory.mktemp("whole") / "out"
    train(llama_folder, output)
    return output


def with_responses(whole: Path, output: Path) -> Path:
    """A folder that has the responses of the whole run and nothing else."""
    output.mkdir(parents=True)
    for name in ("responses.jsonl", "responses.json"):
        shutil.copy(whole / name, output / name)
    return output


def assert_same(first: Path, second: Path) -> None:
    """Same weights, moments, head state and curve, to the last bit."""
    (step, ours, _), (other_step, theirs, _) = checkpoint(first), checkpoint(second)
    assert step == other_step == SMALL["steps"]
    _assert_equal(ours, theirs)
    assert (first / "head" / "w.st").read_bytes() == (second / "head" / "w.st").read_bytes()
    assert [row for row in curve(first) if "train/loss" in row] == [row for row in curve(second) if "train/loss" in row]


def _assert_equal(ours: Any, theirs: Any) -> None:
    if isinstance(ours, torch.Tensor):
        assert torch.equal(ours, theirs)
    elif isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        for key in ours:
            _assert_equal(ours[key], theirs[key])
    elif isinstance(ours, list | tuple):
        for one, other in zip(ours, theirs, strict=True):
            _assert_equal(one, other)
    else:
        assert ours == theirs


def wait_for_step(output: Path, step: int) -> None:
    """Until a checkpoint of that step or a later one is there."""
    for _ in range(3000):
        if max(steps(output), default=-1) >= step:
            return
        time.sleep(0.01)
    raise AssertionError("no checkpoint appeared")


# -- killed and resumed --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("capture", ["online", "offline", "hybrid"])
def test_a_run_that_was_killed_ends_with_the_same_weights(
    capture: str, whole: Path, llama_folder: Path, tmp_path: Path
) -> None:
    straight = whole
    if capture != "online":
        straight = with_responses(whole, tmp_path / "straight")
        train(llama_folder, straight, capture=capture)
    output = with_responses(whole, tmp_path / "out")
    for step in (4, 12):
        process = in_process(llama_folder, output, capture=capture)
        wait_for_step(output, step)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL, "it ended before it was killed: the test shows nothing"
        assert step <= checkpoint(output)[0] < SMALL["steps"]
    run = train(llama_folder, output, capture=capture)
    assert any("going on after step" in line for line in run.display.lines)
    assert_same(straight, output)


def test_weights_depend_on_the_seed_alone(whole: Path, llama_folder: Path, tmp_path: Path) -> None:
    """Else the test above could not fail."""
    output = with_responses(whole, tmp_path / "out")
    run = make_run(llama_folder, output, seed=1, stage="train")
    run.run()
    assert (output / "head" / "w.st").read_bytes() != (whole / "head" / "w.st").read_bytes()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_the_step_and_ends_the_run(
    number: signal.Signals, whole: Path, llama_folder: Path, tmp_path: Path
) -> None:
    output = with_responses(whole, tmp_path / "out")
    process = in_process(llama_folder, output, checkpoint_every=4)
    wait_for_step(output, 4)
    os.kill(process.pid or 0, number)
    process.join()
    assert process.exitcode == 130
    step = checkpoint(output)[0]
    assert 4 <= step < SMALL["steps"]
    train(llama_folder, output)
    assert_same(whole, output)


def test_what_a_killed_save_left_is_no_checkpoint(whole: Path, llama_folder: Path, tmp_path: Path) -> None:
    output = with_responses(whole, tmp_path / "out")
    for step in (3, 24, 99):
        partial = output / "checkpoints" / f"step_{step}.partial"
        partial.mkdir(parents=True)
        (partial / "state.json").write_text("{")
    train(llama_folder, output)
    assert_same(whole, output)
    assert sorted(path.name for path in (output / "checkpoints").iterdir()) == ["step_20", "step_24"]


def test_a_damaged_checkpoint_is_named(whole: Path, llama_folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    shutil.copytree(whole, output)
    (output / "checkpoints" / "step_24" / "state.pt").write_bytes(b"damaged")
    with pytest.raises(StorageError, match=r"step_24 cannot be read.*Delete it to go on from the one before"):
        train(llama_folder, output, stage="train")
    shutil.rmtree(output / "checkpoints" / "step_24")
    train(llama_folder, output, stage="train")
    assert_same(whole, output)


# -- stages --------------------------------------------------------------------------------------------------------
def test_stages_one_by_one_give_what_all_at_once_gives(whole: Path, llama_folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    for stage, missing in (("train", "no responses"), ("evaluate", "no trained head")):
        with pytest.raises(ConfigError, match=missing):
            train(llama_folder, output, stage=stage)
    train(llama_folder, output, stage="regenerate")
    ours, theirs = ((folder / "responses.jsonl").read_text().splitlines() for folder in (output, whole))
    assert sorted(ours) == sorted(theirs)
    with pytest.raises(ConfigError, match=r"set task\.capture=offline"):
        train(llama_folder, output, stage="capture")
    with pytest.raises(StorageError, match=r"task\.stage=capture first"):
        train(llama_folder, output, stage="train", capture="offline")
    train(llama_folder, output, stage="train")
    assert_same(whole, output)
    run = train(llama_folder, output, stage="evaluate")
    assert run.metrics["engine/rounds"] > 0


def test_offline_and_hybrid_read_what_online_computes(whole: Path, llama_folder: Path, tmp_path: Path) -> None:
    """The same run but for rounding: a batch of other documents is computed in another order."""
    expected = checkpoint(whole)[1]["module"]["1.weight"]
    for capture in ("offline", "hybrid"):
        output = with_responses(whole, tmp_path / capture)
        train(llama_folder, output, capture=capture)
        torch.testing.assert_close(checkpoint(output)[1]["module"]["1.weight"], expected, rtol=1e-3, atol=1e-4)
        settings = json.loads((output / "hidden" / "extract.json").read_text())
        assert settings["last_hidden"] == "after the final norm"
        assert settings["layers"] == [1]


def test_another_run_in_the_same_folder_is_refused(whole: Path, llama_folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    shutil.copytree(whole, output)
    with pytest.raises(ConfigError, match=r"checkpoints of a run with other settings(.|\n)*learning_rate: 0\.01 there"):
        train(llama_folder, output, learning_rate=2e-2)
    with pytest.raises(ConfigError, match=r"responses made with other settings(.|\n)*temperatures"):
        train(llama_folder, output, response_temperatures=(0.5,))
    train(llama_folder, output, log_every=3, keep=1)  # nothing of the weights depends on these


def test_another_target_is_refused(whole: Path, llama_folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    shutil.copytree(whole, output)
    other = tiny_llama(tmp_path / "other", seed=5)
    with pytest.raises(ConfigError, match="holds a head for target 'llama"):
        train(other, output)
    (output / "training.json").unlink()
    with pytest.raises(ConfigError, match="responses made with other settings"):
        train(other, output)
    with pytest.raises(ConfigError, match="holds responses of target"):
        train(other, output, stage="train")


def test_the_card_says_what_the_head_was_made_of(whole: Path) -> None:
    card = json.loads((whole / "training.json").read_text())
    assert card["method"] == "fake"
    assert card["head_options"]["layer"] == 1
    assert card["data"]["made"]["target_hash"] == card["target"]["hash"]
    assert card["data"]["responses"] + card["data"]["held_out_responses"] + card["data"]["dropped"] == 30
    assert set(card["seconds"]) == {"regenerate", "capture", "train", "evaluate"}
    assert [point["step"] for point in card["curve"] if "train/loss" in point] == [5, 10, 15, 20, 24]
    assert card["metrics"]["train/tokens"] == checkpoint(whole)[2]["tokens"]
    assert card["metrics"]["parameters"] == 64 * 64 + 64


@pytest.mark.parametrize(
    ("kinds", "noted"), [((True,), True), ((False,), False), ((True, False), None), ((True, None), None)]
)
def test_the_head_says_whether_it_was_trained_on_conversations(
    kinds: tuple[bool | None, ...], noted: bool | None, whole: Path, llama_folder: Path, tmp_path: Path
) -> None:
    """C39: held-out answers do not count, and rows of before the note say nothing."""
    output = with_responses(whole, tmp_path / "out")
    rows = [json.loads(line) for line in (output / "responses.jsonl").read_text().splitlines()]
    assert {row["chat"] for row in rows} == {False}
    for index, row in enumerate(sorted(rows, key=lambda row: row["split"] == "held_out")):
        row["chat"] = kinds[index % len(kinds)] if row["split"] == "train" else not kinds[0]
        if row["chat"] is None:
            del row["chat"]
    (output / "responses.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    train(llama_folder, output, stage="train", steps=1)
    assert trained_on_chat(output / "head") is noted


def test_the_head_gets_the_counts_of_labels_and_they_stay(whole: Path, llama_folder: Path) -> None:
    run = make_run(llama_folder, whole)
    run.parts.target.load(run.parts.backend)
    labels = [token for row in run.parts.documents.documents for token in row.ids[row.num_prompt_tokens :]]
    counts = checkpoint(whole)[1]["head"]["counts"]
    assert counts.sum() == len(labels)
    assert counts[labels[0]] == labels.count(labels[0])


def test_a_head_that_does_not_fit_is_refused_before_anything_is_written(llama_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the target has no layer 9"):
        train(llama_folder, tmp_path / "out", head={"layer": 9})
    with pytest.raises(ConfigError, match=r"task\.recompute=true: 'fake' cannot compute its layers again"):
        train(llama_folder, tmp_path / "out", recompute=True)
    assert not (tmp_path / "out").exists()


# -- the closed loop -----------------------------------------------------------------------------------------------
OVERFIT = {
    "head": {"layer": 2},
    "response_temperatures": (0.0,),
    "held_out": 0.5,
    "steps": 160,
    "learning_rate": 3e-2,
    "checkpoint_every": 1000,
    "evaluate_every": 80,
    "evaluate_prompts": 64,
}


@pytest.fixture(scope="module")
def overfit(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head that knows its held-out answers by heart: both sides of the split have the same ones."""
    output = tmp_path_factory.mktemp("overfit") / "out"
    make_run(llama_folder, output, stage="regenerate", **OVERFIT).run()
    rows = [json.loads(line) for line in (output / "responses.jsonl").read_text().splitlines()]
    held_out = [row for row in rows if row["split"] == "held_out"][:8]
    copies = [{**row, "id": f"{row['id']}-copy", "split": "train"} for row in held_out]
    (output / "responses.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in [*held_out, *copies]))
    train(llama_folder, output, stage="train", **OVERFIT)
    return output


def test_the_engine_accepts_what_training_promises(overfit: Path, llama_folder: Path) -> None:
    run = train(llama_folder, overfit, stage="evaluate", **OVERFIT)
    assert run.metrics["served/accuracy/0"] > 0.9
    assert run.metrics["engine/conditional_acceptance/0"] > 0.9
    assert run.metrics["engine/mean_acceptance_length"] > 1.9
    assert run.metrics["engine/disagrees"] == 0
    assert any("engine/mean_acceptance_length" in row and row["step"] == 80 for row in curve(overfit))


def test_a_proposer_that_runs_the_head_otherwise_is_found_out(overfit: Path, llama_folder: Path) -> None:
    """User case C36: fine in training, worthless when served."""
    run = train(llama_folder, overfit, stage="evaluate", proposer={"spoil": True}, **OVERFIT)
    assert run.metrics["engine/disagrees"] == 1
    assert any("run otherwise than it is trained" in line for line in run.display.lines)


def test_a_head_names_parameters_that_learn_at_another_rate(
    whole: Path, llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {}
    for factor in (0.0, 5.0):
        monkeypatch.setattr(FakeTraining, "rate_factors", lambda head, factor=factor: {"1.bias": factor})
        output = with_responses(whole, tmp_path / str(factor))
        train(llama_folder, output, steps=1, warmup=0.0, final_rate_fraction=1.0)
        _, state, _ = checkpoint(output)
        found[factor] = state["module"]
    assert torch.equal(found[0.0]["1.weight"], found[5.0]["1.weight"])
    # The first step of AdamW moves a weight by its rate, whatever the gradient.
    moved = (found[5.0]["1.bias"] - found[0.0]["1.bias"]).abs()
    torch.testing.assert_close(moved, torch.full_like(moved, 5 * float(SMALL["learning_rate"])), rtol=1e-2, atol=0)
