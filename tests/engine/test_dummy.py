"""Random weights for target and head: folders that hold config.json and nothing else, run by the whole engine."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from specflow.core.sampling_params import SamplingParams
from specflow.engine.engine import Engine
from specflow.testing.tiny_models import tiny_sizes

VOCAB = 500
SIZES = tiny_sizes(VOCAB, 8) | {"initializer_range": 0.02, "rms_norm_eps": 1e-6}


def config_only(folder: Path, **entries: Any) -> str:
    """A folder with config.json alone."""
    folder.mkdir()
    raw = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "rope_theta": 10000.0}
    (folder / "config.json").write_text(json.dumps(raw | SIZES | entries))
    return str(folder)


HEADS: dict[str, dict[str, Any]] = {
    "eagle3": {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
    | {"draft_vocab_size": 100},
    "dflash": {"architectures": ["DFlashDraftModel"], "block_size": 6, "num_hidden_layers": 2, "num_target_layers": 8}
    | {"dflash_config": {"mask_token_id": 7, "target_layer_ids": [1, 3]}},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", list(HEADS))
def test_engine_cost_is_measurable_without_a_checkpoint(method: str, dtype: str, tmp_path: Path) -> None:
    """Synthetic acceptance on random weights: the asked number of tokens, drafts accepted, everything finite."""
    target = config_only(tmp_path / "target")
    head = config_only(tmp_path / "head", **HEADS[method])
    engine = Engine.from_config(
        {
            "target": {"name": "hf", "path": target, "load_format": "dummy", "dtype": dtype},
            "proposer": {"name": method, "path": head, "load_format": "dummy", "num_speculative_tokens": 3},
            "sampler": {"name": "synthetic", "synthetic_acceptance_length": 2.5},
            "backend": {"name": "cpu"},
            "scheduler": {"name": "continuous", "max_model_len": 200},
        }
    )
    outputs = engine.generate([[5, 9, 300], [499] * 20], SamplingParams(max_tokens=30, ignore_eos=True))
    assert [len(output.token_ids) for output in outputs] == [30, 30]
    assert sum(output.accepted for output in outputs) > 0
    assert not engine.incidents
    assert engine.proposer is not None
    assert engine.proposer.nan_drafts == 0  # type: ignore[attr-defined]
    facts = engine.describe()
    for part in ("target", "proposer"):
        assert "load_format=dummy" in facts[part]["weights"]
    assert outputs[0].text.split() == [str(token) for token in outputs[0].token_ids], "a token's text is its number"


def test_weights_are_made_where_and_as_they_run(tmp_path: Path) -> None:
    """In the wanted dtype, equal each time, without a detour over another dtype or the processor's generator."""
    path = config_only(tmp_path / "target")
    before = torch.random.get_rng_state()
    options = {"name": "hf", "path": path, "load_format": "dummy", "dtype": "bfloat16"}
    first, second = (Engine.from_config({"target": options, "backend": {"name": "cpu"}}).target for _ in range(2))
    assert torch.equal(before, torch.random.get_rng_state())
    assert first.facts.dtype == torch.bfloat16
    assert first.facts.checkpoint_hash == second.facts.checkpoint_hash
    assert first.facts.num_token_ids == VOCAB
    assert isinstance(first.model, transformers.PreTrainedModel)  # type: ignore[attr-defined]


def test_a_tokenizer_beside_the_config_is_used(llama_folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((llama_folder / name).read_bytes())
    options = {"name": "hf", "path": str(tmp_path), "load_format": "dummy"}
    engine = Engine.from_config({"target": options, "backend": {"name": "cpu"}})
    assert engine.target.tokenizer("abc")["input_ids"] != [0]
