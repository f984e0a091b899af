"""target.attention: what serves the pages of a target and of its proposer."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specflow.errors import ConfigError
from specflow.kernels import triton_choice
from specflow.targets.base import Taps
from specflow.targets.bundled import BundledOptions, BundledTarget
from specflow.targets.hf import HfOptions, HfTarget
from tests import models
from tests.targets.packing import Runner, limits_for, load, random_prompts


@pytest.mark.parametrize(
    "build",
    [
        models.tiny_gpt_oss,
        pytest.param(models.tiny_gemma2, marks=pytest.mark.slow),
        pytest.param(models.tiny_deepseek_v3, marks=pytest.mark.slow),
    ],
)
def test_logits_do_not_depend_on_it(build: object, tmp_path: Path) -> None:
    """Windows, soft-caps, sinks, keys longer than values; prompts and blocks. The proof runs on the kernels."""
    pytest.importorskip("triton")
    folder = build(tmp_path)  # type: ignore[operator]
    prompts = random_prompts(9, 6)
    logits = []
    for attention in ("torch", "triton"):
        target = load(folder, attention=attention, weight_layout="native")
        assert target.facts.paged_kernels == attention
        logits.append(Runner(target, 2).teacher_force(prompts, [(7, 9), (3, 6)]))
        assert "max difference" in target.describe()["attention proof"]
    for found, expected in zip(*logits, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_fused_layers_use_it(qwen3_folder: Path) -> None:
    pytest.importorskip("triton")
    (prompt,) = random_prompts(8)
    targets = [load(qwen3_folder, attention=attention) for attention in ("torch", "triton")]
    found, expected = (Runner(target, 1).step([(0, prompt)])[0] for target in targets)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    assert targets[1].describe()["layers"].startswith("fused")


def test_what_ran_is_told(qwen3_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """auto never means the interpreter; a wrong choice is refused with the option's name."""
    assert load(qwen3_folder).describe()["attention"] == "paged, plain torch"
    if triton_choice.triton_available():
        assert load(qwen3_folder, attention="triton").describe()["attention"] == "paged, Triton"
        assert BundledTarget(BundledOptions(attention="triton")).options.attention == "triton"
        monkeypatch.setenv("TRITON_INTERPRET", "0")
        with pytest.raises(ConfigError, match=r"target\.attention=triton.*device cpu.*auto or torch"):
            load(qwen3_folder, attention="triton")
    monkeypatch.setattr(triton_choice, "triton_available", lambda: False)
    with pytest.raises(ConfigError, match=r"target\.attention=triton needs the package triton"):
        HfOptions(path="somewhere", attention="triton")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("build", [models.tiny_qwen3, models.tiny_gemma2, models.tiny_gpt_oss])
def test_auto_means_triton_on_a_gpu(build: Any, dtype: Any, tmp_path: Path) -> None:
    """There the proof, which compares with the model's own attention, runs on the kernels."""
    pytest.importorskip("triton")
    device: Any = SimpleNamespace(device=torch.device("cuda"), name="cuda")
    target = HfTarget(HfOptions(path=str(build(tmp_path)), dtype=dtype))
    target.load(device)
    target.attach(replace(limits_for(target), device=device.device), Taps())
    assert target.describe()["attention"] == "paged, Triton"
    assert "max difference" in target.describe()["attention proof"]
