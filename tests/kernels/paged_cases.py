"""Steps over pages full of junk, and what attention over them has to give."""

import math

import numpy as np
import torch

from specflow.core.attention import AttentionInputs
from specflow.kernels.paged_attention import plan_groups, write_pages

BLOCK = 4


def dense(
    query: torch.Tensor,  # [Q, Hq, Dk], the last Q positions
    keys: torch.Tensor,  # [S, Hkv, Dk]
    values: torch.Tensor,  # [S, Hkv, Dv]
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    causal: bool = True,
) -> torch.Tensor:
    """One head, one token at a time, straight from the definition."""
    count, heads = query.shape[:2]
    length, shared = keys.shape[0], heads // keys.shape[1]
    output = torch.zeros(count, heads, values.shape[2], dtype=torch.float64)
    for token in range(count):
        position = length - count + token
        first = 0 if window is None else max(0, position - window + 1)
        last = position + 1
        if not causal:
            last = length if window is None else min(length, position + window)
        seen = slice(first, last)
        for head in range(heads):
            scores = keys[seen, head // shared].double() @ query[token, head].double() * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            extra = 0.0 if sinks is None else math.exp(sinks[head].item())
            weights = scores.exp() / (scores.exp().sum() + extra)
            output[token, head] = weights @ values[seen, head // shared].double()
    return output


class Paged:
    """Requests whose keys and values are stored in pages full of junk elsewhere."""

    def __init__(
        self,
        spans: list[tuple[int, int]],
        heads: tuple[int, int],
        sizes: tuple[int, int],
        layout: str,
        seed: int = 0,
        block: int = BLOCK,
        junk: float = 50.0,
    ) -> None:
        """spans: (query tokens, sequence length) of each request; layout: "scattered" or "adjacent" blocks of `block`
        positions; junk: what pages hold where nothing was written."""
        self.block = block
        generator = torch.Generator().manual_seed(seed)
        self.lengths = np.array([count for count, _ in spans])
        self.ends = np.array([end for _, end in spans])
        per_request = -(-max(self.ends) // block) + 1
        blocks = 1 + np.arange(per_request * len(spans))
        if layout == "scattered":
            blocks = np.random.default_rng(seed).permutation(blocks)
        self.table = blocks.reshape(len(spans), per_request)
        pages = (len(blocks) + 1, block, heads[1])
        self.key_pages = torch.full((*pages, sizes[0]), junk)
        self.value_pages = torch.full((*pages, sizes[1]), junk)
        self.keys = [torch.randn(end, heads[1], sizes[0], generator=generator) for end in self.ends]
        self.values = [torch.randn(end, heads[1], sizes[1], generator=generator) for end in self.ends]
        self.query = torch.randn(int(self.lengths.sum()), heads[0], sizes[0], generator=generator)
        for row, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            positions = np.arange(len(keys))
            slots = torch.from_numpy(self.table[row, positions // block] * block + positions % block)
            write_pages(self.key_pages, slots, keys)
            write_pages(self.value_pages, slots, values)

    def inputs(self, *, with_starts: bool = False) -> AttentionInputs:
        """Metadata of a step that attends only; everything is stored already. with_starts: query_start as well."""
        spans = zip(self.ends, self.lengths, strict=True)
        positions = np.concatenate([np.arange(end - count, end) for end, count in spans])
        return AttentionInputs(
            positions=torch.from_numpy(positions),
            slot_mapping=torch.zeros(len(positions), dtype=torch.int64),
            block_table=torch.from_numpy(self.table),
            seq_len=torch.from_numpy(self.ends),
            groups=plan_groups(self.lengths, self.ends, self.table, self.block),
            query_start=torch.from_numpy(np.concatenate([[0], self.lengths.cumsum()])) if with_starts else None,
        )

    def expected(self, scale: float, **rules: object) -> torch.Tensor:
        """The dense result of all requests, [T, Hq, Dv]."""
        parts = zip(self.query.split(self.lengths.tolist()), self.keys, self.values, strict=True)
        return torch.cat([dense(query, keys, values, scale, **rules) for query, keys, values in parts])  # type: ignore[arg-type]


STEPS = {
    "one token": [(1, 9)],
    "block": [(5, 13)],
    "prompt": [(11, 11)],
    "ragged tokens": [(1, 3), (1, 17), (1, 8)],
    "ragged blocks": [(4, 21), (4, 4), (4, 9)],
    "mixed": [(7, 7), (1, 12), (1, 5), (5, 18)],
}
HEADS = {"plain": (3, 3), "grouped": (6, 2), "one kv head": (4, 1)}
RULES = {
    "causal": {},
    "window": {"window": 6},
    "window of one": {"window": 1},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "all": {"window": 5, "softcap": 3.0, "sinks": True},
    "both ways": {"causal": False},
    "both ways in a window": {"causal": False, "window": 3},
    "both ways, all": {"causal": False, "window": 5, "softcap": 3.0, "sinks": True},
}
