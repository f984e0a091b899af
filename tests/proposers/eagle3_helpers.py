"""An EAGLE-3 proposer driven by hand-made contexts, with features that are a function of request and position."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specflow.core.draft import Draft
from specflow.heads.eagle3 import Eagle3Head
from specflow.proposers.base import Features, ProposeContext
from specflow.proposers.eagle3 import Eagle3Options, Eagle3Proposer
from specflow.proposers.eagle3_round import GpuEagle3Steps
from specflow.targets.base import TokenTables
from tests.heads.eagle3_helpers import VOCAB, WIDTH, chain, save_head, tiny_facts
from tests.proposers.helpers import MAX_LEN, SLOTS, Row, make_context, make_limits, skip_without_interpreter

PATHS = ("fused", "torch")
EVERY_PATH = (*PATHS, "triton")  # the last one interpreted, and slow


class Eagle3Bench:
    """The proposer, its tables and blocks; `truth` computes the same drafts afresh."""

    def __init__(self, folder: Path, head: Eagle3Head, k: int = 4, path: str = "fused", **options: Any) -> None:
        self.head, self.k = head, k
        self.proposer = Eagle3Proposer(
            Eagle3Options(path=str(save_head(folder, head)), num_speculative_tokens=k, **options)
        )
        tables = TokenTables(torch.zeros(VOCAB, WIDTH), torch.zeros(VOCAB, WIDTH))
        self.target: Any = SimpleNamespace(facts=tiny_facts(), token_tables=lambda: tables)
        self.proposer.load(self.target, SimpleNamespace(device=torch.device("cpu")))  # type: ignore[arg-type]
        self.limits = make_limits(k, VOCAB, self.proposer.requirements().lookahead_tokens)
        self.proposer.attach(self.target, self.limits)
        if path == "torch":
            self.proposer._steps = None
        if path == "triton":
            skip_without_interpreter()
            self.limits = replace(self.limits, paged_kernels="triton")
            self.proposer.attach(self.target, self.limits)
            self.proposer._steps = GpuEagle3Steps(
                self.proposer._head, self.proposer._pages, self.proposer._rotary, self.limits.max_num_seqs * (k + 1)
            )
        blocks = np.arange(1, 1 + SLOTS * self.limits.max_blocks_per_seq)
        np.random.default_rng(0).shuffle(blocks)
        self.blocks = np.zeros((SLOTS + 1, self.limits.max_blocks_per_seq), dtype=np.int64)
        self.blocks[:SLOTS] = blocks.reshape(SLOTS, -1)
        self.table = np.zeros((SLOTS + 1, self.limits.table_width), dtype=np.int64)
        captures = len(head.config.capture_layers)
        self.features = torch.randn(SLOTS, MAX_LEN + 8, captures, WIDTH, generator=torch.Generator().manual_seed(1))

    def context(self, rows: tuple[Row, ...], rejected: int = 0) -> ProposeContext:
        """rejected: packed rows behind each request's kept ones, whose features are noise."""
        for row in rows:
            self.table[row.slot, : len(row.tokens)] = row.tokens
            self.table[row.slot, len(row.tokens) :] = 0
        packed, positions, start = [], [], []
        for row in rows:
            start.append(len(positions))
            first, last = row.chunk
            positions += range(first, last + rejected)
            packed += [self.features[row.slot, first:last], torch.full_like(self.features[0, :rejected], 1e3)]
        hidden = torch.cat(packed)
        context = make_context(self.table, self.blocks, rows)
        features = Features(
            start=torch.tensor(start),
            num_valid=torch.from_numpy(context.host.chunk_len),
            positions=torch.tensor(positions),
            hidden={layer: hidden[:, index] for index, layer in enumerate(self.head.config.capture_layers)},
            last_hidden=None,
        )
        return replace(context, features=features)

    def step(self, *rows: Row, rejected: int = 0) -> Draft:
        return self.proposer.propose(self.context(rows, rejected))

    def truth(self, slot: int, tokens: list[int], count: int | None = None) -> list[int]:
        """Drafts after these tokens, everything computed afresh."""
        return self.chain(slot, tokens, count)[0]

    def chain(self, slot: int, tokens: list[int], count: int | None = None) -> tuple[list[int], Tensor]:
        hidden = self.features[slot, : len(tokens) - 1]
        return chain(self.head, torch.tensor(tokens), hidden, [None] * (count or self.k))

    def stored(self, slot: int, count: int) -> Tensor:
        """Keys and values of a request's first positions in every layer, [L, count, 2 Hkv, D]."""
        positions = np.arange(count)
        slots = self.blocks[slot][positions // self.limits.block_size] * self.limits.block_size
        slots = torch.from_numpy(slots + positions % self.limits.block_size)
        return torch.stack([pages.flatten(0, 1)[slots] for pages in self.proposer._pages.layers])
