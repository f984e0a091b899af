"""Prompt lookup by Triton kernels: the results of `ngram_match.ngram_drafts`, read up to each request's own length.

A scan cuts every text into parts, one program each, and a second kernel takes the best of them and copies the draft.
Lengths are read on the device: the table may be as wide as the context, its unused columns cost nothing, and a call
captured in a graph stays right as the texts grow.
"""

# mypy: ignore-errors
# Bodies below are Triton's language, which only looks like typed Python.

import torch
import triton
import triton.language as tl

from specflow.kernels.ngram_match import MatchRule
from specflow.kernels.triton_choice import device_of

BLOCK = 1024
# Parts of a text. The same for every batch, so that one compilation serves all.
PARTS = 32


@triton.jit
def scan_block(row, last, start, width, N_MAX: tl.constexpr, LATEST: tl.constexpr, BLOCK: tl.constexpr):
    """Best score of BLOCK match ends from start on, 0 without a match: length * width + order, as int64.

    The order is the place among equal lengths, the highest winning: the end itself, or counted from the right.
    """
    ends = start + tl.arange(0, BLOCK)
    alive = ends < last
    tokens = tl.load(row + ends, mask=alive, other=-1)
    alive = alive & (tokens == tl.load(row + last))
    best = tl.full((), 0, tl.int64)
    if tl.max(alive.to(tl.int32)) > 0:
        length = alive.to(tl.int64)
        for back in range(1, N_MAX):
            alive = alive & (ends >= back)
            tokens = tl.load(row + ends - back, mask=alive, other=-1)
            # An end lies before the text's last token, so its n-gram meets the text's beginning first.
            wanted = tl.load(row + last - back, mask=last >= back, other=-1)
            alive = alive & (tokens == wanted)
            length += alive.to(tl.int64)
        order = ends if LATEST else width - 1 - ends
        best = tl.max(tl.where(length > 0, length * width + order, 0))
    return best


@triton.jit
def scan_kernel(
    table, table_stride, width, slots, num_tokens, max_drafts, scores,
    N_MAX: tl.constexpr, LATEST: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (PARTS, B). scores [B, PARTS] int64: the best of each part, which ends at a match of full length."""
    part, request = tl.program_id(0), tl.program_id(1)
    last = tl.load(num_tokens + request) - 1
    row = table + tl.load(slots + request) * table_stride
    blocks = tl.where(tl.load(max_drafts + request) > 0, (last + BLOCK - 1) // BLOCK, 0)
    share = (blocks + PARTS - 1) // PARTS
    first = part * share
    count = tl.minimum(share, blocks - first)
    best = tl.full((), 0, tl.int64)
    done = tl.full((), 0, tl.int64)
    full = tl.full((), N_MAX, tl.int64) * width
    while (done < count) & (best < full):
        block = first + (count - 1 - done if LATEST else done)
        best = tl.maximum(best, scan_block(row, last, block * BLOCK, width, N_MAX, LATEST, BLOCK))
        done += 1
    tl.store(scores + request * PARTS + part, best)


@triton.jit
def copy_kernel(
    table, table_stride, width, slots, num_tokens, max_drafts, scores, ids, counts,
    N_MIN: tl.constexpr, LATEST: tl.constexpr, PARTS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Grid (B,). ids [B, K] and counts [B], both int64."""
    request = tl.program_id(0)
    score = tl.max(tl.load(scores + request * PARTS + tl.arange(0, PARTS)))
    length, order = score // width, score % width
    start = (order if LATEST else width - 1 - order) + 1
    left = tl.load(num_tokens + request) - start
    count = tl.minimum(tl.minimum(left, tl.load(max_drafts + request)), K)
    count = tl.where(length >= N_MIN, tl.maximum(count, 0), 0)
    steps = tl.arange(0, KP)
    row = table + tl.load(slots + request) * table_stride
    tokens = tl.load(row + start + steps, mask=steps < count, other=-1)
    tl.store(ids + request * K + steps, tokens, mask=steps < K)
    tl.store(counts + request, count)


def ngram_drafts(
    table: torch.Tensor, slots: torch.Tensor, num_tokens: torch.Tensor, max_drafts: torch.Tensor, rule: MatchRule
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ngram_match.ngram_drafts`; the columns of `table` must lie side by side."""
    batch, width, drafts = len(slots), table.shape[1], rule.num_drafts
    ids = torch.empty((batch, drafts), dtype=torch.int64, device=table.device)
    counts = torch.empty(batch, dtype=torch.int64, device=table.device)
    scores = torch.empty((batch, PARTS), dtype=torch.int64, device=table.device)
    if batch:
        shared = (table, table.stride(0), width, slots, num_tokens, max_drafts, scores)
        with device_of(table):
            scan_kernel[(PARTS, batch)](
                *shared, N_MAX=min(rule.n_max, width), LATEST=rule.latest, PARTS=PARTS, BLOCK=BLOCK
            )
            copy_kernel[(batch,)](
                *shared, ids, counts,
                N_MIN=rule.n_min, LATEST=rule.latest, PARTS=PARTS, K=drafts, KP=triton.next_power_of_2(drafts),
                num_warps=1,
            )  # fmt: skip
    return ids, counts
