"""The EAGLE-3 head: its formula written out by hand, and what each row may depend on."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from specflow.heads.eagle3 import Eagle3Head
from tests.heads.eagle3_helpers import VARIANTS, VOCAB, WIDTH, causal, make_config, make_head, prefill, rotary

T = 9


@pytest.fixture(params=list(VARIANTS))
def head(request: pytest.FixtureRequest) -> Eagle3Head:
    return make_head(**VARIANTS[request.param])


def features(head: Eagle3Head, count: int = T, seed: int = 3) -> Tensor:
    captures = len(head.config.capture_layers)
    return torch.randn(count, captures, WIDTH, generator=torch.Generator().manual_seed(seed))


def norm(values: Tensor, weight: Tensor) -> Tensor:
    return values * (values.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def by_hand(head: Eagle3Head, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """One layer in double precision from the named weights: raw output and logits of rows 0 … n-2."""
    w: Any = {name: weight.double() for name, weight in head.state_dict().items()}
    config, rows = head.config, len(tokens) - 1
    hidden = hidden[:rows].double()
    if config.norm_before_fc:
        hidden = norm(hidden.flatten(1), w["input_norm.weight"]).view(rows, -1, WIDTH)
    if config.fc_norm:
        hidden = torch.stack([norm(hidden[:, i], w[f"fc_norm.{i}.weight"]) for i in range(hidden.shape[1])], 1)
    fused = hidden.flatten(1) @ w["fc.weight"].T
    layer = {name.removeprefix("layers.0."): weight for name, weight in w.items() if name.startswith("layers.0.")}
    normed = norm(fused, layer["hidden_norm.weight"])
    residual = normed if config.norm_before_residual else fused
    inputs = torch.cat([norm(w["embed_tokens.weight"][tokens[1:]], layer["input_layernorm.weight"]), normed], -1)
    mixed = residual + attention(config.layer, layer, inputs)
    wide = norm(mixed, layer["post_attention_layernorm.weight"])
    gate, up = wide @ layer["mlp.gate_proj.weight"].T, wide @ layer["mlp.up_proj.weight"].T
    raw = mixed + (F.silu(gate) * up) @ layer["mlp.down_proj.weight"].T
    return raw, norm(raw, w["norm.weight"]) @ w["lm_head.weight"].T


def attention(shape: Any, layer: Any, inputs: Tensor) -> Tensor:
    rows, half = len(inputs), shape.head_dim // 2
    angles = torch.outer(torch.arange(rows).double(), 10_000.0 ** (-torch.arange(half).double() / half))

    def heads(name: str, turned: bool) -> Tensor:
        values = (inputs @ layer[f"self_attn.{name}_proj.weight"].T).view(rows, -1, shape.head_dim)
        if turned and shape.qk_norm:
            values = norm(values, layer[f"self_attn.{name}_norm.weight"])
        if turned:
            cos, sin = angles.cos()[:, None], angles.sin()[:, None]
            left, right = values[..., :half], values[..., half:]
            values = torch.cat([left * cos - right * sin, right * cos + left * sin], -1)
        return values

    query, key, value = heads("q", True), heads("k", True), heads("v", False)
    result = torch.zeros_like(query)
    for row in range(rows):
        for head in range(shape.num_heads):
            kv = head // (shape.num_heads // shape.num_kv_heads)
            weights = torch.softmax(key[: row + 1, kv] @ query[row, head] * shape.head_dim**-0.5, -1)
            result[row, head] = weights @ value[: row + 1, kv]
    return result.flatten(1) @ layer["self_attn.o_proj.weight"].T


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "two_layers"])
def test_the_formula(variant: str) -> None:
    head = make_head(**VARIANTS[variant])
    tokens, hidden = torch.arange(3, 3 + T), features(head)
    states, logits = prefill(head, tokens, hidden)
    raw, expected = by_hand(head, tokens, hidden)
    torch.testing.assert_close(logits.double(), expected, atol=2e-4, rtol=1e-4)
    fed = norm(raw, head.norm.weight.double()) if head.config.norm_output else raw
    torch.testing.assert_close(states.double(), fed, atol=2e-4, rtol=1e-4)


def test_row_p_reads_the_next_token_and_nothing_later(head: Eagle3Head) -> None:
    """The shift: the feature at p goes with token p + 1."""
    tokens, hidden = torch.arange(3, 3 + T), features(head)
    _, logits = prefill(head, tokens, hidden)
    p = 4
    for changed in range(T):
        other = tokens.clone()
        other[changed] = 200
        _, now = prefill(head, other, hidden)
        same = torch.equal(now[: p + 1], logits[: p + 1])
        assert same == (changed > p + 1 or changed == 0), f"token {changed}"
        assert changed == 0 or not torch.allclose(now[changed - 1], logits[changed - 1], atol=1e-3)
    for changed in range(T - 1):
        _, now = prefill(head, tokens, hidden.index_fill(0, torch.tensor([changed]), 1.0))
        assert torch.allclose(now[:changed], logits[:changed], atol=1e-5)
        assert not torch.allclose(now[changed], logits[changed], atol=1e-3)


def test_positions_are_relative(head: Eagle3Head) -> None:
    tokens, hidden = torch.arange(3, 3 + T), features(head)
    _, logits = prefill(head, tokens, hidden)
    rows = rotary(head, torch.arange(T - 1) + 50)
    _, normed = head(head.embed(tokens[1:]), head.fuse(hidden[:-1]), rows, causal(T - 1))
    torch.testing.assert_close(head.logits(normed), logits, atol=1e-3, rtol=1e-3)


def test_lent_tables_are_no_part_of_the_state() -> None:
    head = Eagle3Head(make_config(own_head=False))
    embedding, rows = torch.randn(VOCAB, WIDTH), torch.nn.Parameter(torch.randn(VOCAB, WIDTH))
    head.borrow(embedding, rows)
    assert not {"embed_tokens.weight", "lm_head.weight"} & set(head.state_dict())
    assert len(list(head.parameters())) == len(head.state_dict())
    assert torch.equal(head.embed(torch.tensor([5])), embedding[5:6])
    torch.testing.assert_close(head.logits(embedding[:2]), embedding[:2] @ rows.detach().T)


def test_logit_scale() -> None:
    plain, scaled = make_head(), make_head(logit_scale=0.5)
    normed = torch.randn(2, WIDTH)
    torch.testing.assert_close(scaled.logits(normed), plain.logits(normed) * 0.5)
