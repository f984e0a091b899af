"""`task=pretrain`: progress is shown, measurements become metrics."""

from pathlib import Path
from typing import Any

import pytest

from specflow.backends.cpu import CpuBackend, CpuOptions
from specflow.tasks.base import TaskContext
from specflow.tasks.pretrain import PretrainTask
from specflow.training import language_model
from specflow.training.pretrain_options import PretrainOptions, PretrainResult, Progress


def result(agreement: float | None) -> PretrainResult:
    by_draft = () if agreement is None else (0.75, 0.5)
    return PretrainResult(
        "out", 1000, 5, 0, 400, 100, 0, 800, 2.0, 3.5, 10, 3.25, 1.5, agreement, agreement_by_draft=by_draft
    )


@pytest.mark.parametrize("agreement", [None, 0.75])
def test_measurements_become_metrics(agreement: float | None, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def pretrain(options: PretrainOptions, on_progress: Any) -> PretrainResult:
        assert options.device == "cpu"  # the backend's
        on_progress(Progress(5, options.steps, 4.125, 1e-3, 1234.0, 4.5))
        on_progress(Progress(options.steps, options.steps, 3.5, 0.0, 1234.0))
        return result(agreement)

    monkeypatch.setattr(language_model, "pretrain", pretrain)
    context = TaskContext({}, Path(), lambda kind: CpuBackend(CpuOptions()), None, {})
    finished = PretrainTask(PretrainOptions(output="out", steps=10)).run(context)
    assert finished.status == "finished"
    assert finished.metrics["held_out_loss"] == 3.25
    assert finished.metrics["training_tokens_per_second"] == 400.0
    assert finished.metrics.get("agreement") == agreement
    assert finished.metrics.get("agreement_draft_2") == (None if agreement is None else 0.5)
    shown = capsys.readouterr()
    assert "loss 3.500" in shown.err
    assert "1,234 tokens/s" in shown.err
    assert "model saved in out" in shown.out
