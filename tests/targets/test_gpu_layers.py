"""Layers of few launches, by Triton: interpreted on a CPU, compiled on a GPU; used where they are proven."""

import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specflow.targets import linear_choice
from specflow.targets import transformers_facts as facts
from specflow.targets.base import Taps
from specflow.targets.gpu_layers import GpuLayers, gpu_layers
from specflow.targets.hf import HfOptions, HfTarget
from specflow.targets.linear_choice import BUCKETS, FEW, PRODUCTS, Choices, candidates
from specflow.targets.probe import probe_layers
from tests import models
from tests.targets.packing import Runner, alone, eager_model, limits_for, load, random_prompts

pytest.importorskip("triton")

from specflow.kernels import few_rows_triton
from specflow.kernels.few_rows_triton import FewRowsShape

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="runs the kernels on a CPU, in Triton's interpreter")
PLAIN = [models.tiny_llama, models.tiny_mistral, models.tiny_qwen2, models.tiny_qwen3]
OTHERS = [models.tiny_gemma2, models.tiny_gpt_oss, models.tiny_qwen3_moe]
# Launch shapes for tiny matrices, for all products and up to as many rows as the kernel serves.
OURS = Choices({name: dict.fromkeys((*FEW, 32, 64), FewRowsShape(block_n=64, block_k=64)) for name in PRODUCTS})


@pytest.fixture(scope="module")
def small_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.tiny_llama(tmp_path_factory.mktemp("llama"), layers=2)


def loaded(folder: Path, choices: Choices | None = None, **options: Any) -> HfTarget:
    target = load(folder, attention="triton", **options)
    if choices is not None:
        assert isinstance(target._fused, GpuLayers)
        target._fused.linears.choices = choices
    return target


@interpreted
@pytest.mark.parametrize(
    ("build", "choices"),
    [
        *((build, OURS) for build in PLAIN),
        (models.tiny_qwen3, None),
        *(pytest.param(build, None, marks=pytest.mark.slow) for build in PLAIN[:-1]),
    ],
    ids=lambda value: value.__name__ if callable(value) else "torch's products" if value is None else "ours",
)
def test_plain_families_agree(build: Callable[..., Path], choices: Choices | None, tmp_path: Path) -> None:
    """Same logits and hidden states as the layers of transformers, to rounding; prompts and single tokens."""
    folder = build(tmp_path, layers=2)
    (prompt,) = random_prompts(21)
    taps = Taps(layers=(-1, 0, 1), last_hidden=True)
    ours, native = loaded(folder, choices), load(folder, weight_layout="native")
    runners = [Runner(target, 1, taps) for target in (ours, native)]
    for span in ((0, prompt[:15]), (15, prompt[15:20]), (20, prompt[20:])):
        found, expected = (runner.output([span]) for runner in runners)
        close = {"rtol": 1e-4, "atol": 1e-4}
        torch.testing.assert_close(found.logits, expected.logits, **close)
        torch.testing.assert_close(found.last_hidden, expected.last_hidden, **close)
        for layer in taps.layers:
            torch.testing.assert_close(found.hidden[layer], expected.hidden[layer], **close)
    assert ours.describe()["layers"].startswith("fused")
    assert ours.describe()["products of few rows"].startswith("own kernel" if choices else "torch")


@interpreted
@pytest.mark.parametrize("dtype", [pytest.param("float16", marks=pytest.mark.slow), "bfloat16"])
def test_half_precision(dtype: str, tmp_path: Path) -> None:
    """The proof holds for both ways of the products."""
    folder, (prompt,) = models.tiny_qwen3(tmp_path, layers=1), random_prompts(9)
    for choices in (None, OURS):
        target = loaded(folder, choices, dtype=dtype)
        (logits,) = Runner(target, 1).step([(0, prompt)])
        assert target.describe()["layers"].startswith("fused")
        assert torch.isfinite(logits).all()


@interpreted
@pytest.mark.parametrize("build", [OTHERS[0], *(pytest.param(build, marks=pytest.mark.slow) for build in OTHERS[1:])])
def test_other_families_run_as_transformers_wrote_them(build: Callable[..., Path], tmp_path: Path) -> None:
    target = loaded(build(tmp_path))
    target.attach(limits_for(target), Taps())
    assert target.describe()["layers"] == "as transformers runs them"


