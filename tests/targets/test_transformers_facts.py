"""One test per assumption about the installed transformers."""

import inspect
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.masking_utils import AttentionMaskInterface

from specflow.targets import transformers_facts as facts
from tests import models
from tests.targets.packing import eager_model

Calls = list[tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]]


def record(model: Any, tokens: int = 5) -> Calls:
    """Every call that reaches a registered attention function in one forward pass."""
    calls: Calls = []

    def attention(*arguments: Any, **keywords: Any) -> tuple[torch.Tensor, None]:
        calls.append((arguments[0], arguments[1:], keywords))
        query, _, value = arguments[1:4]
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None

    name = facts.unique_attention_name()
    facts.register_attention(name, attention)
    try:
        facts.use_attention(model, name)
        positions = torch.arange(tokens).unsqueeze(0)
        with torch.inference_mode():
            model(input_ids=positions + 1, position_ids=positions, use_cache=False)
    finally:
        facts.use_attention(model, "eager")
        facts.unregister_attention(name)
    return calls


@pytest.fixture(scope="module")
def llama(llama_folder: Path) -> Any:
    """A tiny Llama, changed by nobody."""
    return eager_model(llama_folder)


def test_registration_reaches_all_instances_and_can_be_undone() -> None:
    """The class-wide table is what modules read."""
    name = facts.unique_attention_name()
    facts.register_attention(name, lambda *_: None)  # type: ignore[arg-type, return-value]
    assert name in transformers.AttentionInterface().valid_keys()
    assert name in facts.registered_attention()
    facts.unregister_attention(name)
    facts.unregister_attention(name)
    assert name not in transformers.AttentionInterface().valid_keys()


def test_names_are_unique_and_mean_nothing_to_transformers() -> None:
    """No part of a name triggers a kernel package or a hub download."""
    names = {facts.unique_attention_name() for _ in range(10)}
    assert len(names) == 10
    assert not any(part in name for name in names for part in facts.RESERVED_IN_NAMES)
    for part in facts.RESERVED_IN_NAMES:
        with pytest.raises(ValueError, match="transformers interprets"):
            facts.register_attention(f"my_{part}_attention", lambda *_: None)  # type: ignore[arg-type, return-value]


def test_call_contract(llama: Any) -> None:
    """Module, then query, key, value [1, H, T, D] with unrepeated KV heads, then a mask; scaling by keyword."""
    calls = record(llama)
    assert len(calls) == 4
    module, (query, key, value, mask), keywords = calls[0]
    assert isinstance(module, torch.nn.Module)
    assert query.shape == (1, 4, 5, 16)
    assert key.shape == value.shape == (1, 2, 5, 16)
    assert mask is None
    assert keywords["scaling"] == pytest.approx(0.25)


def test_no_mask_without_a_mask_function(tmp_path: Path) -> None:
    """Also in models with several kinds of masks."""
    assert "specflow" not in " ".join(AttentionMaskInterface().valid_keys())
    for build in (models.tiny_gemma3, models.tiny_gpt_oss, models.tiny_mistral):
        for _, arguments, _ in record(eager_model(build(tmp_path / build.__name__))):
            assert arguments[3] is None


@pytest.mark.parametrize(
    ("build", "keyword", "kinds"),
    [
        (models.tiny_mistral, "sliding_window", {8}),
        (models.tiny_gemma2, "sliding_window", {8, None}),
        (models.tiny_gemma2, "softcap", {5.0}),
        (models.tiny_gemma3, "sliding_window", {8, None}),
        (models.tiny_gpt_oss, "sliding_window", {8, None}),
        (models.tiny_qwen3, "sliding_window", {None}),
    ],
)
def test_rules_arrive_as_keywords(build: Any, keyword: str, kinds: set[Any], tmp_path: Path) -> None:
    """Window and soft-cap under these names."""
    assert {keywords.get(keyword) for _, _, keywords in record(eager_model(build(tmp_path)))} == kinds


def test_sinks_arrive_as_a_tensor_per_head(tmp_path: Path) -> None:
    """GPT-OSS: one logit per query head, named s_aux."""
    for _, _, keywords in record(eager_model(models.tiny_gpt_oss(tmp_path))):
        assert keywords["s_aux"].shape == (4,)


def test_scaling_is_the_models_own(tmp_path: Path) -> None:
    """Gemma-2 scales by a config value, not by the head size."""
    for _, _, keywords in record(eager_model(models.tiny_gemma2(tmp_path))):
        assert keywords["scaling"] == pytest.approx(24**-0.5)


def test_sharing_layers_pass_the_donors_tensor(tmp_path: Path) -> None:
    """Gemma-4: this is how a shared layer is recognised."""
    keys = [arguments[1] for _, arguments, _ in record(eager_model(models.tiny_gemma4(tmp_path)))]
    addresses = [key.data_ptr() for key in keys]
    assert addresses[2] == addresses[0]
    assert addresses[3] == addresses[1]
    assert addresses[0] != addresses[1]


def test_current_attention_is_what_was_set(llama: Any) -> None:
    """Read back from the config that layers look at."""
    assert facts.current_attention(llama) == "eager"


