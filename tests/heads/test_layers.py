"""Parts of heads against transformers' own layers, and the tables that heads borrow."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from specflow.checkpoints.folder import read_json
from specflow.checkpoints.head_layers import describe_layers, layer_windows, read_layer_shape
from specflow.errors import CheckpointError, UnsupportedModelError
from specflow.heads.layers import DecoderLayer
from specflow.kernels.rotary import rotary_table
from specflow.targets.transformers_facts import token_tables


def causal(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention over one document."""
    by_head = (part.transpose(0, 1).unsqueeze(0) for part in (query, key, value))
    output = F.scaled_dot_product_attention(*by_head, is_causal=True, enable_gqa=True)
    return output[0].transpose(0, 1)


@pytest.mark.parametrize("family", ["llama_folder", "qwen3_folder"])
def test_a_layer_equals_transformers(family: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(family)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    shape = read_layer_shape(folder, read_json(folder / "config.json"))
    layer = DecoderLayer(shape)
    layer.load_state_dict(model.model.layers[1].state_dict())
    ids = torch.arange(3, 20).unsqueeze(0)
    with torch.no_grad():
        hidden = model(ids, output_hidden_states=True).hidden_states
        rows = rotary_table(shape.rope, 64, torch.device("cpu"), torch.float32).rows(torch.arange(ids.shape[1]))
        ours = layer(hidden[1][0], rows, 0, causal)
    torch.testing.assert_close(ours, hidden[2][0], atol=1e-5, rtol=1e-5)


def test_description_round_trip(llama_folder: Path) -> None:
    shape = read_layer_shape(llama_folder, read_json(llama_folder / "config.json"))
    assert read_layer_shape(llama_folder, describe_layers(shape, 2, 100)) == shape


def test_rotary_base_in_both_spellings_and_never_inherited() -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    assert read_layer_shape(Path("x"), sizes | {"rope_theta": 5e5}).rope.theta == 5e5
    assert read_layer_shape(Path("x"), sizes | {"rope_parameters": {"rope_theta": 3e5}}).rope.theta == 3e5
    assert read_layer_shape(Path("x"), sizes).rope.theta == 10_000


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"model_type": "gpt2"}, UnsupportedModelError, "gpt2"),
        ({"hidden_act": "gelu"}, UnsupportedModelError, "gelu"),
        ({"hidden_size": None}, CheckpointError, "hidden_size=None"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, UnsupportedModelError, "yarn"),
        ({"quantization_config": {"bits": 4}}, UnsupportedModelError, "quantised"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(change: dict[str, Any], error: type[Exception], words: str) -> None:
    raw = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2} | change
    with pytest.raises(error, match=words):
        read_layer_shape(Path("head"), raw)


def test_windows_by_layer_type() -> None:
    raw = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
    assert layer_windows(raw, 2) == (16, None)
    assert layer_windows({"sliding_window": 16}, 2) == (None, None)


def test_token_tables_are_the_models_own(llama_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama_folder)
    tables = token_tables(model)
    assert not isinstance(tables, str)
    assert tables[0] is model.get_input_embeddings().weight
    assert tables[1] is model.get_output_embeddings().weight


def test_scaled_tables_are_not_lent(llama_folder: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(llama_folder)
    model.config.logits_scaling = 2.0
    assert "logits_scaling=2.0" in str(token_tables(model))
    model.config.logits_scaling = 1.0
    model.get_output_embeddings = lambda: SimpleNamespace()
    assert "not a plain matrix" in str(token_tables(model))
