"""Small random EAGLE-3 heads, and what they compute when everything is computed afresh."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specflow.checkpoints.eagle3 import save_eagle3
from specflow.heads.eagle3 import Eagle3Config, Eagle3Head
from specflow.heads.layers import Attend, LayerShape
from specflow.kernels.rotary import RopeConfig, rotary_table

WIDTH, VOCAB = 64, 384  # of the tiny targets in tests.models

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "qwen3": {"qk_norm": True},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "eagle3.1": {"fc_norm": True, "norm_output": True},
    "two_layers": {"num_layers": 2, "windows": (None, None)},
    "reduced": {"draft_vocab_size": 100},
    "five_captures": {"capture_layers": (-1, 0, 1, 2, 3)},
}


def make_config(**changes: Any) -> Eagle3Config:
    """A head of width 64 for the tiny targets; `qk_norm` and `hidden_size` change its layers."""
    width = changes.pop("hidden_size", WIDTH)
    shape = LayerShape(
        hidden_size=width,
        intermediate_size=96,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        norm_eps=1e-6,
        rope=RopeConfig(head_dim=16, theta=10_000.0),
        qk_norm=changes.pop("qk_norm", False),
    )
    sizes = {"capture_layers": (0, 1, 3), "target_hidden_size": WIDTH, "vocab_size": VOCAB, "draft_vocab_size": VOCAB}
    return Eagle3Config(layer=shape, **sizes | changes)


def make_head(seed: int = 0, **changes: Any) -> Eagle3Head:
    """Random weights, large enough that a slip moves the logits well beyond rounding; norms are not 1."""
    head = Eagle3Head(make_config(**{"own_embedding": True} | changes))
    generator = torch.Generator().manual_seed(seed)
    for name, weight in head.state_dict().items():
        norm = "norm" in name
        weight.copy_(torch.rand(weight.shape, generator=generator) + 0.5 if norm else 0.0)
        if not norm:
            weight.copy_(0.25 * torch.randn(weight.shape, generator=generator))
        weight.copy_(weight.bfloat16())  # so that saving changes nothing
    if head.config.reduced:
        chosen = torch.randperm(VOCAB, generator=generator)[: head.config.draft_vocab_size]
        head.ids = chosen.sort().values
    return head.requires_grad_(False)


def save_head(folder: Path, head: Eagle3Head) -> Path:
    """In the speculators format."""
    save_eagle3(
        folder,
        head,
        target_name="tiny",
        target_architecture="LlamaForCausalLM",
        max_positions=128,
        num_speculative_tokens=4,
    )
    return folder


def tiny_facts(**changes: Any) -> Any:
    """What a head's reader asks of a target."""
    known = {"name": "tiny", "vocab_size": VOCAB, "num_token_ids": VOCAB, "hidden_size": WIDTH, "num_layers": 4}
    return SimpleNamespace(**known | {"dtype": torch.float32, "max_model_len": 128} | changes)


def dense(mask: Tensor) -> Attend:
    """Attention of all rows at once under mask [T, T] bool."""

    def run(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        by_head = (part.transpose(0, 1).unsqueeze(0) for part in (query, key, value))
        return F.scaled_dot_product_attention(*by_head, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)

    return run


def causal(length: int) -> Attend:
    return dense(torch.ones(length, length, dtype=torch.bool).tril())


def rotary(head: Eagle3Head, positions: Tensor) -> Tensor:
    return rotary_table(head.config.layer.rope, 256, torch.device("cpu"), torch.float32).rows(positions)


def prefill(head: Eagle3Head, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Rows 0 … n-2 of tokens [n] with features hidden [n-1, A, Et]: feedback states and logits of each."""
    rows = len(tokens) - 1
    raw, normed = head(head.embed(tokens[1:]), head.fuse(hidden[:rows]), rotary(head, torch.arange(rows)), causal(rows))
    return head.feedback(raw, normed), head.logits(normed)


def chain(head: Eagle3Head, tokens: Tensor, hidden: Tensor, following: list[int | None]) -> tuple[list[int], Tensor]:
    """Drafts after tokens [n], each row of which is computed from the start every time.

    following: per step the token that the next row embeds, None for the draft itself. Returns drafts (target ids) and
    the logits they were taken from, [K, Vd].
    """
    embedded, states = head.embed(tokens[1:]), head.fuse(hidden[: len(tokens) - 1])
    drafts, found = [], []
    for given in following:
        count = len(embedded)
        raw, normed = head(embedded, states, rotary(head, torch.arange(count)), causal(count))
        logits = head.logits(normed[-1:])
        best = logits[0].argmax()
        drafts.append(int(head.ids[best] if head.config.reduced else best))
        found.append(logits[0])
        token = torch.tensor([drafts[-1] if given is None else given])
        embedded = torch.cat([embedded, head.embed(token)])
        states = torch.cat([states, head.feedback(raw, normed)[-1:]])
    return drafts, torch.stack(found)
