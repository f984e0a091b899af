"""From Hugging Face folders to decoder weights."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from specflow.checkpoints.decoder import DecoderWeights, load_decoder
from specflow.checkpoints.decoder_config import read_decoder_config
from specflow.errors import CheckpointError, UnsupportedModelError
from tests.models import tiny_gemma2, tiny_llama, tiny_qwen2

CPU = torch.device("cpu")


def load(folder: Path, dtype: torch.dtype = torch.float32) -> DecoderWeights:
    return load_decoder(folder, read_decoder_config(folder), CPU, dtype)


def edit_config(folder: Path, **entries: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def test_weights_are_merged_and_transposed(qwen3_folder: Path) -> None:
    weights = load(qwen3_folder)
    saved = load_file(qwen3_folder / "model.safetensors")
    attention = "model.layers.1.self_attn."
    merged = torch.cat([saved[f"{attention}{name}_proj.weight"] for name in "qkv"])
    assert torch.equal(weights.layers[1].qkv, merged.t())
    assert weights.layers[1].qkv.is_contiguous()
    assert torch.equal(weights.head, saved["lm_head.weight"].t())
    assert weights.layers[1].qkv_bias is None
    qk_norm = weights.layers[1].qk_norm
    assert qk_norm is not None
    assert torch.equal(qk_norm[3], saved[attention + "q_norm.weight"])
    assert torch.equal(qk_norm[4], saved[attention + "k_norm.weight"])
    assert weights.num_parameters == sum(tensor.numel() for tensor in saved.values())


def test_biases_of_qwen2(tmp_path: Path) -> None:
    weights = load(tiny_qwen2(tmp_path, layers=1))
    assert weights.layers[0].qkv_bias is not None
    assert weights.layers[0].output_bias is None


def test_a_missing_bias_is_not_taken_for_zero(tmp_path: Path) -> None:
    path = tiny_qwen2(tmp_path, layers=1) / "model.safetensors"
    saved = load_file(path)
    del saved["model.layers.0.self_attn.k_proj.bias"]
    save_file(saved, path)
    with pytest.raises(CheckpointError, match=r"lacks 1 tensor \(model\.layers\.0\.self_attn\.k_proj\.bias\)"):
        load(tmp_path)


def test_shards_equal_the_single_file(tmp_path: Path, llama_folder: Path) -> None:
    """C45: at least three files, every tensor bit-equal."""
    model = AutoModelForCausalLM.from_pretrained(llama_folder, dtype=torch.float32)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) >= 3
    assert load(tmp_path).checkpoint_hash == load(llama_folder).checkpoint_hash


def test_tied_head(tmp_path: Path) -> None:
    weights = load(tiny_llama(tmp_path, layers=1, tie_word_embeddings=True))
    assert torch.equal(weights.head.t(), weights.embedding)


def test_a_missing_head_is_not_invented(tmp_path: Path) -> None:
    """C37 for a draft model: an untied head that is absent stops the run."""
    edit_config(tiny_llama(tmp_path, layers=1, tie_word_embeddings=True), tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        load(tmp_path)


def test_more_layers_than_the_config_says(tmp_path: Path) -> None:
    edit_config(tiny_llama(tmp_path, layers=2), num_hidden_layers=1)
    with pytest.raises(CheckpointError, match=r"9 tensors \(model\.layers\.1\."):
        load(tmp_path)


def test_other_sizes_than_the_config_says(tmp_path: Path) -> None:
    edit_config(tiny_llama(tmp_path, layers=1), intermediate_size=96)
    with pytest.raises(CheckpointError, match=r"gate_proj\.weight is \[128, 64\] instead of \[96, 64\]"):
        load(tmp_path)


def test_dtype_is_converted(llama_folder: Path) -> None:
    assert load(llama_folder, torch.bfloat16).layers[0].down.dtype == torch.bfloat16


def test_unsupported_models_are_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"'gemma2'.*qwen3"):
        read_decoder_config(tiny_gemma2(tmp_path, layers=1))


def test_unsupported_rope_is_named(tmp_path: Path) -> None:
    edit_config(tiny_llama(tmp_path, layers=1), rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0})
    with pytest.raises(UnsupportedModelError, match="'yarn'"):
        read_decoder_config(tmp_path)


def test_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_decoder_config(tmp_path)
