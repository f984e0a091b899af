"""Norms and attention of a decoder layer, fused for a few float32 tokens on a CPU.

A drafting step of a small model is some forty torch operations a layer on a handful of rows, each costing more for
its call than for its work. Here most of them are three calls: norm, attention with everything around it, norm.
`proposers.decoder` has the same in plain torch, which is the reference and runs everywhere else.
"""

from functools import partial

import numpy as np
import torch

from specflow.kernels.compiled import compiled

_fused = partial(compiled, reorder_sums=True)


def add_norm(hidden: torch.Tensor, delta: torch.Tensor, weight: np.ndarray, eps: np.float32) -> torch.Tensor:
    """Add delta to hidden [T, E] in place; returns the RMSNorm of the sum with weight [E], a new tensor."""
    output = torch.empty_like(hidden)
    _add_norm(hidden.numpy(), delta.numpy(), weight, eps, output.numpy())
    return output


def rotate_store_attend(
    qkv: torch.Tensor,
    pages: np.ndarray,
    block_table: np.ndarray,
    first: np.ndarray,
    *,
    num_heads: int,
    qk_norm: np.ndarray,
    eps: np.float32,
    rotary: np.ndarray,
    window: int,
    scratch: np.ndarray,
) -> torch.Tensor:
    """Attention of T = R * q tokens, the q of a request side by side from position first[r] (raised to 0).

    qkv [T, (Hq + 2 Hkv) D] is overwritten: query and key are normalised by qk_norm [Hq + Hkv, D] (empty: not at all)
    and rotated by rotary [P, 2, 1, D]. Keys and values go to pages [num_blocks, block_size, 2 Hkv, D] through
    block_table [R, max_blocks]; positions past its columns share block 0. window: keys seen, 0 = all before the token.
    scratch [at least one more than any position] float32. Returns [T, Hq D].
    """
    output = qkv.new_empty(qkv.shape[0], num_heads * pages.shape[3])
    heads = qkv.numpy().reshape(qkv.shape[0], -1, pages.shape[3])
    _prepare(heads, pages, block_table, first, num_heads, qk_norm, eps, rotary)
    _attend(heads, pages, block_table, first, num_heads, window, scratch, output.numpy())
    return output


@_fused
def _add_norm(hidden, delta, weight, eps, output):  # type: ignore[no-untyped-def]
    """See `add_norm`."""
    width = hidden.shape[1]
    for t in range(hidden.shape[0]):
        total = np.float32(0)
        for i in range(width):
            value = hidden[t, i] + delta[t, i]
            hidden[t, i] = value
            total += value * value
        scale = np.float32(1) / np.sqrt(total / np.float32(width) + eps)
        for i in range(width):
            output[t, i] = hidden[t, i] * scale * weight[i]


@_fused
def _prepare(heads, pages, block_table, first, num_heads, qk_norm, eps, rotary):  # type: ignore[no-untyped-def]
    """Normalise and rotate query and key of heads [T, Hq + 2 Hkv, D] in place; write key and value to their page."""
    tokens, total_heads, size = heads.shape
    block_size, num_stored = pages.shape[1], pages.shape[2]
    per_request = tokens // len(first)
    half = size // 2
    for t in range(tokens):
        position = max(first[t // per_request] + t % per_request, 0)
        cos, sin = rotary[position, 0, 0], rotary[position, 1, 0]
        for h in range(total_heads - num_stored // 2):
            head = heads[t, h]
            if len(qk_norm):
                total = np.float32(0)
                for d in range(size):
                    total += head[d] * head[d]
                scale = np.float32(1) / np.sqrt(total / np.float32(size) + eps)
                for d in range(size):
                    head[d] = head[d] * scale * qk_norm[h, d]
            for d in range(half):
                low, high = head[d], head[d + half]
                head[d] = low * cos[d] + high * sin[d]
                head[d + half] = high * cos[d + half] + low * sin[d + half]
        column = position // block_size
        block = block_table[t // per_request, column] if column < block_table.shape[1] else 0
        pages[block, position % block_size] = heads[t, num_heads:]


@_fused
def _attend(heads, pages, block_table, first, num_heads, window, scratch, output):  # type: ignore[no-untyped-def]
    """Softmax attention of heads [T, Hq + 2 Hkv, D] over pages; output [T, Hq D]."""
    tokens, _, size = heads.shape
    kv_heads = pages.shape[2] // 2
    per_request = tokens // len(first)
    for t in range(tokens):
        stop = max(first[t // per_request] + t % per_request, 0) + 1
        start = max(stop - window, 0) if window > 0 else 0
        for h in range(num_heads):
            kv = h // (num_heads // kv_heads)
            blocks, result = block_table[t // per_request], output[t, h * size : (h + 1) * size]
            _scores(heads[t, h], pages, kv, blocks, start, stop, scratch)
            total = _exponentials(scratch[start:stop])
            _weighted_sum(scratch, pages, kv_heads + kv, blocks, start, stop, result)
            for d in range(size):
                result[d] /= total


@_fused
def _scores(query, pages, head, blocks, start, stop, scores):  # type: ignore[no-untyped-def]
    """scores[j] = query . key of position j / sqrt(D), for start <= j < stop."""
    size, block_size = len(query), pages.shape[1]
    factor = np.float32(1) / np.sqrt(np.float32(size))
    for column in range(start // block_size, (stop + block_size - 1) // block_size):
        # Positions past the table share block 0.
        page = pages[blocks[column] if column < len(blocks) else 0]
        begin = column * block_size
        for j in range(max(start - begin, 0), min(stop - begin, block_size)):
            score = np.float32(0)
            for d in range(size):
                score += query[d] * page[j, head, d]
            scores[begin + j] = score * factor


@_fused
def _exponentials(scores):  # type: ignore[no-untyped-def]
    """Replace scores by exp(score - highest); returns their sum."""
    highest = scores[0]
    for score in scores:
        highest = max(highest, score)
    total = np.float32(0)
    for j in range(len(scores)):
        scores[j] = np.exp(scores[j] - highest)
        total += scores[j]
    return total


@_fused
def _weighted_sum(weights, pages, head, blocks, start, stop, result):  # type: ignore[no-untyped-def]
    """result [D] = sum of weights[j] * value of position j, for start <= j < stop."""
    size, block_size = len(result), pages.shape[1]
    result[:] = 0
    for column in range(start // block_size, (stop + block_size - 1) // block_size):
        page = pages[blocks[column] if column < len(blocks) else 0]
        begin = column * block_size
        for j in range(max(start - begin, 0), min(stop - begin, block_size)):
            weight = weights[begin + j]
            for d in range(size):
                result[d] += weight * page[j, head, d]