@pytest.mark.parametrize(
    "changes",
    [{"attention_bias": True}, {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}],
    ids=["bias", "rotary"],
)
def test_what_is_not_handled_prevents_it(changes: dict[str, Any], tmp_path: Path) -> None:
    """A bias behind attention; a rotary embedding whose table depends on the batch."""
    model = eager_model(models.tiny_llama(tmp_path, **changes))
    assert gpu_layers(model, probe_layers(model)) is None


def test_weights_become_views_without_changing(small_llama: Path) -> None:
    """No second copy of a matrix, same values, and the model's own layers still work."""
    model, reference = eager_model(small_llama), eager_model(small_llama)
    joined = gpu_layers(model, probe_layers(model))
    assert joined is not None
    first = joined.layers[0]
    attention, mlp = first.module.self_attn, first.module.mlp
    parts = [(attention.q_proj, first.qkv), (attention.v_proj, first.qkv), (mlp.up_proj, first.gate_up)]
    for projection, whole in [*parts, (attention.o_proj, first.output), (mlp.down_proj, first.down)]:
        assert projection.weight.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    for (name, before), (same, after) in zip(reference.state_dict().items(), model.state_dict().items(), strict=True):
        assert name == same
        assert torch.equal(before, after)
    (prompt,) = random_prompts(12)
    torch.testing.assert_close(alone(model, prompt), alone(reference, prompt), rtol=1e-4, atol=1e-4)


@interpreted
def test_layers_that_differ_are_dropped_and_named(small_llama: Path) -> None:
    """When the proof fails with them and holds without, the model's own layers run, and the report says why."""
    target = loaded(small_llama)
    assert isinstance(target._fused, GpuLayers)
    first, *rest = target._fused.layers
    target._fused.layers = (replace(first, down=first.down * 1.1), *rest)
    (prompt,) = random_prompts(12)
    (logits,) = Runner(target, 1).step([(0, prompt)])
    assert target.describe()["layers"] == "as transformers runs them (the fused ones gave other logits)"
    torch.testing.assert_close(logits, alone(eager_model(small_llama), prompt), rtol=1e-4, atol=1e-4)


@interpreted
def test_detaching_gives_every_part_back(small_llama: Path) -> None:
    """Afterwards the classes' own forward shows again, at layers, rotary embedding, norm and head."""
    target = loaded(small_llama, OURS)
    target.attach(limits_for(target), Taps())
    replaced = [name for name, module in target.model.named_modules() if "forward" in vars(module)]
    assert {"lm_head", "model.norm", "model.rotary_emb", "model.layers.1"} <= set(replaced)
    target.detach()
    assert not any("forward" in vars(module) for module in target.model.modules())


