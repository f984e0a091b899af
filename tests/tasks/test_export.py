"""`task=export`: what it prints, what it saves, and how it ends."""

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from specflow import cli
from specflow.plugins.registry import load_plugins


@pytest.fixture
def export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Any:
    """Runs the task in an empty folder; returns exit code, output, errors and the run's folder."""
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[int, str, str, Path]:
        code = cli.main(["task=export", "tracking=none", "hydra.run.dir=out", *words], load_plugins(only=""))
        shown = capsys.readouterr()
        return code, shown.out, shown.err, tmp_path / "out"

    return call


def test_the_command_is_printed_and_saved(export: Any) -> None:
    code, out, err, folder = export("+proposer=ngram", "target=hf", "target.path=owner/name", "target.dtype=bfloat16")
    assert (code, err) == (0, "")
    saved = json.loads((folder / "vllm.json").read_text())
    assert saved["supported"] is True
    assert saved["speculative_config"]["method"] == "ngram"
    assert saved["command"][:3] == ["vllm", "serve", "owner/name"]
    script = (folder / "vllm-serve.sh").read_text()
    assert os.access(folder / "vllm-serve.sh", os.X_OK)
    text = script.partition("exec ")[2]
    assert shlex.split(text.replace("\\\n", " ")) == saved["command"]
    assert text.strip() in out, "what is printed can be pasted"
    assert '"max_tokens": 128' in out
    assert "target.prove=true" in out, "options without a counterpart are named"
    named = {one["option"] for one in saved["options"]}
    assert {"scheduler.kv_cache_memory_gib", "sampling.top_p", "proposer.match_policy", "seed"} <= named


def test_a_composition_that_vllm_cannot_run_fails_with_every_reason(export: Any) -> None:
    code, out, err, folder = export("+proposer=ngram", "sampler=coupled", "sampling.min_p=0.2")
    assert code == 1
    assert "sampler=coupled" in err
    assert "sampling.min_p=0.2" in err
    assert "vllm serve" not in out
    saved = json.loads((folder / "vllm.json").read_text())
    assert saved["supported"] is False
    assert saved["command"] is None
    assert len(saved["reasons"]) == 2
    assert not (folder / "vllm-serve.sh").exists()


def test_another_meaning_is_shown_and_refused_when_strict(export: Any) -> None:
    words = ["+proposer=ngram", "proposer.match_policy=latest"]
    code, out, _, _ = export(*words)
    assert code == 0
    assert "proposer.match_policy=latest" in out.partition("vLLM does something else:")[2]
    code, _, err, _ = export(*words, "task.strict=true", "hydra.run.dir=strict")
    assert code == 1
    assert "proposer.match_policy=latest" in err


def test_gpus_are_options_of_the_engine(export: Any) -> None:
    code, out, _, _ = export("engine=vllm", "engine.tensor_parallel_size=2", "engine.arguments={quantization: fp8}")
    assert code == 0
    assert "--tensor-parallel-size 2" in out
    assert "--quantization fp8" in out


def test_suffix_needs_a_package(export: Any) -> None:
    _, out, _, folder = export("+proposer=suffix")
    assert "pip install arctic-inference" in out
    assert "arctic-inference" in (folder / "vllm-serve.sh").read_text()


def test_nothing_is_loaded(export: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("specflow.targets.hf.load_checkpoint", refuse)
    assert export("+proposer=eagle3")[0] == 0


def test_the_tracker_takes_the_files(export: Any, tmp_path: Path) -> None:
    code, _, _, _ = export("+proposer=ngram", "tracking=mlflow", f"tracking.uri=sqlite:///{tmp_path / 't.db'}")
    assert code == 0
    names = {path.name for path in (tmp_path / "runs").rglob("*") if path.is_file()} or {
        path.name for path in tmp_path.rglob("artifacts/*")
    }
    assert {"vllm.json", "vllm-serve.sh"} <= names
