"""What a loaded target says about itself, weights in memory, and the bundled model."""

from pathlib import Path

import pytest
import torch
import transformers

from specflow.checkpoints.weights_hash import weights_hash
from specflow.targets.bundled import BundledOptions, BundledTarget
from specflow.targets.weight_layout import lay_out_weights
from tests import models
from tests.targets.packing import CPU, Runner, alone, eager_model, load, random_prompts


def test_facts_of_a_llama(llama_folder: Path) -> None:
    """Sizes, ids and bytes, as the fixtures define them."""
    facts = load(llama_folder).facts
    assert facts.architecture == "LlamaForCausalLM"
    assert (facts.vocab_size, facts.num_token_ids, facts.hidden_size, facts.num_layers) == (384, 384, 64, 4)
    assert (facts.max_model_len, facts.eos_token_ids, facts.dtype) == (512, (0,), torch.float32)
    assert facts.kv_bytes_per_token == 4 * 2 * 2 * 16 * 4  # layers, key and value, heads, size, bytes
    assert facts.num_parameters == eager_model(llama_folder).num_parameters()


def test_dtype_auto_is_the_checkpoints_own(tmp_path: Path) -> None:
    """A bfloat16 checkpoint stays bfloat16 unless float32 is asked for."""
    folder = models.save_model(tmp_path, transformers.LlamaConfig(**_SMALL), 0, torch.bfloat16)
    assert load(folder).facts.dtype == torch.bfloat16
    target = load(folder, dtype="float32")
    assert target.facts.dtype == torch.float32
    assert target.facts.kv_bytes_per_token == 2 * load(folder).facts.kv_bytes_per_token


def test_padded_vocabulary(tmp_path: Path) -> None:
    """Columns past the tokenizer's ids are padding."""
    folder = models.tiny_llama(tmp_path)
    models.make_tokenizer(300).save_pretrained(folder)
    facts = load(folder).facts
    assert (facts.vocab_size, facts.num_token_ids) == (384, 300)


def test_eos_ids_of_config_and_generation_config(tmp_path: Path) -> None:
    """Chat models list several ids, in one file or the other."""
    folder = models.tiny_llama(tmp_path, eos_token_id=[0, 5])
    transformers.GenerationConfig(eos_token_id=[0, 7]).save_pretrained(folder)
    assert load(folder).facts.eos_token_ids == (0, 5, 7)


def test_context_of_length_dependent_rope(tmp_path: Path) -> None:
    """The limit is where requests of a batch would begin to influence each other, and the report says why."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    target = load(models.tiny_llama(tmp_path, rope_parameters=rope, max_position_embeddings=64))
    assert target.facts.max_model_len == 64
    assert "dynamic" in target.describe()["context"]


def test_hash_tells_weights_apart() -> None:
    """One changed value, swapped values, another dtype or name; not the layout in memory."""
    weights = {"a": torch.randn(40, 50), "b": torch.randn(7).bfloat16()}
    reference = weights_hash(weights)
    assert reference == weights_hash({name: tensor.clone() for name, tensor in reversed(weights.items())})
    assert reference == weights_hash(weights | {"a": weights["a"].t().contiguous().t()})
    changed = weights["a"].clone()
    changed[17, 31] += 1
    swapped = weights["a"].flip(0)
    for other in (changed, swapped, weights["a"].double()):
        assert weights_hash(weights | {"a": other}) != reference
    assert weights_hash({"c": weights["a"], "b": weights["b"]}) != reference


def test_hash_does_not_depend_on_the_layout(llama_folder: Path) -> None:
    """It is of the checkpoint, not of what we made of it."""
    hashes = {load(llama_folder, weight_layout=layout).facts.checkpoint_hash for layout in ("auto", "native")}
    assert len(hashes) == 1


@pytest.mark.parametrize("build", [models.tiny_llama, models.tiny_gemma2])
def test_transposed_weights_give_the_same_logits(build: object, tmp_path: Path) -> None:
    """Also where the head is tied to the embedding (Gemma-2): values, shapes, names and the tie stay."""
    folder = build(tmp_path)  # type: ignore[operator]
    (prompt,) = random_prompts(14)
    native, auto = load(folder, weight_layout="native"), load(folder)
    assert native.describe()["weight layout"] == "as loaded"
    assert "29 of 29" in auto.describe()["weight layout"]
    torch.testing.assert_close(
        Runner(auto, 1).step([(0, prompt)]), Runner(native, 1).step([(0, prompt)]), rtol=1e-4, atol=1e-4
    )
    for (name, before), (same, after) in zip(
        native.model.state_dict().items(), auto.model.state_dict().items(), strict=True
    ):
        assert name == same
        assert torch.equal(before, after)
    head, embedding = auto.model.get_output_embeddings().weight, auto.model.get_input_embeddings().weight
    assert (head is embedding) == auto.model.config.tie_word_embeddings
    assert head.stride() == (1, head.shape[0])


def test_layout_leaves_other_weights_alone() -> None:
    """Half precision, subclasses of Linear (quantised layers) and embeddings are not touched."""

    class Quantised(torch.nn.Linear):
        pass

    model = torch.nn.ModuleList([torch.nn.Linear(3, 5).bfloat16(), Quantised(3, 5), torch.nn.Embedding(5, 3)])
    assert str(lay_out_weights(model, "auto")) == "as loaded"
    assert all(module.weight.is_contiguous() for module in model)


def test_bundled_target_is_a_folder_like_any_other(qwen3_folder: Path) -> None:
    """Same class, float32 by default, few options."""
    target = BundledTarget(BundledOptions(), folder=qwen3_folder)
    target.load(CPU)
    (prompt,) = random_prompts(14)
    (logits,) = Runner(target, 1).step([(0, prompt)])
    torch.testing.assert_close(logits, alone(eager_model(qwen3_folder), prompt), rtol=1e-4, atol=1e-4)


def test_the_bundled_checkpoint_loads() -> None:
    """The folder inside the package is complete, and its model passes the proof."""
    target = BundledTarget(BundledOptions())
    target.load(CPU)
    assert target.facts.architecture == "Qwen3ForCausalLM"
    prompt = torch.tensor(target.tokenizer("def main(").input_ids)
    assert torch.isfinite(Runner(target, 1).step([(0, prompt)])[0]).all()
    assert "max difference" in target.describe()["attention proof"]


_SMALL = {
    "vocab_size": 384,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "eos_token_id": 0,
    "bos_token_id": None,
}
