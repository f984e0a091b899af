"""EAGLE-3 heads as other projects write them, and refusing what is no such head or belongs to another target."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specflow.checkpoints.capture_layers import capture_layers, default_layers
from specflow.checkpoints.eagle3 import LoadedEagle3, load_eagle3
from specflow.errors import CheckpointError, ConfigError, UnsupportedModelError
from specflow.heads.eagle3 import Eagle3Head
from specflow.targets.base import TokenTables
from tests.heads.eagle3_helpers import VARIANTS, VOCAB, WIDTH, make_head, prefill, save_head, tiny_facts

LLAMA = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB,
    "max_position_embeddings": 2048,
}
IDS = "eagle_aux_hidden_state_layer_ids"
TABLES = TokenTables(
    torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(8)),
    torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(9)),
)


def maps(head: Eagle3Head) -> dict[str, Tensor]:
    ids = head.ids
    mask = torch.zeros(VOCAB, dtype=torch.bool)
    mask[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": mask}


def weights_of(head: Eagle3Head, prefix: str = "layers.0.") -> dict[str, Tensor]:
    weights = {name.replace("layers.0.", prefix): weight.clone() for name, weight in head.state_dict().items()}
    return weights | (maps(head) if head.config.reduced else {})


def write(folder: Path, weights: dict[str, Tensor], config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def load(folder: Path, facts: Any = None, tables: TokenTables | None = TABLES, **options: Any) -> LoadedEagle3:
    settings = {"device": torch.device("cpu"), "dtype": torch.float32} | options
    return load_eagle3(folder, facts or tiny_facts(), tables, **settings)


def same(loaded: Eagle3Head, head: Eagle3Head) -> None:
    """The same logits over the same ids."""
    tokens = torch.arange(3, 12)
    hidden = torch.randn(8, len(head.config.capture_layers), WIDTH, generator=torch.Generator().manual_seed(4))
    for ours, theirs in zip(prefill(loaded, tokens, hidden), prefill(head, tokens, hidden), strict=True):
        torch.testing.assert_close(ours, theirs)
    if head.config.reduced:
        assert torch.equal(loaded.ids, head.ids)


# -- formats ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_our_own_format_round_trip(tmp_path: Path, variant: str) -> None:
    head = make_head(**VARIANTS[variant])
    loaded = load(save_head(tmp_path, head))
    assert loaded.head.config == head.config
    same(loaded.head, head)
    assert loaded.num_parameters == sum(weight.numel() for weight in head.parameters())


def test_our_config_says_what_other_engines_read(tmp_path: Path) -> None:
    config = json.loads((save_head(tmp_path, make_head(draft_vocab_size=100)) / "config.json").read_text())
    assert config[IDS] == [1, 2, 4]
    assert config["aux_layer_convention"].startswith("boundary")
    assert config["speculators_model_type"] == "eagle3"
    assert config["transformer_layer_config"]["max_position_embeddings"] == 128  # vLLM stops without it
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    assert config["speculators_config"]["verifier"] == {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]}
    assert {"norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "draft_vocab_size"} <= config.keys()
    weights = load_file(tmp_path / "model.safetensors")
    assert {weight.dtype for name, weight in weights.items() if name not in ("d2t", "t2d")} == {torch.bfloat16}
    assert (weights["d2t"].dtype, weights["t2d"].dtype) == (torch.int64, torch.bool)


def test_original_repository(tmp_path: Path) -> None:
    """`midlayer.*`, no embedding, maps, a config that says nothing of layers: those of N = 8."""
    head = make_head(draft_vocab_size=100, own_embedding=False, capture_layers=(1, 3, 4))
    write(tmp_path, weights_of(head, "midlayer."), LLAMA | {"draft_vocab_size": 100, "architectures": ["X"]})
    loaded = load(tmp_path, tiny_facts(num_layers=8))
    head.borrow(TABLES.embedding, None)
    same(loaded.head, head)
    assert loaded.head.config.capture_layers == (1, 3, 4)
    assert loaded.captures.boundaries == (2, 4, 5)
    assert loaded.borrowed == ("embedding",)
    assert loaded.head.config.layer.rope.theta == 10_000
    assert not loaded.head.config.norm_before_residual


def test_original_repository_pickled(tmp_path: Path) -> None:
    """As that project publishes its heads: half precision in pytorch_model.bin. C45."""
    head = make_head(draft_vocab_size=100, own_embedding=False, capture_layers=(1, 3, 4))
    weights = {
        name: weight.bfloat16() if weight.is_floating_point() else weight
        for name, weight in weights_of(head, "midlayer.").items()
    }
    torch.save(weights, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"draft_vocab_size": 100}))
    loaded = load(tmp_path, tiny_facts(num_layers=8))
    head.borrow(TABLES.embedding, None)
    same(loaded.head, head)


def test_specforge_with_the_output_convention(tmp_path: Path) -> None:
    """Row 12: a list that starts with 1 in `eagle_config` counts outputs."""
    head = make_head(capture_layers=(1, 2, 3))
    config = LLAMA | {"eagle_config": {IDS: [1, 2, 3], "use_aux_hidden_state": True}}
    loaded = load(write(tmp_path, weights_of(head, "midlayer."), config))
    same(loaded.head, head)
    assert loaded.head.config.capture_layers == (1, 2, 3)


@pytest.mark.parametrize("prefix", ["layers.0.", "model.layers.0."])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_speculators(tmp_path: Path, family: str, prefix: str) -> None:
    """A silent `norm_before_residual` means true in this format, and the rotary base may sit in `rope_parameters`."""
    head = make_head(qk_norm=family == "qwen3", norm_before_residual=True, draft_vocab_size=100)
    layer = LLAMA | {"model_type": family, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
    config = {"speculators_model_type": "eagle3", "transformer_layer_config": layer, "draft_vocab_size": 100}
    loaded = load(write(tmp_path, weights_of(head, prefix), config | {IDS: [1, 2, 4]}))
    same(loaded.head, head)
    assert loaded.borrowed == ()


@pytest.mark.parametrize("place", ["top", "eagle_config"])
def test_norm_before_fc(tmp_path: Path, place: str) -> None:
    """NVIDIA's `input_norm`, with the switch in either place."""
    head = make_head(norm_before_fc=True)
    nested = {IDS: [0, 2, 4]} | ({"norm_before_fc": True} if place == "eagle_config" else {})
    config = LLAMA | {"eagle_config": nested} | ({"norm_before_fc": True} if place == "top" else {})
    loaded = load(write(tmp_path, weights_of(head, "midlayer."), config))
    same(loaded.head, head)
    assert loaded.head.config.capture_layers == (-1, 1, 3)


