"""The DFlash head: one product for all context, what a block depends on, and agreement with the published code."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specflow.checkpoints.dflash import dflash_shapes, save_dflash
from specflow.heads.dflash import BlockLayer, ContextProjection
from specflow.kernels.rotary import rotary_table
from tests.heads.dflash_cases import FULL, SHAPE, WIDTH, make_config, make_head, plain_block


def features(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 3, WIDTH, generator=torch.Generator().manual_seed(seed))


def test_names_and_shapes_are_the_published_ones() -> None:
    shapes = dflash_shapes(make_config())
    assert len(shapes) == 11 * 2 + 3
    assert shapes["fc.weight"] == (WIDTH, 3 * WIDTH)
    assert shapes["hidden_norm.weight"] == shapes["norm.weight"] == (WIDTH,)
    assert shapes["layers.1.self_attn.k_proj.weight"] == (16, WIDTH)
    assert shapes["layers.1.self_attn.q_norm.weight"] == (8,)
    assert shapes["layers.0.mlp.down_proj.weight"] == (WIDTH, 48)


@pytest.mark.parametrize("switches", [{}, {"qk_norm": False, "qkv_bias": True}])
def test_one_product_equals_layer_by_layer(switches: dict[str, Any]) -> None:
    head = make_head(make_config(shape=replace(SHAPE, **switches)))
    for name, weight in head.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(weight)
    rows = rotary_table(SHAPE.rope, 20, torch.device("cpu"), torch.float32).rows(torch.arange(3, 14))
    context = head.context(features(11))
    together = ContextProjection(head)(context, rows)
    for index, (keys, values) in enumerate(head.context_keys_values(context, rows)):
        torch.testing.assert_close(together[index, :, :2], keys)
        torch.testing.assert_close(together[index, :, 2:], values)


def test_a_block_is_no_prefix_of_a_longer_one() -> None:
    """Rows see the masks behind them, so fewer drafts are not the first of more; in a causal block they are."""
    for causal, same in ((False, False), (True, True)):
        head = make_head(make_config(block_layers=(BlockLayer(causal=causal),) * 2))
        short, long = (plain_block(head, features(6), 9, rows) for rows in (3, 5))
        assert torch.allclose(short, long[:3], atol=1e-5) == same


def test_scales_and_softcap() -> None:
    plain = make_head()
    raw = plain.embed(torch.tensor([5]))
    assert torch.equal(make_head(make_config(embedding_scale=3.0)).embed(torch.tensor([5])), 3 * raw)
    states = torch.randn(2, WIDTH)
    expected = 2.0 * torch.tanh(0.5 * plain.logits(states) / 2.0)
    head = make_head(make_config(logit_scale=0.5, logit_softcap=2.0))
    torch.testing.assert_close(head.logits(states), expected)


PEER_RULES = {
    "full": {"block_layers": (FULL, FULL, FULL)},
    "sliding": {"block_layers": (BlockLayer(4, True), BlockLayer(4, True), FULL)},
    "causal": {"block_layers": (BlockLayer(causal=True),) * 3},
    "sliding both ways": {"block_layers": (BlockLayer(4), BlockLayer(4), FULL)},
    "scaled": {"block_layers": (FULL,) * 3, "embedding_scale": 2.0, "logit_scale": 0.5, "logit_softcap": 5.0},
}


@pytest.mark.peer
@pytest.mark.parametrize("rule", PEER_RULES)
def test_logits_equal_the_published_implementation(rule: str, tmp_path: Path) -> None:
    """PyPI dflash 0.1.0 reads the checkpoint that we write and gives the same logits, at once and step by step."""
    peer = pytest.importorskip("dflash.model")
    from safetensors.torch import load_file
    from transformers import Qwen3Config

    head = make_head(make_config(block_size=6, **PEER_RULES[rule]))
    save_dflash(tmp_path, head)
    config = Qwen3Config.from_pretrained(tmp_path)
    config._attn_implementation = "sdpa"
    model = peer.DFlashDraftModel(config).eval().float()
    model.load_state_dict({name: weight.float() for name, weight in load_file(tmp_path / "model.safetensors").items()})
    assert tuple(model.target_layer_ids) == head.config.capture_layers
    assert (model.block_size, model.mask_token_id) == (6, head.config.mask_token_id)
    target = SimpleNamespace(get_input_embeddings=lambda: SimpleNamespace(weight=head.embedding_table))
    ids = torch.full((1, 6), head.config.mask_token_id)
    ids[0, 0] = 9
    noise = peer._raw_input_embeddings(target, ids, peer._draft_value(config, "input_embedding_scale", 1.0))
    states, cache = features(11).flatten(1).unsqueeze(0), peer._make_cache(config)
    with torch.no_grad():
        for first, last in ((0, 11), (0, 5), (5, 11)):
            past = cache if (first, last) != (0, 11) else None
            hidden = model(
                target_hidden=states[:, first:last],
                noise_embedding=noise,
                position_ids=torch.arange(first, last + 6).unsqueeze(0),
                past_key_values=past,
                use_cache=past is not None,
            )
            if past is not None:
                peer._crop_to(past, last)
            theirs = model.compute_logits(hidden, lambda rows: rows @ head.head_table.T)[0]
            ours = plain_block(head, features(11)[:last], 9, 6)
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
