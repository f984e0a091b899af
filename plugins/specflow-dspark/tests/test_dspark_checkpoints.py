"""Checkpoints of each producer, made by hand: what is understood and what is refused. Numbers: test_dspark_peers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dspark_helpers import CPU, make_training, scatter, target_parts
from safetensors.torch import load_file, save_file
from specflow_dspark.checkpoint import LoadedDSpark, load_dspark
from torch import Tensor

from specflow.checkpoints.dflash import load_dflash
from specflow.errors import CheckpointError, UnsupportedModelError

HEADS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")


def load(folder: Path, **options: Any) -> LoadedDSpark:
    facts, tables = target_parts()
    return load_dspark(folder, facts, tables, device=CPU, dtype=torch.float32, **options)


def saved(folder: Path, **options: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A head of our own: its config.json and its tensors."""
    training = make_training(**options)
    scatter(training)
    training.save(folder)
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """The same with everything at the top level, as DeepSpec writes it."""
    nested = config.pop("dflash_config")
    kept = {key: nested[key] for key in ("mask_token_id", "target_layer_ids", *HEADS)}
    return config | kept


def test_deepspecs_format(tmp_path: Path) -> None:
    config, tensors = saved(tmp_path)
    _, tables = target_parts()
    tensors |= {
        "embed_tokens.weight": tables.embedding.contiguous().clone(),
        "lm_head.weight": tables.head.contiguous().clone(),
    }
    write(tmp_path, flat(config) | {"architectures": ["Qwen3DSparkModel"], "num_anchors": 512}, tensors)
    loaded = load(tmp_path)
    assert loaded.block.head.config.sample_from_anchor  # without a word of it
    assert loaded.block.borrowed == ("embedding", "head")
    assert loaded.description.config.markov_rank == 8
    assert not loaded.description.calibrated
    assert loaded.description.calibration.stacked(CPU)[:, 0].eq(1).all()


@pytest.mark.parametrize(("said", "layout"), [(None, False), (True, True), (False, False)])
def test_speculators_format_with_a_smaller_vocabulary(said: bool | None, layout: bool, tmp_path: Path) -> None:
    """Old files say nothing of the layout and mean fill-in, although new ones mean the other by default."""
    config, tensors = saved(tmp_path)
    ids = torch.arange(0, 384, 2)
    _, tables = target_parts()
    tensors["markov_head.markov_w2.weight"] = tensors["markov_head.markov_w2.weight"][ids].contiguous()
    tensors["lm_head.weight"] = tables.head[ids].contiguous()
    tensors |= {"d2t": ids - torch.arange(192), "t2d": torch.zeros(384, dtype=torch.bool).index_fill_(0, ids, True)}
    nested = config.pop("dflash_config")
    outer = {
        "speculators_model_type": "dspark", "architectures": ["DSparkDraftModel"], "block_size": 5,
        "mask_token_id": 383, "aux_hidden_state_layer_ids": [n + 1 for n in nested["target_layer_ids"]],
        "draft_vocab_size": 192, "transformer_layer_config": config, **{key: nested[key] for key in HEADS},
    }  # fmt: skip
    write(tmp_path, outer | ({} if said is None else {"sample_from_anchor": said}), tensors)
    loaded = load(tmp_path)
    assert loaded.block.head.config.sample_from_anchor == layout
    assert loaded.block.head.ids.tolist() == ids.tolist()
    assert loaded.markov is not None
    assert loaded.markov.bias(loaded.markov.embed(torch.tensor([5]))).shape == (1, 192)


def test_prefixes_of_early_exports(tmp_path: Path) -> None:
    config, tensors = saved(tmp_path)
    old = {f"logit_head.{name}" if name.split(".")[0].endswith("_head") else name: w for name, w in tensors.items()}
    plain = load(tmp_path)
    write(tmp_path, config, old)
    loaded = load(tmp_path)
    assert loaded.markov is not None
    assert plain.markov is not None
    assert torch.equal(loaded.markov.markov_w1.weight, plain.markov.markov_w1.weight)


def test_a_config_alone_is_enough_for_random_weights(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    loaded = load(tmp_path, dummy=True)
    assert loaded.markov is not None
    assert loaded.markov.markov_w2.weight.std() > 0


def test_dflash_says_that_it_is_not_one_of_its_heads(tmp_path: Path) -> None:
    saved(tmp_path)
    facts, tables = target_parts()
    with pytest.raises(UnsupportedModelError, match="markov_rank=8"):
        load_dflash(tmp_path, facts, tables, device=CPU, dtype=torch.float32)


def test_a_block_without_further_heads_is_sent_to_dflash(tmp_path: Path) -> None:
    config, tensors = saved(tmp_path)
    config["dflash_config"] |= {"markov_rank": 0, "enable_confidence_head": False}
    write(tmp_path, config, {name: w for name, w in tensors.items() if "_head." not in name})
    with pytest.raises(UnsupportedModelError, match="use proposer=dflash"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"markov_head_type": "lstm"}, UnsupportedModelError, "type lstm"),
        ({"markov_head_type": "rnn", "sample_from_anchor": False}, UnsupportedModelError, "fill-in"),
        ({"markov_rank": "many"}, CheckpointError, "markov_rank='many'"),
        ({"markov_rank": 4}, CheckpointError, "markov_w1"),
        ({"markov_rank": 0}, CheckpointError, "confidence_head_with_markov"),
        ({"confidence_head_with_markov": False}, CheckpointError, r"confidence_head\.proj"),
        ({"confidence_calibration": {"sampled": [[1.0], [0.0]]}}, CheckpointError, "two lists of 5"),
        ({"confidence_calibration": [1]}, CheckpointError, "not an object"),
    ],
)
def test_contradictions_are_named(changes: dict[str, Any], error: type[Exception], words: str, tmp_path: Path) -> None:
    config, tensors = saved(tmp_path)
    config["dflash_config"] |= changes
    write(tmp_path, config, tensors)
    with pytest.raises(error, match=words):
        load(tmp_path)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    config, tensors = saved(tmp_path)
    del tensors["confidence_head.proj.bias"]
    write(tmp_path, config, tensors)
    with pytest.raises(CheckpointError, match=r"confidence_head\.proj\.bias"):
        load(tmp_path)


def test_specforges_format_means_the_next_token_layout(tmp_path: Path) -> None:
    config, tensors = saved(tmp_path)
    del config["dflash_config"]["sample_from_anchor"]
    write(tmp_path, config, tensors)
    assert load(tmp_path).block.head.config.sample_from_anchor


def test_gemmas_layers_are_refused(tmp_path: Path) -> None:
    config, tensors = saved(tmp_path)
    write(tmp_path, config | {"architectures": ["Gemma4DSparkModel"]}, tensors)
    with pytest.raises(UnsupportedModelError, match="Gemma4DSparkModel"):
        load(tmp_path)