def test_deepspec(tmp_path: Path) -> None:
    """Row 11: five captures by `target_layer_ids`, which count outputs; full vocabulary; Qwen3 layer."""
    head = make_head(qk_norm=True, capture_layers=(0, 1, 2, 3))
    config = LLAMA | {"model_type": "qwen3", "architectures": ["Qwen3Eagle3Model"], "target_layer_ids": [0, 1, 2, 3]}
    config |= {"num_hidden_layers": 36, "draft_num_hidden_layers": 1, "ttt_length": 7, "step_loss_decay": 0.8}
    loaded = load(write(tmp_path, weights_of(head), config))
    same(loaded.head, head)


def test_a_full_vocabulary_may_come_with_zero_offsets(tmp_path: Path) -> None:
    """As the Vicuna heads do."""
    head = make_head()
    zeros = {"d2t": torch.zeros(VOCAB, dtype=torch.int64), "t2d": torch.ones(VOCAB, dtype=torch.bool)}
    same(load(write(tmp_path, weights_of(head) | zeros, LLAMA | {IDS: [1, 2, 4]})).head, head)


def test_another_width_with_its_own_tables(tmp_path: Path) -> None:
    """Row 9: a head narrower than its target."""
    head = make_head(hidden_size=32)
    config = LLAMA | {"hidden_size": 32, "target_hidden_size": WIDTH, IDS: [1, 2, 4]}
    same(load(write(tmp_path, weights_of(head), config), tables=None).head, head)


def test_what_tools_write_besides(tmp_path: Path) -> None:
    """Tables of the verifier and rotary frequencies are left alone."""
    head = make_head()
    more = {
        "verifier_norm.weight": torch.zeros(3),
        "verifier_lm_head.weight": torch.zeros(3),
        "midlayer.self_attn.rotary_emb.inv_freq": torch.zeros(8),
    }
    same(load(write(tmp_path, weights_of(head) | more, LLAMA | {IDS: [1, 2, 4]})).head, head)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_types(tmp_path: Path, dtype: torch.dtype) -> None:
    loaded = load(save_head(tmp_path, make_head()), dtype=dtype)
    assert {weight.dtype for weight in loaded.head.parameters()} == {dtype}


# -- tables of the target ---------------------------------------------------------------------------------------------


def test_missing_tables_are_borrowed_exactly(tmp_path: Path) -> None:
    """C37."""
    loaded = load(save_head(tmp_path, make_head(own_embedding=False, own_head=False)))
    assert loaded.borrowed == ("embedding", "head")
    assert loaded.head.embedding_table.data_ptr() == TABLES.embedding.data_ptr()
    assert loaded.head.head_table.data_ptr() == TABLES.head.data_ptr()
    with pytest.raises(CheckpointError, match="no embedding and no head"):
        load(tmp_path, tables=None)


