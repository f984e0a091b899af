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
    causal: bool = True,
) -> torch.Tensor:
    """Attention of T = R * q tokens, the q of a request side by side from position first[r] (raised to 0).

    qkv [T, (Hq + 2 Hkv) D] is overwritten: query and key are normalised by qk_norm [Hq + Hkv, D] (empty: not at all)
    and rotated by rotary [P, 2, 1, D]. Keys and values go to pages [num_blocks, block_size, 2 Hkv, D] through
    block_table [R, max_blocks]; positions past its columns share block 0. window: keys seen, 0 = all before the token.
    causal=False: a token also sees the tokens of its request behind it, with a window only those nearer than that.
    scratch [at least one more than any position] float32. Returns [T, Hq D].
    """
    output = qkv.new_empty(qkv.shape[0], num_heads * pages.shape[3])
    heads = qkv.numpy().reshape(qkv.shape[0], -1, pages.shape[3])
    _prepare(heads, pages, block_table, first, num_heads, qk_norm, eps, rotary)
    if causal or window:
        _attend(heads, pages, block_table, first, num_heads, window, causal, scratch, output.numpy())
    else:
        _attend_whole(qkv.view(len(qkv), -1, pages.shape[3]), pages, block_table, first, num_heads, output)
    return output


def _attend_whole(
    heads: torch.Tensor,
    pages: np.ndarray,
    block_table: np.ndarray,
    first: np.ndarray,
    num_heads: int,
    output: torch.Tensor,
) -> None:
    """`_attend` where all tokens of a request see the same keys: two matrix products for each, 2 to 4 times as fast as
    loops for 8 tokens. Every position must have a column of the table."""
    per_request, size, kv_heads = len(heads) // len(first), pages.shape[3], pages.shape[2] // 2
    memory = torch.from_numpy(pages)
    for row, part in enumerate(heads.split(per_request)):
        stop = int(first[row]) + per_request
        blocks = torch.from_numpy(block_table[row, : -(-stop // pages.shape[1])])
        seen = memory.index_select(0, blocks).view(-1, 2 * kv_heads, size)[:stop]
        queries = part[:, :num_heads].view(per_request, kv_heads, -1, size).transpose(0, 1)
        queries = queries.reshape(kv_heads, -1, size) * size**-0.5
        weights = torch.bmm(queries, seen[:, :kv_heads].permute(1, 2, 0)).softmax(-1)
        mixed = torch.bmm(weights, seen[:, kv_heads:].transpose(0, 1)).view(kv_heads, per_request, -1)
        output[row * per_request : (row + 1) * per_request] = mixed.transpose(0, 1).reshape(per_request, -1)


def store_keys_values(
    heads: torch.Tensor,
    pages: np.ndarray,
    block_table: np.ndarray,
    owners: np.ndarray,
    positions: np.ndarray,
    *,
    key_norm: np.ndarray,
    eps: np.float32,
    rotary: np.ndarray,
) -> None:
    """Norm and rotate keys of N tokens for L layers and store them with their values.

    heads [N, L * 2 Hkv, D], of each layer keys, then values, is overwritten. pages [L, num_blocks, block_size, 2 Hkv,
    D]; token n goes to position positions[n] of block_table[owners[n]]. key_norm [L, D] (empty: not at all); rotary
    [P, 2, 1, D].
    """
    _store(heads.numpy(), pages, block_table, owners, positions, key_norm, eps, rotary)


def rotate_store(
    keys_values: torch.Tensor,
    pages: np.ndarray,
    block_table: np.ndarray,
    first: np.ndarray,
    *,
    key_norm: np.ndarray,
    eps: np.float32,
    rotary: np.ndarray,
) -> None:
    """The storing half of `rotate_store_attend`: keys_values [T, 2 Hkv D], overwritten; key_norm [Hkv, D] or empty."""
    heads = keys_values.numpy().reshape(len(keys_values), -1, pages.shape[3])
    _prepare(heads, pages, block_table, first, 0, key_norm, eps, rotary)


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
def _norm_head(head, weight, eps):  # type: ignore[no-untyped-def]
    """RMSNorm of one head [D] in place."""
    size = len(head)
    total = np.float32(0)
    for d in range(size):
        total += head[d] * head[d]
    scale = np.float32(1) / np.sqrt(total / np.float32(size) + eps)
    for d in range(size):
        head[d] = head[d] * scale * weight[d]


@_fused
def _rotate_head(head, cos, sin):  # type: ignore[no-untyped-def]
    """Rotate one head [D] in place; the first half of sin is negated, see `kernels.rotary`."""
    half = len(head) // 2
    for d in range(half):
        low, high = head[d], head[d + half]
        head[d] = low * cos[d] + high * sin[d]
        head[d + half] = high * cos[d + half] + low * sin[d + half]


@_fused
def _prepare(heads, pages, block_table, first, num_heads, qk_norm, eps, rotary):  # type: ignore[no-untyped-def]
    """Normalise and rotate query and key of heads [T, Hq + 2 Hkv, D] in place; write key and value to their page."""
    tokens, total_heads, _ = heads.shape
    block_size, num_stored = pages.shape[1], pages.shape[2]
    per_request = tokens // len(first)
    for t in range(tokens):
        position = max(first[t // per_request] + t % per_request, 0)
        for h in range(total_heads - num_stored // 2):
            if len(qk_norm):
                _norm_head(heads[t, h], qk_norm[h], eps)
            _rotate_head(heads[t, h], rotary[position, 0, 0], rotary[position, 1, 0])
        column = position // block_size
        block = block_table[t // per_request, column] if column < block_table.shape[1] else 0
        pages[block, position % block_size] = heads[t, num_heads:]


@_fused
def _store(heads, pages, block_table, owners, positions, key_norm, eps, rotary):  # type: ignore[no-untyped-def]
    """See `store_keys_values`."""
    block_size, stored = pages.shape[2], pages.shape[3]
    for n in range(len(positions)):
        position = positions[n]
        block = block_table[owners[n], position // block_size]
        for layer in range(pages.shape[0]):
            begin = layer * stored
            for h in range(begin, begin + stored // 2):
                if len(key_norm):
                    _norm_head(heads[n, h], key_norm[layer], eps)
                _rotate_head(heads[n, h], rotary[position, 0, 0], rotary[position, 1, 0])
            pages[layer, block, position % block_size] = heads[n, begin : begin + stored]


@_fused
def _attend(heads, pages, block_table, first, num_heads, window, causal, scratch, output):  # type: ignore[no-untyped-def]
    """Softmax attention of heads [T, Hq + 2 Hkv, D] over pages; output [T, Hq D]."""
    tokens, _, size = heads.shape
    kv_heads = pages.shape[2] // 2
    per_request = tokens // len(first)
    for t in range(tokens):
        position = max(first[t // per_request] + t % per_request, 0)
        stop = position + 1 if causal else max(first[t // per_request] + per_request, 1)
        if window > 0:
            stop = min(stop, position + window)
        start = max(position + 1 - window, 0) if window > 0 else 0
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
