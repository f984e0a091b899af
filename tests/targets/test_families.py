"""Packed, paged and multi-token through the engine's attention equals each sequence alone in transformers."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from specflow.errors import ConfigError, UnsupportedModelError
from specflow.targets import transformers_facts as facts
from specflow.targets.base import Taps
from tests import models
from tests.targets.packing import Runner, alone, eager_model, limits_for, load, random_prompts

FAMILIES = {
    "llama": models.tiny_llama,
    "mistral": models.tiny_mistral,
    "qwen2": models.tiny_qwen2,
    "qwen3": models.tiny_qwen3,
    "gemma2": models.tiny_gemma2,
    "gemma3": models.tiny_gemma3,
    "gemma4": models.tiny_gemma4,
    "gpt_oss": models.tiny_gpt_oss,
    "qwen3_moe": models.tiny_qwen3_moe,
    "deepseek_v3": models.tiny_deepseek_v3,
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved tiny model of each family."""
    return FAMILIES[request.param](tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize(("shuffled", "prove"), [(True, True), (True, False), (False, True)])
def test_ragged_chunks_then_blocks_equal_eager(family: Path, shuffled: bool, prove: bool) -> None:
    """Prompt chunks, multi-token blocks and single tokens of three requests, longer than every window of 8.

    With the proof, plain layers run fused; without it, as transformers wrote them.
    """
    prompts = random_prompts(12, 14, 30)
    reference = eager_model(family)
    runner = Runner(load(family, prove=prove), 3, shuffled=shuffled)
    found = runner.teacher_force(prompts, cuts=[(7, 12), (3, 14), (14, 19)])
    found[2] = torch.cat(
        [found[2], runner.step([(0, prompts[0][:0]), (0, prompts[1][:0]), (19, prompts[2][19:20])])[0]]
    )
    found[2] = torch.cat([found[2], runner.step([(0, prompts[0][:0]), (0, prompts[1][:0]), (20, prompts[2][20:])])[0]])
    for prompt, logits in zip(prompts, found, strict=True):
        torch.testing.assert_close(logits, alone(reference, prompt), rtol=1e-4, atol=1e-4)


def test_rejected_tokens_leave_no_trace(family: Path) -> None:
    """Wrong drafts are verified, then the same positions run again with other tokens, fewer and more of them."""
    first, second, wrong = random_prompts(20, 23, 8)
    reference, runner = eager_model(family), Runner(load(family), 2)
    runner.step([(0, first[:10]), (0, second[:11])])
    runner.step([(10, wrong), (11, torch.cat([second[11:13], wrong[:5]]))])
    runner.step([(10, first[10:12]), (13, second[13:15])])
    found = runner.step([(12, first[12:]), (15, second[15:])])
    torch.testing.assert_close(found[0], alone(reference, first)[12:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1], alone(reference, second)[15:], rtol=1e-4, atol=1e-4)


def test_proof_runs_and_holds(family: Path) -> None:
    """The proof at attach time passes for every supported family, and says so."""
    target = load(family)
    target.attach(limits_for(target), Taps())
    assert "max difference" in target.describe()["attention proof"]


def test_taps_follow_the_convention(family: Path) -> None:
    """Layer l is transformers' hidden_states[l + 1], -1 is entry 0; the last layer's own output is not normed."""
    (prompt,) = random_prompts(17)
    reference = eager_model(family)
    raw: dict[int, torch.Tensor] = {}
    layers = facts.decoder_layers(reference)
    for index, layer in enumerate(layers):
        layer.register_forward_hook(
            lambda _m, _i, out, index=index: raw.update({index: (out if isinstance(out, torch.Tensor) else out[0])[0]})
        )
    with torch.inference_mode():
        expected = reference(prompt.unsqueeze(0), use_cache=False, output_hidden_states=True).hidden_states
    output = Runner(load(family), 1, Taps(layers=(-1, 0, 2, 3), last_hidden=True)).output([(0, prompt)])
    close = {"rtol": 1e-4, "atol": 1e-3}
    for layer in (-1, 0, 2):
        torch.testing.assert_close(output.hidden[layer], expected[layer + 1][0], **close)
    for layer in (0, 2, 3):
        torch.testing.assert_close(output.hidden[layer], raw[layer], **close)
    torch.testing.assert_close(output.last_hidden, expected[-1][0], **close)


def test_greedy_text_equals_generate(family: Path) -> None:
    """Token by token over the pages: the same text as transformers' own generate."""
    (prompt,) = random_prompts(9)
    reference = eager_model(family)
    expected = reference.generate(prompt.unsqueeze(0), max_new_tokens=24, do_sample=False, eos_token_id=None)[0, 9:]
    runner = Runner(load(family), 1)
    tokens = [runner.step([(0, prompt)])[0][-1].argmax()]
    while len(tokens) < 24:
        tokens.append(runner.step([(8 + len(tokens), tokens[-1].view(1))])[0][-1].argmax())
    assert torch.stack(tokens).tolist() == expected.tolist()


@pytest.mark.parametrize("build", [models.tiny_llama, models.tiny_gpt_oss, models.tiny_deepseek_v3])
def test_bfloat16_runs_and_is_proven(build: Callable[..., Path], tmp_path: Path) -> None:
    """Half precision: pages, activations and logits in bfloat16, proof within its own tolerance."""
    target = load(build(tmp_path), dtype="bfloat16")
    (logits,) = Runner(target, 1).step([(0, random_prompts(11)[0])])
    assert target.facts.dtype == logits.dtype == torch.bfloat16
    assert target.kv_pages(0)[0].dtype == torch.bfloat16
    assert torch.isfinite(logits).all()


def test_selected_rows_only(llama_folder: Path) -> None:
    """Logits come for the rows asked for, in their order; none at all is possible."""
    runner = Runner(load(llama_folder), 1)
    batch = runner.batch([(0, random_prompts(10)[0])])
    everything = runner.target.forward(batch).logits.clone()
    for rows in ([2, 9], [9], []):
        chosen = torch.tensor(rows, dtype=torch.int64)
        found = runner.target.forward(type(batch)(**batch.__dict__ | {"logit_rows": chosen})).logits
        torch.testing.assert_close(found, everything[chosen])


def test_last_hidden_is_what_the_head_reads(qwen3_folder: Path) -> None:
    """Post-norm states of all packed tokens, also of those without logits."""
    runner = Runner(load(qwen3_folder), 1, Taps(last_hidden=True))
    output = runner.output([(0, random_prompts(10)[0])])
    assert output.last_hidden is not None
    with torch.inference_mode():
        torch.testing.assert_close(runner.target.model.lm_head(output.last_hidden), output.logits)


def test_attaching_again_starts_clean(llama_folder: Path) -> None:
    """A second engine on the same model gets fresh pages and hooks; registrations do not pile up."""
    target = load(llama_folder)
    (prompt,) = random_prompts(12)
    before = len(facts.registered_attention())
    first = Runner(target, 1, Taps(layers=(0,))).step([(0, prompt)])[0]
    second_runner = Runner(target, 1)
    output = second_runner.output([(0, prompt)])
    torch.testing.assert_close(output.logits, first)
    assert not output.hidden
    assert len(facts.registered_attention()) == before + 1
    target.detach()
    target.detach()
    assert len(facts.registered_attention()) == before
    torch.testing.assert_close(alone(target.model, prompt), first, rtol=1e-4, atol=1e-4)


def test_two_targets_keep_apart(llama_folder: Path, qwen3_folder: Path) -> None:
    """Each engine has its own function and pages: two models may run in turns."""
    one, two = random_prompts(12, 15)
    first, second = Runner(load(llama_folder), 1), Runner(load(qwen3_folder), 1)
    first.step([(0, one[:6])])
    second.step([(0, two[:9])])
    found = first.step([(6, one[6:])])[0], second.step([(9, two[9:])])[0]
    torch.testing.assert_close(found[0], alone(eager_model(llama_folder), one)[6:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1], alone(eager_model(qwen3_folder), two)[9:], rtol=1e-4, atol=1e-4)


def test_shared_layers_use_the_donors_pages(tmp_path: Path) -> None:
    """Gemma-4's later layers read keys of earlier ones: one set of pages, counted once."""
    target = load(models.tiny_gemma4(tmp_path))
    target.attach(limits_for(target), Taps())
    assert target.kv_pages(2)[0] is target.kv_pages(0)[0]
    assert target.kv_pages(3)[0] is target.kv_pages(1)[0]
    sliding, full = 2 * 2 * 16, 2 * 2 * 32  # key and value of two heads of 16, and of two heads of 32
    assert target.facts.kv_bytes_per_token == 4 * (sliding + full)


def test_tap_outside_the_model_is_refused(llama_folder: Path) -> None:
    """Layer ids are checked against the model (its layers are 0 to 3)."""
    target = load(llama_folder)
    for layer in (4, -2):
        with pytest.raises(ConfigError, match=f"layer {layer}.*0 to 3"):
            target.attach(limits_for(target), Taps(layers=(layer,)))


def test_length_dependent_rope_only_within_its_first_range(tmp_path: Path) -> None:
    """Dynamic rotary scaling is constant up to the original length and depends on the batch past it."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    target = load(models.tiny_llama(tmp_path, rope_parameters=rope, max_position_embeddings=64))
    with pytest.raises(UnsupportedModelError, match="max_model_len=64"):
        target.attach(limits_for(target, max_model_len=96), Taps())
    target.attach(limits_for(target, max_model_len=64), Taps())


_SMALL = {
    "vocab_size": 384,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
_REFUSED = {
    "mamba": (transformers.MambaConfig, {"state_size": 8}, "layer 0 .*MambaMixer.*recurrent state"),
    "bloom": (transformers.BloomConfig, {"n_layer": 4, "n_head": 4}, "layer 0 .*BloomAttention.*own attention"),
    "qwen3_next": (
        transformers.Qwen3NextConfig,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
        | {
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
        "layer 0 .*GatedDeltaNet.*recurrent state",
    ),
    "lfm2": (transformers.Lfm2Config, {"full_attn_idxs": [2]}, "layer 0 .*ShortConv.*recurrent state"),
    "llama4": (
        transformers.Llama4TextConfig,
        {"attention_chunk_size": 8, "intermediate_size_mlp": 64, "num_local_experts": 2},
        "layer 0 .*chunked_attention",
    ),
    "deepseek_v32": (
        transformers.DeepseekV32Config,
        {
            "index_topk": 4,
            "index_n_heads": 2,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
        }
        | {"moe_intermediate_size": 32, "q_lora_rank": 32, "kv_lora_rank": 32},
        "layer 0 is of type .*_attention",
    ),
}


@pytest.mark.parametrize("name", _REFUSED)
def test_unsupported_models_are_refused_by_name(name: str, tmp_path: Path) -> None:
    """What would run and give wrong numbers is refused when it is loaded, naming layer and class."""
    kind, special, message = _REFUSED[name]
    folder = models.save_model(tmp_path, kind(**_SMALL | special), seed=0)
    with pytest.raises(UnsupportedModelError, match=f"(?s){message}"):
        load(folder)


def test_proof_catches_a_rule_hidden_from_attention(llama_folder: Path) -> None:
    """A model whose positions do not come from position_ids passes the probe but not the proof."""
    target = load(llama_folder)
    rotary = target.model.model.rotary_emb
    plain = rotary.forward
    rotary.forward = lambda x, position_ids: plain(x, torch.arange(x.shape[1]).unsqueeze(0))
    with pytest.raises(UnsupportedModelError, match="largest difference"):
        target.attach(limits_for(target), Taps())
