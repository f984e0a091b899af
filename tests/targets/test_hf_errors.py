"""Every way a checkpoint can be wrong ends in one clear error, before or instead of a long load."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from specflow.errors import CheckpointError, ConfigError, UnsupportedModelError
from specflow.targets.base import Taps
from specflow.targets.hf import HfOptions
from tests import models
from tests.targets.packing import Runner, limits_for, load, random_prompts


@pytest.fixture
def folder(llama_folder: Path, tmp_path: Path) -> Path:
    """A copy of the tiny Llama that a test may break."""
    return Path(shutil.copytree(llama_folder, tmp_path / "model"))


def refused(folder: Path | str, *words: str, **options: object) -> None:
    """Loading raises one of our errors, with these words, in at most four lines."""
    with pytest.raises((CheckpointError, UnsupportedModelError)) as caught:
        load(folder, **options)  # type: ignore[arg-type]
    message = str(caught.value)
    for word in words:
        assert word in message
    assert len(message.splitlines()) <= 4


def test_path_is_required() -> None:
    """No path is a configuration error that says how to give one."""
    with pytest.raises(ConfigError, match=r"target\.path="):
        HfOptions()


@pytest.mark.parametrize("path", ["/nowhere/model", "./nowhere", "~/nowhere-at-all", "a/b/c"])
def test_missing_folder(path: str) -> None:
    """A path that can only be local is not looked for on the hub."""
    refused(path, "no folder", "target.path")


def test_hub_id_while_offline() -> None:
    """A hub id that is not in the cache says how to go on."""
    refused("nobody/no-such-model", "nobody/no-such-model", "local folder", "HF_HUB_OFFLINE")


def test_path_is_a_file(folder: Path) -> None:
    """The weights file instead of its folder."""
    refused(folder / "model.safetensors", "is a file", "folder")


def test_folder_without_config(folder: Path) -> None:
    """An empty folder, or one of something else."""
    (folder / "config.json").unlink()
    refused(folder, "config.json")


def test_config_is_not_json(folder: Path) -> None:
    """A config cut off in the middle."""
    (folder / "config.json").write_text('{"architectures": [')
    refused(folder, "config.json", "cannot be read")


def test_no_weights(folder: Path) -> None:
    """Config and tokenizer alone."""
    (folder / "model.safetensors").unlink()
    refused(folder, "no weights")


def test_missing_shard_is_named(folder: Path) -> None:
    """The index lists a file that is not there."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    shards = {"model-00001-of-00002.safetensors": names[:9], "model-00002-of-00002.safetensors": names[9:]}
    index = {"metadata": {}, "weight_map": {name: shard for shard, members in shards.items() for name in members}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for shard, members in shards.items():
        save_file({name: weights[name] for name in members}, folder / shard, metadata={"format": "pt"})
    load(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    refused(folder, "model-00002-of-00002.safetensors", "copy or download")


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_half_written_weights(folder: Path, keep: int) -> None:
    """A copy that stopped: nothing, in the length, in the header, or one byte short."""
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refused(folder, "model.safetensors", "again")


def test_git_lfs_pointer(folder: Path) -> None:
    """A clone without git lfs holds a few lines of text instead of weights."""
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 269060552\n"
    (folder / "model.safetensors").write_text(pointer)
    refused(folder, "model.safetensors", "git lfs pull")


def test_missing_tensors_are_not_made_up(folder: Path) -> None:
    """transformers would fill a missing tensor with random numbers."""
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    refused(folder, "model.layers.1.mlp.up_proj.weight", "incomplete")


def test_weights_of_another_shape(folder: Path) -> None:
    """Config and weights of two different models."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    refused(folder, str(folder))


def test_no_tokenizer(folder: Path) -> None:
    """Named, with the option that helps; and that option does help."""
    spare = folder.parent / "tokenizer"
    spare.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.move(folder / name, spare / name)
    refused(folder, "no tokenizer", "target.tokenizer")
    assert load(folder, tokenizer=str(spare)).facts.num_token_ids == models.VOCAB


def test_broken_tokenizer(folder: Path) -> None:
    """A tokenizer file that is cut off."""
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model": {')
    refused(folder, "tokenizer")


def test_unknown_architecture(folder: Path) -> None:
    """A model type this transformers does not have."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "llama99", "architectures": ["Llama99"]}))
    refused(folder, "architecture", "transformers")


def test_not_a_causal_language_model(folder: Path) -> None:
    """An encoder-decoder cannot be a target."""
    transformers.T5Config(d_model=16, num_layers=1).save_pretrained(folder)
    refused(folder, "not a causal language model")


def test_code_of_its_own_needs_consent(folder: Path) -> None:
    """Remote code is never run unless asked for."""
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text("raise SystemExit('ran foreign code')")
    refused(folder, "trust_remote_code=true")


def test_unknown_experts_implementation(tmp_path: Path) -> None:
    """A wrong name is a configuration error for a mixture, and irrelevant for a dense model."""
    folder = models.tiny_qwen3_moe(tmp_path)
    with pytest.raises(ConfigError, match=r"target\.experts='fastest'"):
        load(folder, experts="fastest")
    assert load(folder, experts="batched_mm").describe()["experts"] == "batched_mm"


def test_random_weights_need_no_weight_file(folder: Path) -> None:
    """load_format=dummy reads config and tokenizer only, gives the same weights each time and says so."""
    (folder / "model.safetensors").unlink()
    first, second = (load(folder, load_format="dummy") for _ in range(2))
    assert first.facts.checkpoint_hash == second.facts.checkpoint_hash
    assert "dummy" in first.describe()["weights"]
    (logits,) = Runner(first, 1).step([(0, random_prompts(8)[0])])
    assert torch.isfinite(logits).all()


def test_pages_larger_than_memory(llama_folder: Path) -> None:
    """More blocks than memory is an error about the option, and leaves nothing attached."""
    target = load(llama_folder)
    with pytest.raises(ConfigError, match="num_kv_blocks"):
        target.attach(limits_for(target, num_blocks=2**40), Taps())
    target.attach(limits_for(target), Taps())
