"""DFlash checkpoints: three formats in, one out, and everything that is refused."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specflow.checkpoints.dflash import LoadedDFlash, load_block_head, load_dflash
from specflow.checkpoints.dflash_config import answers_from_anchor, default_capture_layers, describe_dflash
from specflow.errors import CheckpointError, UnsupportedModelError
from specflow.heads.dflash import BlockLayer, DFlashHead
from specflow.targets.base import TokenTables
from tests.heads.dflash_cases import (
    FULL,
    TARGET_LAYERS,
    VOCAB,
    WIDTH,
    make_config,
    make_head,
    make_tables,
    make_target,
    plain_block,
    saved_head,
)

CPU = torch.device("cpu")
LAYERS = {
    "model_type": "qwen3",
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "vocab_size": VOCAB,
}
ZLAB = LAYERS | {
    "architectures": ["DFlashDraftModel"],
    "block_size": 5,
    "num_target_layers": TARGET_LAYERS,
    "layer_types": ["full_attention", "full_attention"],
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 2, 5]},
}
SPECULATORS = {
    "architectures": ["DFlashDraftModel"],
    "speculators_model_type": "dflash",
    "transformer_layer_config": LAYERS,
    "draft_vocab_size": VOCAB,
    "block_size": 5,
    "aux_hidden_state_layer_ids": [1, 3, 6],
    "mask_token_id": 3,
    "speculators_config": {"verifier": {"name_or_path": "owner/target"}},
}
DEEPSPEC = LAYERS | {
    "architectures": ["Qwen3DSparkModel"],
    "block_size": 5,
    "num_target_layers": TARGET_LAYERS,
    "target_layer_ids": [0, 2, 5],
    "mask_token_id": 3,
    "markov_rank": 0,
    "enable_confidence_head": False,
}


def write(folder: Path, config: Mapping[str, Any], head: DFlashHead | None = None, **extra: Tensor) -> DFlashHead:
    """A folder as another project writes it."""
    head = head or make_head()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({**{k: v.contiguous() for k, v in head.state_dict().items()}, **extra}, folder / "model.safetensors")
    return head


def load(
    folder: Path, tables: TokenTables | None = None, dtype: torch.dtype = torch.float32, **facts: Any
) -> LoadedDFlash:
    tables = tables or make_tables()
    return load_dflash(folder, make_target(tables, **facts).facts, tables, device=CPU, dtype=dtype)


def same_block(first: DFlashHead, second: DFlashHead) -> bool:
    states = torch.randn(6, 3, WIDTH, generator=torch.Generator().manual_seed(1))
    return torch.allclose(plain_block(first, states, 9, 4), plain_block(second, states, 9, 4), atol=1e-5)


# -- formats ------------------------------------------------------------------------------------------------------


def test_zlab(tmp_path: Path) -> None:
    """C37: tables that the file lacks are the target's own, not copies."""
    head = write(tmp_path, ZLAB)
    tables = make_tables()
    loaded = load(tmp_path, tables)
    assert loaded.head.config == head.config
    assert same_block(loaded.head, head)
    assert loaded.head.embedding_table.data_ptr() == tables.embedding.data_ptr()
    assert loaded.head.head_table.data_ptr() == tables.head.data_ptr()
    assert loaded.borrowed == ("embedding", "head")
    assert loaded.description.layout == "z-lab's layout"
    assert loaded.num_parameters == sum(weight.numel() for weight in head.parameters())


def test_pickled_weights(tmp_path: Path) -> None:
    """C45."""
    head = write(tmp_path, ZLAB)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    assert same_block(load(tmp_path).head, head)


def test_keys_at_the_top_level_count_after_the_nested_ones(tmp_path: Path) -> None:
    config = {key: value for key, value in ZLAB.items() if key != "dflash_config"}
    write(tmp_path, config | {"mask_token_id": 3, "target_layer_ids": [0, 2, 5]})
    assert load(tmp_path).head.config == make_config()
    write(
        tmp_path,
        ZLAB | {"mask_token_id": 7, "block_size": 9, "dflash_config": ZLAB["dflash_config"] | {"block_size": 5}},
    )
    assert load(tmp_path).head.config == make_config()


def test_missing_layer_list_means_the_rule(tmp_path: Path) -> None:
    nested = {"mask_token_id": 3}
    head = make_head(make_config(capture_layers=default_capture_layers(TARGET_LAYERS, 2)))
    write(tmp_path, ZLAB | {"dflash_config": nested}, head)
    assert load(tmp_path).head.config.capture_layers == (1, 3)


def test_speculators(tmp_path: Path) -> None:
    """C31: its numbers are one more than ours, and the same head comes out."""
    head = write(tmp_path, SPECULATORS)
    loaded = load(tmp_path)
    assert loaded.head.config.capture_layers == (0, 2, 5)
    assert not loaded.head.config.sample_from_anchor
    assert loaded.description.trained_for == "owner/target"
    assert same_block(loaded.head, head)


