"""Stage 1, block statistics: what all later stages need to know of the rows, part by part, in one pass.

Greedy requests: maximum and argmax of every row. Sampling ones: maximum, sum of exponentials and, with one-hot drafts,
maxima and sums of the chunks that a token is drawn by, so that no row is read twice; the logit of the row's draft as
well, so that the next stage need not fetch it from memory. With sampled drafts only rows that judge a draft are read
here, and the draft's law with them: the law of the last token is another one, see `masses`.

A program waits for memory twice: for the scalars, all of which are asked for at once, and for its logits; `tiles` says
how it reads them.
"""

# mypy: ignore-errors
# Bodies below are Triton's language, which only looks like typed Python.

import triton
import triton.language as tl

from specflow.kernels.rejection.device_noise import CHUNK_IDS
from specflow.kernels.rejection.overlap import let_next_start, wait_for_previous
from specflow.kernels.rejection.rows import inverse_of, load_target, log_mass
from specflow.kernels.rejection.tiles import (
    beside_tile,
    law_masses,
    load_tile,
    offsets_in_part,
    part_maxima,
    places_of_chunks,
    places_of_parts,
    target_masses,
    tile_ids,
)


@triton.jit
def greedy_tile(block, place, values, inverse, target_max, target_arg,
                NP: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr, CAP: tl.constexpr):  # fmt: skip
    """Maxima of parts and their lowest ids."""
    best = part_maxima(values)
    found = tl.where(values >= beside_tile(tl.minimum(best, CAP)), offsets_in_part(values, PART), PART)
    lanes = tl.min(tl.min(found, axis=1), axis=1)  # [W, L]: the lane's number is added once, not to every id
    first = tl.min(lanes + tl.arange(0, lanes.shape[1])[None, :], axis=1)
    parts = places_of_parts(block, BLOCK, PART)
    tl.store(target_max + place * NP + parts, tl.minimum(best * inverse, CAP))
    tl.store(target_arg + place * NP + parts, parts * PART + tl.where(best > float("-inf"), first, 0))


@triton.jit
def target_tile(block, place, values, inverse, target_max, target_sum, target_chunks,
                NP: tl.constexpr, NC: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr, CAP: tl.constexpr,
                HAS_DRAFT: tl.constexpr, FAST: tl.constexpr):  # fmt: skip
    """Maxima and sums of exponentials of parts, and of their chunks where the last token may be drawn by them."""
    top, sums = target_masses(values, inverse, CAP, FAST)
    out = place * NP + places_of_parts(block, BLOCK, PART)
    tl.store(target_max + out, top)
    tl.store(target_sum + out, tl.sum(sums, axis=1))
    if not HAS_DRAFT:
        tl.store(target_chunks + place * NC + places_of_chunks(block, BLOCK, PART), sums)


@triton.jit
def row_of_target(
    block, place, row_ptr, heat, draft, judged,
    target_max, target_sum, target_arg, target_chunks, draft_logit, draft_rest,
    V: tl.constexpr, NP: tl.constexpr, NC: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr, CAP: tl.constexpr,
    HAS_DRAFT: tl.constexpr, SCALE: tl.constexpr, FAST: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """One block of a row of the target's logits."""
    ids = tile_ids(block, BLOCK, PART, row_ptr.dtype.element_ty.primitive_bitwidth)
    inverse = inverse_of(heat) if SCALE else 1.0
    values = load_tile(row_ptr, ids, block, V, BLOCK, FAST, EVICT)
    if heat == 0.0:
        greedy_tile(block, place, values, inverse, target_max, target_arg, NP, BLOCK, PART, CAP)
    else:
        target_tile(
            block, place, values, inverse, target_max, target_sum, target_chunks,
            NP, NC, BLOCK, PART, CAP, HAS_DRAFT, FAST,
        )  # fmt: skip
        if judged & (draft // BLOCK == block):
            tl.store(draft_logit + place, tl.minimum(load_target(row_ptr, draft, inverse, V, SCALE), CAP))
            if not HAS_DRAFT:  # what is left of its chunk should it be rejected; logits from the cache
                near = draft // CHUNK_IDS * CHUNK_IDS + tl.arange(0, CHUNK_IDS)
                others = tl.minimum(load_target(row_ptr, near, inverse, V, SCALE), CAP)
                tl.store(draft_rest + place, log_mass(tl.where(near == draft, float("-inf"), others), FAST))


@triton.jit
def row_of_law(
    block, place, law_ptr, draft, draft_max, draft_sum, draft_score,
    V: tl.constexpr, NP: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
    FAST: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """One block of the law that a draft was sampled from: maxima and sums of exponentials, NaN where a NaN is."""
    ids = tile_ids(block, BLOCK, PART, law_ptr.dtype.element_ty.primitive_bitwidth)
    scores = load_tile(law_ptr, ids, block, V, BLOCK, FAST, EVICT)
    top, total = law_masses(scores, FAST)
    out = place * NP + places_of_parts(block, BLOCK, PART)
    tl.store(draft_max + out, top)
    tl.store(draft_sum + out, total)
    if draft // BLOCK == block:
        tl.store(draft_score + place, tl.load(law_ptr + draft).to(tl.float32))


@triton.jit(
    do_not_specialize_on_alignment=[
        "cu_rows", "draft_ids", "num_drafts", "temperature", "draft_slots", "draft_logit", "draft_score", "draft_rest",
    ]
)  # fmt: skip
def block_stats_kernel(
    logits, logits_stride, cu_rows, draft_ids, num_drafts, temperature,
    draft_logits, draft_slots, draft_stride_b, draft_stride_k,
    target_max, target_sum, target_arg, target_chunks, draft_max, draft_sum, draft_logit, draft_score, draft_rest,
    V: tl.constexpr, K: tl.constexpr, NP: tl.constexpr, NC: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
    CAP: tl.constexpr, HAS_DRAFT: tl.constexpr, ALL_GREEDY: tl.constexpr, SCALE: tl.constexpr, FAST: tl.constexpr,
    EVICT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (blocks, K+1, B), with sampled drafts (blocks, 2K+1, B): rows behind the target's K+1 are laws of drafts.

    Statistics are [B, K+1, NP]: float32, target_arg int32; rows nobody asks for stay unwritten.
    target_chunks [B, K+1, NC] float32: sums of exponentials relative to the part's maximum.
    draft_logit and draft_score [B, K+1] float32: logit of the draft in the target's row and in its own law.
    draft_rest [B, K+1] float32, one-hot drafts only: log mass of the draft's chunk without the draft.
    """
    block, which, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    wait_for_previous(OVERLAP)
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
                    block, place, law_ptr, draft, draft_max, draft_sum, draft_score, V, NP, BLOCK, PART, FAST, EVICT
                )  # fmt: skip
            else:
                row_of_target(
                    block, place, row_ptr, heat, draft, judged,
                    target_max, target_sum, target_arg, target_chunks, draft_logit, draft_rest,
                    V, NP, NC, BLOCK, PART, CAP, HAS_DRAFT, SCALE, FAST, EVICT,
                )  # fmt: skip
        else:
            row_of_target(
                block, place, row_ptr, heat, draft, judged,
                target_max, target_sum, target_arg, target_chunks, draft_logit, draft_rest,
                V, NP, NC, BLOCK, PART, CAP, HAS_DRAFT, SCALE, FAST, EVICT,
            )  # fmt: skip
