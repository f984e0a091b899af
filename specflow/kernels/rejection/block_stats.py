"""Stage 1, block statistics: what all later stages need to know of the rows, tile by tile, in one pass.

Greedy requests: maximum and argmax of every row. Sampling ones: maximum, sum of exponentials and, with one-hot drafts,
the sums of the chunks that a token is drawn by, so that no row is read twice; the logit of the row's draft as well, so
that the next stage need not fetch it from memory. With sampled drafts only rows that judge a draft are read here, and
the draft's law with them: the law of the last token is another one, see `masses`.

A program waits for memory twice: for the scalars, all of which are asked for at once, and for its logits.
"""

# mypy: ignore-errors
# Bodies below are Triton's language, which only looks like typed Python.

import triton
import triton.language as tl

from specflow.kernels.rejection.device_noise import CHUNK_IDS
from specflow.kernels.rejection.overlap import let_next_start
from specflow.kernels.rejection.rows import (
    chunk_sums,
    clean_target,
    first_chunk,
    first_of,
    inverse_of,
    load_target,
    tile_ids,
)


@triton.jit
def greedy_tile(out, values, row_ptr, block, inverse, target_max, target_arg,
                V: tl.constexpr, BLOCK: tl.constexpr, CAP: tl.constexpr, SCALE: tl.constexpr):  # fmt: skip
    """Maximum of a tile and its lowest id."""
    chunk_max = tl.max(values, axis=1)
    top = tl.minimum(tl.max(chunk_max), CAP)
    ids = first_chunk(chunk_max, top, block, BLOCK // CHUNK_IDS, CHUNK_IDS)
    tl.store(target_max + out, top)
    tl.store(target_arg + out, first_of(load_target(row_ptr, ids, inverse, V, SCALE), top, ids))


@triton.jit
def target_tile(out, values, target_max, target_sum, target_chunks,
                BLOCK: tl.constexpr, CAP: tl.constexpr, HAS_DRAFT: tl.constexpr, FAST: tl.constexpr):  # fmt: skip
    """Maximum of a tile, sum of exponentials, and sums of its chunks where the last token may be drawn by them."""
    top = tl.max(values)
    if top > CAP:  # a branch, since it costs every element something and is never taken
        values = tl.minimum(values, CAP)
        top = CAP
    sums = chunk_sums(values, top, FAST)
    tl.store(target_max + out, top)
    tl.store(target_sum + out, tl.sum(sums))
    if not HAS_DRAFT:
        tl.store(target_chunks + out * (BLOCK // CHUNK_IDS) + tl.arange(0, BLOCK // CHUNK_IDS), sums)


@triton.jit
def row_of_target(
    block, place, row_ptr, heat, draft, judged, target_max, target_sum, target_arg, target_chunks, draft_logit,
    V: tl.constexpr, NB: tl.constexpr, BLOCK: tl.constexpr, CAP: tl.constexpr, HAS_DRAFT: tl.constexpr,
    SCALE: tl.constexpr, FAST: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """One block of a row of the target's logits."""
    tokens = tile_ids(block, BLOCK // CHUNK_IDS, CHUNK_IDS)
    inverse = inverse_of(heat) if SCALE else 1.0
    raw = tl.load(row_ptr + tokens, mask=tokens < V, other=float("-inf"), eviction_policy=EVICT)
    values = clean_target(raw, inverse, SCALE)
    out = place * NB + block
    if heat == 0.0:
        greedy_tile(out, values, row_ptr, block, inverse, target_max, target_arg, V, BLOCK, CAP, SCALE)
    else:
        target_tile(out, values, target_max, target_sum, target_chunks, BLOCK, CAP, HAS_DRAFT, FAST)
        if judged & (draft // BLOCK == block):
            tl.store(draft_logit + place, tl.minimum(load_target(row_ptr, draft, inverse, V, SCALE), CAP))


@triton.jit
def row_of_law(
    block, place, law_ptr, draft, draft_max, draft_sum, draft_score,
    V: tl.constexpr, NB: tl.constexpr, BLOCK: tl.constexpr, FAST: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """One block of the law that a draft was sampled from: maximum and sum of exponentials, NaN where a NaN is."""
    tokens = tile_ids(block, BLOCK // CHUNK_IDS, CHUNK_IDS)
    scores = tl.load(law_ptr + tokens, mask=tokens < V, other=float("-inf"), eviction_policy=EVICT).to(tl.float32)
    peak = tl.max(scores)
    tl.store(draft_max + place * NB + block, peak)
    tl.store(draft_sum + place * NB + block, tl.sum(chunk_sums(scores, peak, FAST)))
    if draft // BLOCK == block:
        tl.store(draft_score + place, tl.load(law_ptr + draft).to(tl.float32))


@triton.jit(
    do_not_specialize_on_alignment=[
        "cu_rows", "draft_ids", "num_drafts", "temperature", "draft_slots", "target_max", "target_sum", "target_arg",
        "target_chunks", "draft_max", "draft_sum", "draft_logit", "draft_score",
    ]
)  # fmt: skip
def block_stats_kernel(
    logits, logits_stride, cu_rows, draft_ids, num_drafts, temperature,
    draft_logits, draft_slots, draft_stride_b, draft_stride_k,
    target_max, target_sum, target_arg, target_chunks, draft_max, draft_sum, draft_logit, draft_score,
    V: tl.constexpr, K: tl.constexpr, NB: tl.constexpr, BLOCK: tl.constexpr, CAP: tl.constexpr,
    HAS_DRAFT: tl.constexpr, ALL_GREEDY: tl.constexpr, SCALE: tl.constexpr, FAST: tl.constexpr,
    EVICT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (NB, K+1, B), with sampled drafts (NB, 2K+1, B): rows behind the K+1 of the target are laws of drafts.

    Statistics are [B, K+1, NB]: float32, target_arg int32; rows nobody asks for stay unwritten.
    target_chunks [B, K+1, NB * chunks of a block] float32: sums of exponentials relative to the block's maximum.
    draft_logit and draft_score [B, K+1] float32: logit of the draft in the target's row and in its own law.
    """
    block, which, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    step = which
    if HAS_DRAFT:
        step = tl.where(which > K, which - (K + 1), which)
    count = tl.load(num_drafts + request)
    row = tl.load(cu_rows + request) + step
    draft = tl.load(draft_ids + request * K + step, mask=step < K, other=-1)
    heat = 0.0
    if not ALL_GREEDY:
        heat = tl.load(temperature + request)
    slot = tl.load(draft_slots + request) if HAS_DRAFT else 0
    let_next_start(OVERLAP)
    judged = (step < count) & (draft >= 0) & (draft < V)
    wanted = step <= count
    if HAS_DRAFT:
        wanted = tl.where(heat == 0.0, wanted & (which <= K), judged)
    place = request * (K + 1) + step
    row_ptr = logits + row * logits_stride
    # Always true, but all of the scalars decide about the branch, so that none of their loads is moved behind it.
    if wanted & (row >= 0) & (heat >= 0.0) & (slot >= 0):
        if HAS_DRAFT:
            if which > K:
                law_ptr = draft_logits + slot * draft_stride_b + step * draft_stride_k
                row_of_law(
                    block, place, law_ptr, draft, draft_max, draft_sum, draft_score, V, NB, BLOCK, FAST, EVICT
                )  # fmt: skip
            else:
                row_of_target(
                    block, place, row_ptr, heat, draft, judged, target_max, target_sum, target_arg, target_chunks,
                    draft_logit, V, NB, BLOCK, CAP, HAS_DRAFT, SCALE, FAST, EVICT,
                )  # fmt: skip
        else:
            row_of_target(
                block, place, row_ptr, heat, draft, judged, target_max, target_sum, target_arg, target_chunks,
                draft_logit, V, NB, BLOCK, CAP, HAS_DRAFT, SCALE, FAST, EVICT,
            )  # fmt: skip