def test_speculators_with_its_own_reduced_head(tmp_path: Path) -> None:
    config = make_config(draft_vocab_size=40, own_head=True)
    head = make_head(config)
    offsets = head.ids - torch.arange(40)
    marks = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, head.ids, True)
    write(tmp_path, SPECULATORS | {"draft_vocab_size": 40}, head, d2t=offsets, t2d=marks)
    loaded = load(tmp_path)
    assert loaded.borrowed == ("embedding",)
    assert torch.equal(loaded.head.ids, head.ids)
    assert torch.equal(loaded.head.head_table, head.lm_head.weight)
    write(tmp_path, SPECULATORS | {"draft_vocab_size": 40}, head, d2t=head.ids, t2d=marks)
    with pytest.raises(CheckpointError, match="d2t holds offsets, not ids"):
        load(tmp_path)
    write(tmp_path, SPECULATORS | {"draft_vocab_size": 40}, head, d2t=offsets, t2d=marks.roll(1))
    with pytest.raises(CheckpointError, match="t2d marks 40 ids"):
        load(tmp_path)


def test_deepspec_ships_copies_and_answers_from_the_anchor(tmp_path: Path) -> None:
    """Though it is called DFlash, its rows say the next token; tables equal to the target's are not kept twice."""
    tables = make_tables()
    full = make_head(make_config(own_embedding=True, own_head=True))
    full.embed_tokens.weight.data, full.lm_head.weight.data = tables.embedding.clone(), tables.head.clone()
    write(tmp_path, DEEPSPEC, full)
    loaded = load(tmp_path, tables)
    assert loaded.head.config.sample_from_anchor
    assert loaded.head.config.max_drafts == 5
    assert loaded.borrowed == ("embedding", "head")
    full.lm_head.weight.data[0] += 1
    write(tmp_path, DEEPSPEC, full)
    loaded = load(tmp_path, tables)
    assert loaded.borrowed == ("embedding",)
    assert torch.equal(loaded.head.head_table, full.lm_head.weight)


def test_own_tables_need_no_target(tmp_path: Path) -> None:
    head = make_head(make_config(own_embedding=True, own_head=True))
    write(tmp_path, DEEPSPEC, head)
    facts = make_target().facts
    loaded = load_dflash(tmp_path, facts, None, device=CPU, dtype=torch.float32)
    assert loaded.borrowed == ()
    write(tmp_path, ZLAB)
    with pytest.raises(CheckpointError, match="ships no embedding and no head"):
        load_dflash(tmp_path, facts, None, device=CPU, dtype=torch.float32)


def test_round_trip_of_our_own(tmp_path: Path) -> None:
    """Layout and layer convention are written out; weights come back as bfloat16 holds them."""
    cases: list[dict[str, Any]] = [
        {},
        {"sample_from_anchor": True, "capture_layers": (-1, 0, 4)},
        {"block_layers": (BlockLayer(4, True), FULL), "logit_softcap": 5.0},
        {"block_layers": (BlockLayer(4), FULL), "embedding_scale": 2.0, "logit_scale": 0.5},
        {"block_layers": (BlockLayer(causal=True),) * 2},
        {"draft_vocab_size": 40, "own_head": True},
        {"own_embedding": True},
    ]
    for changes in cases:
        head = saved_head(tmp_path, make_config(**changes))
        loaded = load(tmp_path)
        assert loaded.head.config == head.config
        assert same_block(loaded.head, head)
        raw = json.loads((tmp_path / "config.json").read_text())
        assert raw["dflash_config"]["sample_from_anchor"] == head.config.sample_from_anchor
        assert "after decoder layer l" in raw["dflash_config"]["layer_convention"]
        assert {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()} <= {
            torch.bfloat16, torch.int64, torch.bool
        }  # fmt: skip


def test_layers_the_format_cannot_tell_apart() -> None:
    for layers in ((BlockLayer(4), BlockLayer(5)), (BlockLayer(causal=True), FULL)):
        with pytest.raises(ValueError, match="one window"):
            describe_dflash(make_config(block_layers=layers))


def test_softcap_of_the_target_comes_with_its_head(tmp_path: Path) -> None:
    write(tmp_path, ZLAB)
    assert load(tmp_path, replace(make_tables(), logit_softcap=30.0)).head.config.logit_softcap == 30.0