def test_models_without_the_interface_only_warn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Bloom keeps its own attention in silence, which is why layers are probed."""
    config = transformers.BloomConfig(vocab_size=384, hidden_size=32, n_layer=2, n_head=2)
    model = eager_model(models.save_model(tmp_path, config, 0))
    with caplog.at_level(logging.WARNING):
        assert record(model) == []
    assert not caplog.records


def test_decoder_layers_in_order(llama: Any) -> None:
    """The list of num_hidden_layers modules inside the decoder."""
    assert facts.decoder_layers(llama) is llama.model.layers
    assert facts.decoder(llama) is llama.model


def test_decoder_of_a_model_with_several_towers() -> None:
    """A vision-language model: the language tower's layers, its config and its vocabulary."""
    text = transformers.Qwen3Config(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32, vocab_size=99
    ).to_dict()
    vision = transformers.PixtralVisionConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    config = transformers.LlavaConfig(text_config=text, vision_config=vision.to_dict())
    model = transformers.LlavaForConditionalGeneration(config)
    layers = facts.decoder_layers(model)
    assert layers is not None
    assert len(layers) == 3
    assert type(layers[0]).__name__ == "Qwen3DecoderLayer"
    assert facts.text_config(model).vocab_size == 99


def test_mixer_and_recurrence_by_class(llama: Any) -> None:
    """The mixing part of a layer, and whether its name tells of a state."""
    assert facts.mixer(llama.model.layers[0]) is llama.model.layers[0].self_attn
    assert not facts.is_recurrent(llama.model.layers[0].self_attn)
    config = transformers.MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, state_size=4)
    layer = facts.decoder_layers(transformers.MambaForCausalLM(config))[0]
    assert facts.is_recurrent(facts.mixer(layer))


def test_layer_types_that_are_known(tmp_path: Path) -> None:
    """Full and sliding layers pass, chunked ones are found."""
    assert facts.unknown_layer_type(eager_model(models.tiny_gemma3(tmp_path)).config) is None
    chunked = transformers.Llama4TextConfig(num_hidden_layers=4)
    assert facts.unknown_layer_type(chunked) == (0, "chunked_attention")


def test_length_dependent_rope() -> None:
    """Type and limit are read from either spelling and from parameters per kind of layer."""
    plain = transformers.LlamaConfig(rope_parameters={"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4})
    assert facts.length_dependent_rope(plain) is None
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    assert facts.length_dependent_rope(
        transformers.LlamaConfig(rope_parameters=dynamic, max_position_embeddings=128)
    ) == ("dynamic", 128)
    factors = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48, "rope_theta": 1e4}
    longrope = {"rope_type": "longrope", "original_max_position_embeddings": 64} | factors
    assert facts.length_dependent_rope(
        transformers.Phi3Config(rope_parameters=longrope, original_max_position_embeddings=64)
    ) == ("longrope", 64)


def test_forward_selects_rows(llama: Any) -> None:
    """`logits_to_keep` takes an index tensor, an empty one too."""
    assert facts.selects_rows(llama)
    ids = torch.arange(1, 7).unsqueeze(0)
    with torch.inference_mode():
        everything = llama(ids).logits
        for rows in ([1, 4], []):
            index = torch.tensor(rows, dtype=torch.int64)
            torch.testing.assert_close(llama(ids, logits_to_keep=index).logits, everything[:, index])


def test_decoder_output_has_the_normed_states(llama: Any) -> None:
    """What the head reads, at all rows."""
    ids = torch.arange(1, 7).unsqueeze(0)
    with torch.inference_mode():
        states = facts.decoder(llama)(ids).last_hidden_state
        torch.testing.assert_close(llama.lm_head(states), llama(ids).logits)


def test_use_cache_false_makes_no_cache(llama: Any) -> None:
    """Otherwise a second cache would fill beside the pages."""
    with torch.inference_mode():
        assert llama(torch.arange(1, 7).unsqueeze(0), use_cache=False).past_key_values is None


def test_experts(llama: Any, tmp_path: Path) -> None:
    """A dense model has none; a mixture names the implementation it uses."""
    assert facts.experts_implementation(llama) is None
    mixture = eager_model(models.tiny_qwen3_moe(tmp_path))
    assert facts.can_choose_experts(mixture)
    mixture.set_experts_implementation("batched_mm")
    assert facts.experts_implementation(mixture) == "batched_mm"


def test_quantisation_of_plain_weights(llama: Any) -> None:
    """None unless transformers says so."""
    assert facts.quantisation(llama) is None
    llama.config.quantization_config = {"quant_method": "fp8"}
    assert facts.quantisation(llama) is None  # dequantised on loading: the config still names the method
    llama.is_quantized = True
    assert facts.quantisation(llama) == "fp8"
    del llama.config.quantization_config, llama.is_quantized


def test_loading_interface() -> None:
    """Keywords of `from_pretrained` that specflow passes and that its `**kwargs` would otherwise swallow."""
    source = inspect.getsource(transformers.PreTrainedModel.from_pretrained)
    for keyword in ("output_loading_info", "attn_implementation", "dtype", "gguf_file"):
        assert keyword in source


def test_the_ends_of_plain_models(llama: Any, tmp_path: Path) -> None:
    """A rotary embedding that gives cos and sin of positions, a final norm of a known class, and nothing else."""
    assert facts.has_plain_ends(llama)
    assert type(facts.final_norm(llama)).__name__ in facts.PLAIN_NORMS
    assert not facts.has_plain_ends(eager_model(models.tiny_gemma2(tmp_path)))
    positions = torch.tensor([[3, 0, 11]])
    like = torch.zeros(2, 4)
    cos, sin = facts.rotary_embedding(llama)(like, positions)
    rows = facts.rotary_rows(facts.rotary_embedding(llama), 12, like)[positions[0], :, 0]
    half = sin.shape[-1] // 2
    torch.testing.assert_close(rows[:, 0], cos[0])
    torch.testing.assert_close(rows[:, 1], torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1))
