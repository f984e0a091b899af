"""Plain layers in fewer operations: used where they are proven, and nowhere else."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from specflow.targets import transformers_facts as facts
from specflow.targets.base import Taps
from specflow.targets.fused_layers import fuse_layers
from specflow.targets.probe import probe_layers
from tests import models
from tests.targets.packing import Runner, alone, eager_model, limits_for, load, random_prompts

PLAIN = [models.tiny_llama, models.tiny_mistral, models.tiny_qwen2, models.tiny_qwen3]
OTHERS = [models.tiny_gemma2, models.tiny_gemma3, models.tiny_gpt_oss, models.tiny_qwen3_moe, models.tiny_deepseek_v3]


@pytest.mark.parametrize("build", PLAIN)
def test_plain_families_are_fused_and_agree(build: Callable[..., Path], tmp_path: Path) -> None:
    """Same logits and hidden states as the layers of transformers, to rounding."""
    folder = build(tmp_path)
    (prompt,) = random_prompts(30)
    taps = Taps(layers=(-1, 1, 3), last_hidden=True)
    fused, native = load(folder), load(folder, weight_layout="native")
    found, expected = (Runner(target, 1, taps).output([(0, prompt)]) for target in (fused, native))
    assert fused.describe()["layers"].startswith("fused")
    assert native.describe()["layers"].startswith("as transformers")
    close = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(found.logits, expected.logits, **close)
    torch.testing.assert_close(found.last_hidden, expected.last_hidden, **close)
    for layer in taps.layers:
        torch.testing.assert_close(found.hidden[layer], expected.hidden[layer], **close)


@pytest.mark.parametrize("build", OTHERS)
def test_other_families_run_as_transformers_wrote_them(build: Callable[..., Path], tmp_path: Path) -> None:
    """Anything a plain layer does not have keeps the model's own code."""
    target = load(build(tmp_path))
    target.attach(limits_for(target), Taps())
    assert target.describe()["layers"].startswith("as transformers")


def test_no_fusing_without_proof_or_in_half_precision(llama_folder: Path) -> None:
    """The proof is what makes it safe; in bfloat16 the norms would round elsewhere."""
    for options in ({"prove": False}, {"dtype": "bfloat16"}):
        target = load(llama_folder, **options)
        target.attach(limits_for(target), Taps())
        assert target.describe()["layers"].startswith("as transformers")


def test_biases_that_are_not_handled_prevent_it(tmp_path: Path) -> None:
    """A bias on the output projection has no place in the fused layer."""
    folder = models.tiny_llama(tmp_path, attention_bias=True)
    target = load(folder)
    (prompt,) = random_prompts(12)
    (logits,) = Runner(target, 1).step([(0, prompt)])
    assert target.describe()["layers"].startswith("as transformers")
    torch.testing.assert_close(logits, alone(eager_model(folder), prompt), rtol=1e-4, atol=1e-4)


def test_weights_become_views_without_changing(llama_folder: Path) -> None:
    """No second copy of a matrix, same values, and the model's own layers still work."""
    model, reference = eager_model(llama_folder), eager_model(llama_folder)
    (first, *_) = fuse_layers(model, probe_layers(model))
    attention = first.module.self_attn
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
        assert projection.weight.untyped_storage().data_ptr() == first.qkv.untyped_storage().data_ptr()
    for (name, before), (same, after) in zip(reference.state_dict().items(), model.state_dict().items(), strict=True):
        assert name == same
        assert torch.equal(before, after)
    (prompt,) = random_prompts(12)
    torch.testing.assert_close(alone(model, prompt), alone(reference, prompt), rtol=1e-4, atol=1e-4)


def test_fused_layers_that_differ_are_dropped(llama_folder: Path) -> None:
    """When the proof fails with them and holds without, the model's own layers run, and the report says so."""
    target = load(llama_folder)
    first, *rest = target._fused
    target._fused = (replace(first, down=first.down * 1.1), *rest)
    (prompt,) = random_prompts(12)
    (logits,) = Runner(target, 1).step([(0, prompt)])
    assert target.describe()["layers"].startswith("as transformers")
    torch.testing.assert_close(logits, alone(eager_model(llama_folder), prompt), rtol=1e-4, atol=1e-4)


def test_detaching_gives_the_layers_back(llama_folder: Path) -> None:
    """Afterwards the class's own forward shows again."""
    target = load(llama_folder)
    target.attach(limits_for(target), Taps())
    layers = facts.decoder_layers(target.model)
    assert layers is not None
    assert all("forward" in vars(layer) for layer in layers)
    target.detach()
    assert not any("forward" in vars(layer) for layer in layers)


def test_plain_layer_classes_exist() -> None:
    """The allowed names are classes of the installed transformers, with the parts the fused layer reads."""
    for config in (
        transformers.LlamaConfig,
        transformers.MistralConfig,
        transformers.Qwen2Config,
        transformers.Qwen3Config,
    ):
        small = config(
            vocab_size=16,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=4,
            intermediate_size=8,
        )
        layer = facts.decoder_layers(transformers.AutoModelForCausalLM.from_config(small))[0]
        assert type(layer).__name__ in facts.PLAIN_DECODER_LAYERS
        assert layer.input_layernorm.variance_epsilon == small.rms_norm_eps
        assert facts.is_silu(layer.mlp.act_fn)
