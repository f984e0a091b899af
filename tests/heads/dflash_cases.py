"""Random DFlash heads, the targets they belong to, and what such a head computes, written down without pages."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from specflow.checkpoints.dflash import save_dflash
from specflow.heads.dflash import BlockLayer, DFlashConfig, DFlashHead
from specflow.heads.layers import LayerShape, initialise
from specflow.kernels.rotary import RopeConfig, rotary_table
from specflow.targets.base import TokenTables

VOCAB, WIDTH, TARGET_LAYERS = 96, 32, 6
SHAPE = LayerShape(
    hidden_size=WIDTH,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    norm_eps=1e-6,
    rope=RopeConfig(head_dim=8, theta=10_000.0),
    qk_norm=True,
)
FULL = BlockLayer()


def make_config(**changes: Any) -> DFlashConfig:
    config = DFlashConfig(
        shape=SHAPE,
        block_layers=(FULL, FULL),
        block_size=5,
        sample_from_anchor=False,
        capture_layers=(0, 2, 5),
        target_hidden_size=WIDTH,
        num_target_layers=TARGET_LAYERS,
        mask_token_id=3,
        vocab_size=VOCAB,
        draft_vocab_size=VOCAB,
    )
    return replace(config, **changes)


def make_tables(vocab: int = VOCAB, width: int = WIDTH, seed: int = 11) -> TokenTables:
    generator = torch.Generator().manual_seed(seed)
    return TokenTables(
        torch.randn(vocab, width, generator=generator), torch.randn(vocab, width, generator=generator) / width**0.5
    )


def make_head(config: DFlashConfig | None = None, seed: int = 0, tables: TokenTables | None = None) -> DFlashHead:
    """A head whose answers vary: larger weights than at a usual start, norms other than 1."""
    config = config or make_config()
    tables = tables or make_tables()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head = DFlashHead(config)
        initialise(head, std=0.15)
        for name, weight in head.named_parameters():
            if "norm" in name:
                torch.nn.init.uniform_(weight, 0.5, 1.5)
            weight.data = weight.data.bfloat16().float()  # what a saved head comes back with
    if config.reduced:
        head.ids = torch.arange(config.draft_vocab_size) * 2 + 1
    head.borrow(tables.embedding, tables.head)
    return head.requires_grad_(False)


def make_target(tables: TokenTables | None = None, dtype: torch.dtype = torch.float32, **facts: Any) -> Any:
    """What a proposer reads of a loaded target."""
    tables = tables or make_tables()
    known = {
        "name": "target",
        "vocab_size": len(tables.embedding),
        "num_token_ids": len(tables.embedding),
        "dtype": dtype,
        "hidden_size": tables.embedding.shape[1],
        "num_layers": TARGET_LAYERS,
    }
    return SimpleNamespace(facts=SimpleNamespace(**known | facts), token_tables=lambda: tables)


def saved_head(folder: Path, config: DFlashConfig | None = None, seed: int = 0) -> DFlashHead:
    head = make_head(config, seed)
    save_dflash(folder, head)
    return head


def plain_block(head: DFlashHead, features: Tensor, anchor: int, num_rows: int) -> Tensor:
    """Logits [rows, Vd] of one block behind features [s, A, Et] of all positions before the anchor, at once."""
    config, start = head.config, len(features)
    table = rotary_table(config.shape.rope, start + num_rows, torch.device("cpu"), torch.float32)
    before, inside = table.rows(torch.arange(start)), table.rows(torch.arange(start, start + num_rows))
    context = head.context_keys_values(head.context(features), before)

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = (torch.cat(pair) for pair in zip(context[layer], (key, value), strict=True))
        rule = config.block_layers[layer]
        rows = torch.arange(start, start + num_rows).unsqueeze(1)
        columns = torch.arange(start + num_rows)
        seen = torch.ones(num_rows, start + num_rows, dtype=torch.bool)
        if rule.causal:
            seen &= columns <= rows
        if rule.window is not None:
            seen &= (rows - columns < rule.window) & (columns - rows < rule.window)
        shared = config.shape.num_heads // config.shape.num_kv_heads
        keys, values = keys.repeat_interleave(shared, 1), values.repeat_interleave(shared, 1)
        scores = torch.einsum("qhd,khd->hqk", query, keys) * config.shape.head_dim**-0.5
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values)

    ids = torch.full((num_rows,), config.mask_token_id)
    ids[0] = anchor
    return head.logits(head(head.embed(ids), inside, attend))