@interpreted
def test_a_stranger_between_two_layers_is_heard(small_llama: Path) -> None:
    """The norm that a layer left is used for its own output only."""
    target, (prompt,) = loaded(small_llama), random_prompts(8)
    runner = Runner(target, 1)
    layers = facts.decoder_layers(target.model)
    assert layers is not None
    (before,) = runner.step([(0, prompt)])
    handle = layers[0].register_forward_hook(lambda _module, _inputs, output: output * 2)
    (after,) = runner.step([(0, prompt)])
    handle.remove()
    model = eager_model(small_llama)
    facts.decoder_layers(model)[0].register_forward_hook(lambda _module, _inputs, output: output * 2)
    torch.testing.assert_close(after, alone(model, prompt), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(before, after)


def test_choices_by_rows() -> None:
    """The smallest bucket that holds the rows; beyond the last, and where nothing was chosen, torch."""
    small = FewRowsShape(block_n=32)
    choices = Choices({"down": {8: small}})
    assert [choices.shape("down", rows) for rows in (1, 2, 8, 9, 33)] == [None, small, small, None, None]
    assert choices.shape("qkv", 8) is None
    assert str(choices) == "own kernel up to so many rows: down 8; else torch"
    assert str(Choices()) == "torch"


def test_changes_of_choices() -> None:
    """Of one bucket, several products at once; None hands back to torch, and leaves no trace."""
    small, large = FewRowsShape(block_n=32), FewRowsShape(block_n=64)
    choices = Choices({"down": {8: small}}).replaced([("down", large), ("qkv", small)], 1)
    assert choices.shapes == {"down": {8: small, 1: large}, "qkv": {1: small}}
    assert choices.replaced([("down", None), ("qkv", None)], 1) == Choices({"down": {8: small}})
    assert Choices().replaced([("down", None)], 1) == Choices()


@pytest.mark.parametrize("early", [False, True])
def test_streams_are_tried_where_a_kernel_can_start_early(early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """First, and beside one shape that needs no Gluon; nothing is tried twice."""
    monkeypatch.setattr(
        "specflow.kernels.launch_overlap.early_start", lambda _device: {"launch_pdl": True} if early else {}
    )
    for name in PRODUCTS:
        for rows in FEW:
            shapes = candidates(name, rows, torch.device("cpu"))
            assert [shape.stream for shape in shapes] == [early] * (len(shapes) - 1) + [False]
            assert len(set(shapes)) == len(shapes)


def test_many_rows_are_tried_where_their_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nowhere else; up to 64 rows for the head as well, and all fits a model of Qwen3-8B's sizes."""
    sizes = {"qkv": (6144, 4096), "output": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
    sizes["head"] = (151936, 4096)
    for allowed in (False, True):
        monkeypatch.setattr(linear_choice, "has_group_products", lambda _device, allowed=allowed: allowed)
        for name, rows in itertools.product(PRODUCTS, set(BUCKETS) - set(FEW)):
            weight = torch.empty(sizes[name], dtype=torch.bfloat16, device="meta")
            shapes = candidates(name, rows, torch.device("cpu"))
            assert len(shapes) == (allowed and (rows <= 64 or name != "head"))
            assert all(shape.fits(weight, name == "gate_up") for shape in shapes)


def test_nothing_is_measured_off_a_gpu(small_llama: Path) -> None:
    model = eager_model(small_llama)
    joined = gpu_layers(model, probe_layers(model))
    assert joined is not None
    joined.choose_linears()
    assert joined.linears.choices.shapes == {}


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("right", [True, False])
def test_what_makes_the_chain_faster_is_chosen(right: bool, small_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here: `down`, and no other product; and nothing that gives other results than torch."""
    model = eager_model(small_llama)
    joined = gpu_layers(model, probe_layers(model))
    assert joined is not None

    def captured(run: Callable[[], torch.Tensor]) -> float:
        assert torch.isfinite(run()).all()
        chosen = joined.linears.choices.shapes
        return 10.0 - len(chosen.get("down", {})) + len(chosen.get("qkv", {})) - 0.001 * len(chosen.get("head", {}))

    if not right:
        real = few_rows_triton.few_rows_linear
        monkeypatch.setattr(few_rows_triton, "few_rows_linear", lambda *args, **rest: real(*args, **rest) * 1.1)
    monkeypatch.setattr(linear_choice, "can_measure", lambda _like: True)
    monkeypatch.setattr(linear_choice, "captured", captured)
    monkeypatch.setattr(linear_choice, "times_of", list)
    joined.choose_linears()
    found = joined.linears.choices.shapes
    assert {name: set(rows) for name, rows in found.items()} == ({"down": set(FEW)} if right else {})


class AtHome:
    """A launch shape that only the thread it was made in can launch."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()

    def fits(self, weight: torch.Tensor, gated: bool) -> bool:
        return True

    def product(
        self, values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, gated: bool = False
    ) -> torch.Tensor:
        if threading.get_ident() != self.thread:
            raise RuntimeError("invalid device context")
        return values @ weight.t()


def test_a_candidate_is_judged_where_it_will_be_launched(small_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that compile may lack the device's context when nothing is left to compile: heads got torch's products
    where the target before them, of the same sizes, got ours."""
    model = eager_model(small_llama)
    joined = gpu_layers(model, probe_layers(model))
    assert joined is not None
    monkeypatch.setattr(linear_choice, "candidates", lambda *_: (AtHome(),))
    found = linear_choice._right_ones(("qkv", "down"), 128, joined.layers, None, joined.linears)
    assert [name for name, _ in found] == ["qkv", "down"]


GPU: Any = SimpleNamespace(device=torch.device("cuda"), name="cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("build", PLAIN)
def test_compiled_layers_hold_their_proof(build: Callable[..., Path], dtype: Any, tmp_path: Path) -> None:
    """As chosen by measurement, and with our kernel for every product."""
    target = HfTarget(HfOptions(path=str(build(tmp_path, layers=2)), dtype=dtype))
    target.load(GPU)
    for choices in (None, OURS):
        assert isinstance(target._fused, GpuLayers)
        target._fused.linears.choices = choices or target._fused.linears.choices
        target._proof = None
        target.attach(replace(limits_for(target), device=GPU.device), Taps())
        assert target.describe()["layers"].startswith("fused")
