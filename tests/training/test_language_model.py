"""Pre-training on a handful of short files: it learns, it repeats itself exactly, it imitates a target."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from specflow.errors import ConfigError
from specflow.training.distillation import continue_text, divergence, greedy_agreement, write_target_text
from specflow.training.language_model import PretrainOptions, PretrainResult, Progress, learning_rate, pretrain
from specflow.training.token_data import WindowSampler, even_windows, join_rows, random_windows

TEXT = "def add(first, second):\n    return first + second\n\n\nfor step in range(10):\n    print(add(step, 1))\n" * 8


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("corpus")
    (root / "module.py").write_text(TEXT)
    (root / "bisect.py").write_text(TEXT)
    return root


def options(corpus: Path, output: Path, **changes: Any) -> PretrainOptions:
    values: dict[str, Any] = {
        "output": str(output),
        "corpus_root": str(corpus),
        "vocabulary_size": 300,
        "hidden_size": 32,
        "intermediate_size": 64,
        "layers": 2,
        "heads": 2,
        "key_value_heads": 1,
        "head_dim": 16,
        "max_positions": 64,
        "sequence_length": 32,
        "batch_windows": 8,
        "steps": 60,
        "warmup_steps": 5,
        "learning_rate": 1e-2,
        "evaluate_every": 20,
        "log_every": 10,
        "bf16": False,
        "threads": 1,
    }
    return PretrainOptions(**values | changes)


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[PretrainResult, list[Progress]]:
    reports: list[Progress] = []
    result = pretrain(options(corpus, tmp_path_factory.mktemp("target") / "model"), reports.append)
    return result, reports


def test_a_tiny_model_overfits_one_short_text(trained: tuple[PretrainResult, list[Progress]]) -> None:
    result, reports = trained
    assert result.history[0][1] > result.history[-1][1] == pytest.approx(result.held_out_loss, abs=0.05)
    assert result.held_out_loss < 0.8 < math.log(300)
    assert [report.step for report in reports] == [10, 20, 30, 40, 50, 60]
    assert reports[1].held_out_loss == result.history[0][1]
    assert reports[0].held_out_loss is None
    assert result.tokens_seen == 60 * 8 * 32
    assert result.agreement is None


def test_what_is_saved_is_a_hugging_face_folder(trained: tuple[PretrainResult, list[Progress]]) -> None:
    folder = trained[0].output
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    assert model.num_parameters() == trained[0].parameters
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 0


def test_the_same_seed_gives_the_same_weights(corpus: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        pretrain(options(corpus, tmp_path / name, steps=3, seed=seed, dropout=0.1))
    first, again, other = (load_file(tmp_path / name / "model.safetensors") for name in "abc")
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_the_best_weights_are_kept(corpus: Path, tmp_path: Path) -> None:
    result = pretrain(options(corpus, tmp_path / "m", steps=30, evaluate_every=5, learning_rate=0.3))
    assert result.best_step == min(result.history, key=lambda entry: entry[1])[0]


def test_distillation_lowers_the_divergence(
    trained: tuple[PretrainResult, list[Progress]], corpus: Path, tmp_path: Path
) -> None:
    result = pretrain(
        options(
            corpus,
            tmp_path / "draft",
            layers=1,
            distill_from=trained[0].output,
            distill_weight=1.0,
            target_text_tokens=64,
            target_text_prompt=8,
            target_text_length=24,
            target_text_batch=4,
            agreement_prompts=4,
            agreement_prompt_tokens=8,
            agreement_new_tokens=16,
        )
    )
    assert result.history[-1][1] < result.history[0][1] / 1.5
    assert result.target_text_tokens == 2 * 4 * 33
    assert result.agreement is not None
    assert 0.5 < result.agreement <= 1


def test_another_vocabulary_than_the_targets_is_refused(
    trained: tuple[PretrainResult, list[Progress]], corpus: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="share its target's tokenizer"):
        pretrain(options(corpus, tmp_path / "m", distill_from=trained[0].output, tokenizer="zoo:target"))


@pytest.mark.parametrize(
    "changes",
    [{"device": "tpu"}, {"heads": 3, "key_value_heads": 2}, {"sequence_length": 65}, {"steps": 0}, {"dropout": 1.0}],
)
def test_impossible_options_are_refused(corpus: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        options(corpus, Path("m"), **changes)


def test_an_empty_corpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="0 training and 0 held-out"):
        pretrain(options(tmp_path, tmp_path / "m"))


def test_the_rate_rises_then_falls() -> None:
    plan = PretrainOptions(output="m", steps=100, warmup_steps=10, learning_rate=1.0, final_rate_fraction=0.1)
    rates = [learning_rate(plan, step) for step in (1, 10, 55, 100)]
    assert rates == pytest.approx([0.1, 1.0, 0.55, 0.1])


def test_a_cached_continuation_equals_recomputing(trained: tuple[PretrainResult, list[Progress]]) -> None:
    model = AutoModelForCausalLM.from_pretrained(trained[0].output, dtype=torch.float32).eval()
    prompts = torch.tensor([[30, 31, 32], [40, 41, 42]])
    text = continue_text(model, prompts, 5)
    with torch.no_grad():
        again = model(text[:, :-1]).logits.argmax(dim=-1)[:, 2:]
    assert torch.equal(text[:, 3:], again)
    assert greedy_agreement(model, model, prompts, 5, end_of_text=0) == 1.0
    rows = write_target_text(
        model, prompts.flatten().int(), amount=1, prompt_tokens=3, new_tokens=4, batch=2, temperature=1.0, seed=0
    )
    assert rows.shape == (4, 7)


def test_divergence_is_zero_only_for_equal_distributions() -> None:
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    assert divergence(logits, logits + 1.0).item() == pytest.approx(0, abs=1e-6)
    assert divergence(logits, -logits).item() > 0.1


def test_windows() -> None:
    tokens = torch.arange(20, dtype=torch.int32)
    assert even_windows(tokens, 5).tolist() == torch.arange(20).view(4, 5).tolist()
    assert even_windows(tokens, 3, count=2)[:, 0].tolist() == [0, 10]
    assert join_rows(torch.tensor([[1, 2], [3, 4]]), 0).tolist() == [1, 2, 0, 3, 4, 0]
    batch = WindowSampler([tokens, tokens + 100], seed=0).batch(5, 4)
    assert batch.shape == (5, 4)
    assert (batch[:, 0] >= 100).sum().item() == 2
    assert torch.equal(batch.diff(dim=1), torch.ones(5, 3, dtype=torch.int64))
    with pytest.raises(ConfigError, match="fewer than one window"):
        random_windows(tokens, 1, 21, torch.Generator())
