"""Every built-in head through the trainer: what it learns by heart, the engine accepts (user case C36)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from specflow.plugins.component import TRAINABLE_HEAD, Kind
from specflow.plugins.registry import load_plugins
from specflow.training.batches import make_batch
from specflow.training.documents import Document
from specflow.training.trainer import loss_of
from tests.training.runs import checkpoint, make_run, train

HEADS: dict[str, dict[str, Any]] = {
    "eagle3": {"head_dim": 16, "intermediate_size": 128, "ttt_length": 3},
    "dflash": {"num_layers": 2, "block_size": 4, "num_anchors": 96, "mask_token_id": 383, "intermediate_size": 128},
}
STEPS = 480


def options(name: str, **changes: Any) -> dict[str, Any]:
    """A run over few answers, both sides of the split alike."""
    return {
        "proposer": {"name": name},
        "head": HEADS[name],
        "response_temperatures": (0.0,),
        "held_out": 0.5,
        "steps": STEPS,
        "learning_rate": 8e-3,
        "pack_length": 128,
        "packs_per_step": 1,
        "checkpoint_every": 1000,
        "evaluate_prompts": 64,
        **changes,
    }


def test_every_registered_head_is_tested() -> None:
    registry = load_plugins(only="")
    assert set(HEADS) == set(registry.components(TRAINABLE_HEAD))
    assert set(HEADS) <= set(registry.components(Kind.PROPOSER)), "a head without the proposer that runs it"


@pytest.mark.slow
@pytest.mark.parametrize("name", HEADS)
def test_the_engine_accepts_what_was_learnt_by_heart(name: str, llama_folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    train(llama_folder, output, stage="regenerate", **options(name))
    rows = [json.loads(line) for line in (output / "responses.jsonl").read_text().splitlines()]
    held_out = [row for row in rows if row["split"] == "held_out"][:4]
    copies = [{**row, "id": f"{row['id']}-copy", "split": "train"} for row in held_out]
    (output / "responses.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in [*held_out, *copies]))
    train(llama_folder, output, stage="train", **options(name))
    metrics = train(llama_folder, output, stage="evaluate", **options(name)).metrics
    assert metrics["served/accuracy/0"] > 0.95
    assert metrics["engine/conditional_acceptance/0"] >= 0.95
    assert metrics["engine/disagrees"] == 0
    drafts = len([key for key in metrics if key.startswith("served/accuracy/")])
    assert metrics["engine/mean_acceptance_length"] > 1 + 0.8 * drafts


@pytest.mark.parametrize("name", HEADS)
def test_a_resumed_run_is_the_same(name: str, llama_folder: Path, tmp_path: Path) -> None:
    """Stopped after a checkpoint, gone on with by another object: also what the head keeps beside its weights."""
    changes = {"steps": 6, "checkpoint_every": 3, "keep": 5}
    if name == "eagle3":
        changes["head"] = {**HEADS[name], "draft_vocab_size": 128}
    output = tmp_path / "out"
    train(llama_folder, output, stage="regenerate", **options(name, **changes))
    train(llama_folder, output, stage="train", **options(name, **changes))
    expected = checkpoint(output)[1]
    for file in (output / "checkpoints" / "step_6").iterdir():
        file.unlink()
    (output / "checkpoints" / "step_6").rmdir()
    train(llama_folder, output, stage="train", **options(name, **changes))
    found = checkpoint(output)[1]
    for part in ("module", "head"):
        assert found[part].keys() == expected[part].keys()
        assert all(torch.equal(found[part][key], expected[part][key]) for key in expected[part])


@pytest.mark.parametrize("name", HEADS)
def test_a_pack_with_hardly_a_label_is_no_trouble(name: str, llama_folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    train(llama_folder, output, stage="regenerate", **options(name))
    run = make_run(llama_folder, output, **options(name))
    run.parts.target.load(run.parts.backend)
    for labels in (0, 1, 2):
        document = Document("d", tuple(range(3, 23)), 20 - labels, 0.0)
        states = run.parts.online.states([document])
        parts = loss_of(run.parts.head, make_batch([document], states, 64, 5, torch.float32), False)
        assert torch.isfinite(parts.total)
        assert float(parts.weight) >= 0
        if parts.total.requires_grad:
            parts.total.backward()
