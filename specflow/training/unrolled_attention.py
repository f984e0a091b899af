"""Attention of a head that is unrolled over its own outputs: keys of the first step, causal; of later steps, one each.

At step s row t sees the first step's keys 0 … t of its document and, of every later step up to s, only its own row:
exactly what a chain that is drafted from row t would see (Li et al. 2025, arXiv 2503.01840, "training-time test").
The grown mask is never built: scores are made for a block of rows at a time over the keys of the documents in it, and
the later steps add one column each.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_ROWS = {"cpu": 256}  # of one block
_ROWS_ELSEWHERE = 512
_MOST_KEPT = 2048  # rows up to which the probabilities of all blocks are kept for the backward pass


@dataclass(frozen=True)
class Block:
    """Rows first … last-1 of a pack, and the first key that any of them sees."""

    first: int
    last: int
    first_key: int


def plan_blocks(documents: Tensor, rows: int | None = None) -> list[Block]:
    """Blocks of a pack whose rows belong to documents [T] int64, numbers in order of appearance. Reads one small
    tensor back."""
    rows = rows or _ROWS.get(documents.device.type, _ROWS_ELSEWHERE)
    numbers = torch.arange(len(documents), device=documents.device)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[1:] = documents[1:] != documents[:-1]
    starts = torch.where(begins, numbers, 0).cummax(0).values[::rows].tolist()
    total = len(documents)
    return [Block(i * rows, min((i + 1) * rows, total), start) for i, start in enumerate(starts)]


@dataclass
class UnrolledAttention:
    """An `Attend` for one pack; call `next_step` after each pass of the head but the last.

    documents: [T] int64. Rows of one document stand side by side.
    """

    documents: Tensor
    blocks: list[Block]
    recompute: bool = False  # probabilities are computed again in the backward pass
    _keys: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)  # per layer those of every step
    _step: int = 0

    def next_step(self) -> None:
        """The head runs once more, over its own outputs."""
        self._step += 1

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `specflow.heads.layers.Attend`."""
        steps = self._keys.setdefault(layer, [])
        assert len(steps) == self._step
        steps.append((key.to(value.dtype), value))
        query = query.to(value.dtype)
        kept = not self.recompute and len(query) <= _MOST_KEPT
        outputs = []
        for block in self.blocks:
            inputs = self._inputs(block, query, steps)
            outputs.append(_mix(*inputs) if kept else _mix_again(_mix, inputs))
        return torch.cat(outputs)

    def _inputs(self, block: Block, query: Tensor, steps: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
        rows, keys = slice(block.first, block.last), slice(block.first_key, block.last)
        numbers = torch.arange(block.first_key, block.last, device=query.device)
        own = numbers[block.first - block.first_key :].unsqueeze(1)
        visible = (numbers <= own) & (self.documents[rows].unsqueeze(1) == self.documents[keys])
        later = [part[rows] for step in steps[1:] for part in step]
        return (query[rows], steps[0][0][keys], steps[0][1][keys], visible, *later)


def _mix_again(mix: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Tensor:
    result = checkpoint(mix, *inputs, use_reentrant=False, preserve_rng_state=False)
    assert isinstance(result, Tensor)
    return result


def _mix(query: Tensor, keys: Tensor, values: Tensor, visible: Tensor, *later: Tensor) -> Tensor:
    """query [c, Hq, D], keys and values [n, Hkv, D], visible [c, n] bool; later: keys and values [c, Hkv, D] of each
    further step in turn. Returns [c, Hq, D]."""
    count, _, size = query.shape
    shared = query.shape[1] // keys.shape[1]
    grouped = query.unflatten(1, (-1, shared)).permute(1, 2, 0, 3)  # [Hkv, g, c, D]
    scores = grouped.flatten(1, 2) @ keys.permute(1, 2, 0)  # [Hkv, g c, n]
    scores = scores.unflatten(1, (shared, count)).float() * size**-0.5
    columns = [scores.masked_fill(~visible, float("-inf"))]
    for key in later[::2]:
        columns.append((grouped * key.transpose(0, 1).unsqueeze(1)).sum(-1, keepdim=True).float() * size**-0.5)
    shares = torch.softmax(torch.cat(columns, -1), -1).to(values.dtype)
    width = len(keys)
    mixed = shares[..., :width].flatten(1, 2) @ values.transpose(0, 1)  # [Hkv, g c, D]
    mixed = mixed.unflatten(1, (shared, count))
    for index, value in enumerate(later[1::2]):
        mixed = mixed + shares[..., width + index].unsqueeze(-1) * value.transpose(0, 1).unsqueeze(1)
    return mixed.permute(2, 0, 1, 3).flatten(1, 2)