def test_further_tensors_of_other_heads(tmp_path: Path) -> None:
    """What a head with more than a block needs: the block read, its own tensors handed over."""
    extra = torch.randn(VOCAB, 4)
    config = DEEPSPEC | {"markov_rank": 4}
    write(tmp_path, config, None, **{"further.weight": extra})
    tables = make_tables()
    facts, shapes = make_target(tables).facts, {"further.weight": (VOCAB, 4)}
    loaded = load_block_head(tmp_path, facts, tables, device=CPU, dtype=torch.float32, extra=shapes)
    assert torch.equal(loaded.extra["further.weight"], extra)
    assert loaded.head.config.sample_from_anchor
    with pytest.raises(CheckpointError, match=r"further\.weight"):
        load_block_head(tmp_path, facts, tables, device=CPU, dtype=torch.float32)


# -- layouts, layers, windows -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "next_token"),
    [
        ({"sample_from_anchor": True, "speculators_model_type": "dflash"}, True),
        ({"dflash_config": {"sample_from_anchor": False}, "markov_rank": 0}, False),
        ({"speculators_model_type": "dflash", "markov_rank": 0}, False),
        ({"speculators_model_type": "other"}, False),
        ({"markov_rank": 0, "_name_or_path": "dflash_qwen3_block7"}, True),
        ({"dflash_config": {"projector_type": "domino", "shift_label": True}}, True),
        ({"dflash_config": {"projector_type": "domino"}}, False),
        ({"architectures": ["DFlashDraftModel"]}, False),
    ],
)
def test_which_rows_answer(raw: dict[str, Any], next_token: bool) -> None:
    assert answers_from_anchor(raw)[0] == next_token


@pytest.mark.parametrize(
    ("num_layers", "count", "expected"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (40, 5, (1, 10, 19, 28, 37)),
        (64, 5, (1, 16, 31, 46, 61)),
        (30, 1, (15,)),
        (8, 3, (1, 3, 5)),
        (5, 3, (0, 2, 3)),
        (4, 2, (0, 2)),
        (3, 3, (0, 1, 2)),
        (2, 3, (0, 1)),
        (1, 3, (0,)),
        (1, 1, (0,)),
    ],
)
def test_default_layers_are_valid_for_any_depth(num_layers: int, count: int, expected: tuple[int, ...]) -> None:
    """C32."""
    assert default_capture_layers(num_layers, count) == expected


SLIDING = ["sliding_attention", "full_attention"]
WINDOWS: dict[str, tuple[dict[str, Any], tuple[BlockLayer, BlockLayer]]] = {
    "full": (ZLAB, (FULL, FULL)),
    "sliding is causal": (ZLAB | {"layer_types": SLIDING, "sliding_window": 7}, (BlockLayer(7, True), FULL)),
    "is_causal rules all": (
        ZLAB | {"layer_types": SLIDING, "sliding_window": 7, "is_causal": False},
        (BlockLayer(7), FULL),
    ),
    "nested causal": (
        ZLAB | {"dflash_config": ZLAB["dflash_config"] | {"causal": True}},
        (BlockLayer(causal=True), BlockLayer(causal=True)),
    ),
    "is_causal before nested causal": (
        ZLAB | {"is_causal": False, "dflash_config": ZLAB["dflash_config"] | {"causal": True}},
        (FULL, FULL),
    ),
    "use_swa": (
        ZLAB | {"dflash_config": ZLAB["dflash_config"] | {"use_swa": True, "swa_window_size": 9}},
        (BlockLayer(9), BlockLayer(9)),
    ),
    "speculators": (
        SPECULATORS | {"transformer_layer_config": LAYERS | {"layer_types": SLIDING, "sliding_window": 7}},
        (BlockLayer(7, True), FULL),
    ),
    "speculators both ways": (
        SPECULATORS
        | {
            "transformer_layer_config": LAYERS | {"layer_types": SLIDING, "sliding_window": 7},
            "sliding_window_non_causal": True,
        },
        (BlockLayer(7), FULL),
    ),
}


@pytest.mark.parametrize("case", WINDOWS)
def test_windows_and_directions(case: str, tmp_path: Path) -> None:
    config, expected = WINDOWS[case]
    write(tmp_path, config)
    assert load(tmp_path).head.config.block_layers == expected


# -- refusals -----------------------------------------------------------------------------------------------------