def test_a_reduced_head_is_saved_with_the_rows_it_borrowed(tmp_path: Path) -> None:
    head = make_head(own_head=False, draft_vocab_size=100)
    head.borrow(None, TABLES.head[head.ids])
    loaded = load(save_head(tmp_path, head))
    torch.testing.assert_close(loaded.head.head_table, TABLES.head[head.ids].bfloat16().float())
    without = load_file(tmp_path / "model.safetensors")
    del without["lm_head.weight"]
    write(tmp_path, without, json.loads((tmp_path / "config.json").read_text()))
    loaded = load(tmp_path)
    assert loaded.borrowed == ("head",)
    assert torch.equal(loaded.head.head_table, TABLES.head[head.ids])


def test_a_copy_of_the_targets_table_is_not_kept_twice(tmp_path: Path) -> None:
    head = make_head()
    head.embed_tokens.weight.copy_(TABLES.embedding)
    folder = write(tmp_path, weights_of(head), LLAMA | {IDS: [1, 2, 4]})
    assert load(folder).borrowed == ("embedding",)
    head.embed_tokens.weight[3, 3] += 1
    assert load(write(tmp_path, weights_of(head), LLAMA | {IDS: [1, 2, 4]})).borrowed == ()


def test_padded_vocabularies(tmp_path: Path) -> None:
    """C43: the target may have more or fewer padding rows than the head, and padding is never drafted."""
    folder = save_head(tmp_path, make_head())
    wide = load(folder, tiny_facts(vocab_size=400)).head
    assert wide.embedding_table.shape == (400, WIDTH)
    assert wide.head_table.shape == (VOCAB, WIDTH)
    narrow = load(folder, tiny_facts(vocab_size=380, num_token_ids=370)).head
    assert narrow.head_table.shape == (370, WIDTH)
    borrowed = load(save_head(tmp_path, make_head(own_head=False)), tiny_facts(num_token_ids=370)).head
    assert borrowed.head_table.shape == (370, WIDTH)


# -- refusals ---------------------------------------------------------------------------------------------------------


