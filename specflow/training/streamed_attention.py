"""Attention of an unrolled head on a GPU: the first step's keys streamed by one kernel, later steps merged into it.

The same sums as `specflow.training.unrolled_attention`, in as many launches as there are steps, not blocks. torch's
FlexAttention gives the mix over the first step's keys together with its log-sum-exp; a later step adds one key per row,
so its share is a column: with lse the log-sum-exp of all, out = exp(lse_0 - lse) out_0 + sum_s exp(c_s - lse) v_s.
Scores of all rows and keys never exist.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

__all__ = ["StreamedAttention", "visible_blocks"]


@cache
def _streamed(compiled: bool) -> Callable[..., Any]:
    """FlexAttention; compiled it is one kernel each way, once per set of shapes."""
    attend: Callable[..., Any] = flex_attention
    return torch.compile(attend, dynamic=False) if compiled else attend


def visible_blocks(documents: Tensor) -> BlockMask:
    """What rows of a pack see of the first step: their document up to themselves. documents [T] int64."""

    def sees(_batch: Tensor, _head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return (row >= key) & (documents[row] == documents[key])

    total = len(documents)
    return create_block_mask(sees, None, None, total, total, device=documents.device)


@dataclass
class StreamedAttention:
    """An `Attend` for one pack; call `next_step` after each pass of the head but the last."""

    mask: BlockMask
    compiled: bool = True
    _first: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # per layer, [1, Hkv, T, D]
    _later: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)  # keys and values [T, Hkv, 1, D]
    _step: int = 0

    def next_step(self) -> None:
        """The head runs once more, over its own outputs."""
        self._step += 1

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `specflow.heads.layers.Attend`."""
        query, key = query.to(value.dtype), key.to(value.dtype)
        later = self._later.setdefault(layer, [])
        if self._step == 0:
            self._first[layer] = (_by_head(key), _by_head(value))
        else:
            later.append((key.unsqueeze(2), value.unsqueeze(2)))
        keys, values = self._first[layer]
        mixed, extra = _streamed(self.compiled)(
            _by_head(query),
            keys,
            values,
            block_mask=self.mask,
            scale=query.shape[-1] ** -0.5,
            enable_gqa=query.shape[1] != key.shape[1],
            return_aux=AuxRequest(lse=True),
        )
        return _merged(query, mixed[0].transpose(0, 1), extra.lse[0].transpose(0, 1), later)


def _by_head(rows: Tensor) -> Tensor:
    """[T, H, D] -> [1, H, T, D]."""
    return rows.transpose(0, 1).unsqueeze(0).contiguous()


def _merged(query: Tensor, mixed: Tensor, lse: Tensor, later: list[tuple[Tensor, Tensor]]) -> Tensor:
    """query and mixed [T, Hq, D], lse [T, Hq] float32 natural, later: keys and values [T, Hkv, 1, D] of each step."""
    if not later:
        return mixed
    count, size = len(query), query.shape[-1]
    keys = torch.cat([key for key, _ in later], 2)  # [T, Hkv, s, D]
    values = torch.cat([value for _, value in later], 2)
    grouped = query.unflatten(1, (keys.shape[1], -1))  # [T, Hkv, g, D]
    scores = (grouped @ keys.transpose(2, 3)).float() * size**-0.5  # [T, Hkv, g, s]
    scores = torch.cat([lse.view(count, keys.shape[1], -1, 1), scores], -1)
    shares = torch.softmax(scores, -1).to(values.dtype)
    rest = (shares[..., 1:] @ values).flatten(1, 2)
    return mixed * shares[..., :1].flatten(1, 2) + rest