def nested(**entries: Any) -> dict[str, Any]:
    return ZLAB | {"dflash_config": ZLAB["dflash_config"] | entries}


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "DFlash2": (ZLAB | {"architectures": ["DFlash2DraftModel"]}, "is a DFlash2 head"),
    "DFlash2 of speculators": (SPECULATORS | {"speculators_model_type": "dflash2"}, "is a DFlash2 head"),
    "selector": (nested(selector_rank=256), "convolutions or a selector"),
    "Domino": (nested(projector_type="domino"), "is a Domino head"),
    "XPress": (SPECULATORS | {"speculators_model_type": "xpress"}, "is a XPress head"),
    "LiLiCorr": (nested(lilicorr_enabled=True), "is a LiLiCorr head"),
    "LiLiCorr by class": (ZLAB | {"architectures": ["LiLiCorrDraftModel"]}, "is a LiLiCorr head"),
    "Laguna": (ZLAB | {"architectures": ["DFlashLagunaForCausalLM"]}, "is a Laguna head"),
    "serial": (DEEPSPEC | {"markov_rank": 256}, "further head on top of its block .markov_rank=256"),
    "serial of SpecForge": (nested(projector_type="dspark"), "further head on top"),
    "serial of speculators": (SPECULATORS | {"speculators_model_type": "dspark"}, "further head on top"),
    "EAGLE": (LAYERS | {"architectures": ["LlamaForCausalLMEagle3"]}, "is no DFlash head .*LlamaForCausalLMEagle3"),
    "sinks": (nested(attention_sink_bias=True), "attention sinks"),
    "scaled values": (nested(attention_value_scale=0.5), "scaled values"),
    "last state": (nested(use_aux_hidden_state=False), "use_aux_hidden_state=false"),
    "other rotation": (ZLAB | {"is_neox_style": False}, "is_neox_style=false"),
    "other family": (ZLAB | {"model_type": "gemma4_text"}, "gemma4_text"),
    "YaRN": (ZLAB | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_heads_are_refused_by_name(case: str, tmp_path: Path) -> None:
    config, words = OTHERS[case]
    write(tmp_path, config)
    with pytest.raises(UnsupportedModelError, match=words):
        load(tmp_path)


def test_a_mask_embedding_of_its_own_is_refused(tmp_path: Path) -> None:
    write(tmp_path, ZLAB)
    (tmp_path / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(UnsupportedModelError, match=r"mask_embedding\.pt"):
        load(tmp_path)


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "no block size": ({key: value for key, value in ZLAB.items() if key != "block_size"}, "block_size=None"),
    "block of one": (ZLAB | {"block_size": 1}, "block_size=1, which leaves no draft"),
    "no mask": (ZLAB | {"dflash_config": {"target_layer_ids": [0, 2, 5]}}, "names no mask_token_id"),
    "mask outside": (nested(mask_token_id=VOCAB), f"mask_token_id={VOCAB}, and the embedding has {VOCAB} rows"),
    "order": (nested(target_layer_ids=[2, 0, 5]), "must be different and ascend"),
    "twice": (nested(target_layer_ids=[0, 2, 2]), "must be different and ascend"),
    "below": (nested(target_layer_ids=[-7, 0, 2]), "must be different and ascend"),
    "above": (nested(target_layer_ids=[0, 2, 6]), "belongs to another target"),
    "fewer layers": (nested(target_layer_ids=[0, 2]), r"fc.weight is \[32, 96\] instead of \[32, 64\]"),
    "types": (ZLAB | {"layer_types": ["full_attention"]}, "1 layer_types for 2 layers"),
    "no window": (ZLAB | {"layer_types": SLIDING}, "sliding layers but no sliding_window"),
    "no list": ({key: value for key, value in SPECULATORS.items() if "aux" not in key}, "names no aux_hidden_state"),
    "no head": (SPECULATORS | {"draft_vocab_size": 40}, r"lacks lm_head\.weight"),
    "other depth": (ZLAB | {"num_target_layers": 36}, "36 layers, and target target has 6"),
    "other width": (SPECULATORS | {"target_hidden_size": 64}, "width 64, and target target has 32"),
    "other vocabulary": (ZLAB | {"vocab_size": VOCAB - 1}, f"vocabulary of {VOCAB - 1}"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_configs_are_refused(case: str, tmp_path: Path) -> None:
    config, words = BROKEN[case]
    write(tmp_path, config)
    with pytest.raises(CheckpointError, match=words):
        load(tmp_path)


def test_missing_and_unknown_tensors_are_named(tmp_path: Path) -> None:
    """C37 and C45."""
    write(tmp_path, ZLAB)
    saved = load_file(tmp_path / "model.safetensors")
    lacking = {name: tensor for name, tensor in saved.items() if name != "layers.1.mlp.up_proj.weight"}
    save_file(lacking, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks 1 tensor .layers\.1\.mlp\.up_proj\.weight"):
        load(tmp_path)
    save_file(saved | {"layers.2.mlp.up_proj.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has 1 tensor .layers\.2\.mlp\.up_proj\.weight.* does not account"):
        load(tmp_path)
    save_file(saved | {"verifier_norm.weight": torch.zeros(WIDTH)}, tmp_path / "model.safetensors")
    assert load(tmp_path)


def test_a_narrower_head_cannot_borrow(tmp_path: Path) -> None:
    write(tmp_path, SPECULATORS | {"target_hidden_size": 64})
    with pytest.raises(CheckpointError, match=r"lacks embed_tokens\.weight, and the target's table has width 64"):
        load(tmp_path, make_tables(width=64))