def broken(folder: Path, change: Any = None, config: dict[str, Any] | None = None, **variant: Any) -> Path:
    """A head in our format, its weights changed in place and its config overlaid."""
    save_head(folder, make_head(**variant))
    weights, settings = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    if change is not None:
        change(weights)
    return write(folder, weights, settings | (config or {}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.pop("fc.weight"), "lacks 1 tensor (fc.weight)"),
        (lambda w: w.pop("layers.0.mlp.up_proj.weight"), "lacks 1 tensor (layers.0.mlp.up_proj.weight)"),
        (lambda w: w.pop("norm.weight"), "norm.weight"),
        (lambda w: w.update({"surprise.weight": torch.zeros(2)}), "has 1 tensor (surprise.weight)"),
        (lambda w: w.update({"input_norm.weight": torch.zeros(3 * WIDTH)}), "has 1 tensor (input_norm.weight)"),
        (lambda w: w.update({"fc.weight": torch.zeros(WIDTH, 2 * WIDTH)}), "fc.weight is [64, 128] instead of"),
        (lambda w: w.update({"lm_head.weight": torch.zeros(9, WIDTH)}), "lm_head.weight is [9, 64] instead of"),
        (lambda w: w.update({"d2t": torch.zeros(9, dtype=torch.int64)}), "d2t is [9] instead of"),
        (lambda w: w.update({"d2t": torch.arange(VOCAB)}), "inconsistent vocabulary map: draft id + d2t"),
        (lambda w: w.update({"t2d": torch.arange(VOCAB) > 3}), "t2d marks 380 ids"),
    ],
)
def test_wrong_tensors(tmp_path: Path, change: Any, words: str) -> None:
    """C37 and C45: what is missing or unknown is named."""
    with pytest.raises(CheckpointError) as caught:
        load(broken(tmp_path, change))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.pop("d2t"), "lacks 1 tensor (d2t)"),
        (lambda w: w.update({"d2t": torch.zeros(100, dtype=torch.int64)}), "they are not the 100 that d2t leads to"),
        (lambda w: w.update({"d2t": w["d2t"] + torch.arange(100)}), "d2t holds offsets, not ids"),
        (lambda w: w["t2d"].logical_not_(), "t2d marks 284 ids"),
    ],
)
def test_wrong_vocabulary_maps(tmp_path: Path, change: Any, words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(broken(tmp_path, change, draft_vocab_size=100))
    assert words in str(caught.value)


def test_a_map_without_a_mask_is_enough(tmp_path: Path) -> None:
    head = make_head(draft_vocab_size=100)
    same(load(broken(tmp_path, lambda w: w.pop("t2d"), draft_vocab_size=100)).head, head)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"speculators_model_type": "peagle"}, "P-EAGLE"),
        ({"speculators_model_type": "dflash"}, "'dflash' head"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state=false"),
        ({"transformer_layer_config": {"model_type": "deepseek_v3"}}, "deepseek_v3"),
    ],
)
def test_other_methods_are_refused_by_name(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        load(broken(tmp_path, config=config))


def test_other_heads_are_refused_by_their_tensors(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="P-EAGLE"):
        load(broken(tmp_path / "p", lambda w: w.update({"mask_hidden": torch.zeros(1, 1, 3 * WIDTH)})))
    with pytest.raises(UnsupportedModelError, match="no hidden_norm"):
        load(broken(tmp_path / "1", lambda w: w.pop("layers.0.hidden_norm.weight")))


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"hidden_size": 128}, "width 64, and target tiny has 128"),
        ({"num_layers": 3}, r"\[1, 2, 4\].*target has 3 layers"),
        ({"vocab_size": 512, "num_token_ids": 500}, "vocabulary of 384, and target tiny has 500 tokens"),
        ({"vocab_size": 5000, "num_token_ids": 300}, "vocabulary of 384, and target tiny has 300 tokens in 5000"),
    ],
)
def test_heads_of_another_target(tmp_path: Path, facts: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        load(save_head(tmp_path, make_head()), tiny_facts(**facts))


def test_a_reduced_vocabulary_must_be_the_targets(tmp_path: Path) -> None:
    folder = save_head(tmp_path, make_head(draft_vocab_size=300))
    with pytest.raises(CheckpointError, match="drafts id 38"):
        load(folder, tiny_facts(vocab_size=370, num_token_ids=360))


@pytest.mark.parametrize("table", ["embed_tokens.weight", "lm_head.weight"])
def test_tables_of_another_width_cannot_be_borrowed(tmp_path: Path, table: str) -> None:
    folder = broken(tmp_path, lambda w: w.pop(table), hidden_size=32)
    with pytest.raises(CheckpointError, match=f"lacks {table}, and the target's table has width 64"):
        load(folder)


def test_more_draft_ids_than_ids(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="draft_vocab_size=400 above vocab_size=384"):
        load(broken(tmp_path, config={"draft_vocab_size": 400}))


# -- layer numbers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "convention", "layers"),
    [
        ({IDS: [2, 18, 33]}, "auto", (1, 17, 32)),
        ({IDS: [1, 17, 32]}, "auto", (0, 16, 31)),
        ({IDS: [1, 17, 32]}, "output", (1, 17, 32)),
        ({"target_layer_ids": [1, 9, 17, 25, 33]}, "auto", (1, 9, 17, 25, 33)),
        ({"target_layer_ids": [1, 9]}, "boundary", (0, 8)),
        ({"eagle_config": {IDS: [1, 17, 32]}}, "auto", (1, 17, 32)),
        ({"eagle_config": {IDS: [24, 30, 36]}}, "auto", (23, 29, 35)),
        ({"eagle_config": {IDS: [1, 17, 32]}}, "boundary", (0, 16, 31)),
        ({"eagle_config": {"layer_ids": [33, 2, 2]}}, "auto", (1, 32)),
        ({}, "auto", (1, 17, 32)),
    ],
)
def test_conventions(raw: dict[str, Any], convention: Any, layers: tuple[int, ...]) -> None:
    """C31, for a target of 36 layers."""
    assert capture_layers(Path("x"), raw, 36, convention).layers == layers


def test_defaults_of_shallow_targets() -> None:
    """C32: three different layers of the target, or a refusal that names N."""
    for num_layers in range(1, 40):
        layers = default_layers(num_layers)
        if layers is None:
            with pytest.raises(CheckpointError, match=f"N={num_layers} layers"):
                capture_layers(Path("x"), {}, num_layers)
        else:
            assert -1 <= layers[0] < layers[1] < layers[2] < num_layers
            assert num_layers >= 7
    assert default_layers(30) == (1, 14, 26)


def test_silent_configs_that_cannot_be_completed() -> None:
    with pytest.raises(CheckpointError, match="no rule for 5"):
        capture_layers(Path("x"), {"num_aux_hidden_states": 5}, 36)
    with pytest.raises(ConfigError, match="aux_layer_convention=output"):
        capture_layers(Path("x"), {}, 36, "output")


@pytest.mark.parametrize(("number", "convention"), [(37, "boundary"), (36, "output"), (-1, "boundary")])
def test_layers_that_are_not_there(number: int, convention: Any) -> None:
    with pytest.raises(CheckpointError, match="36 layers"):
        capture_layers(Path("x"), {IDS: [2, number]}, 36, convention)
