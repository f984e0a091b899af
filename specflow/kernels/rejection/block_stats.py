"""Stage 1, block statistics: maximum, and where needed argmax or sum of exponentials, of every judged row.

A greedy request needs maximum and argmax of all its rows; a sampling one the normaliser of the rows that judge a
draft. Its bonus row, the rows of placeholders and the draft's law of a greedy request are never read here.
"""

# mypy: ignore-errors
# Bodies below are Triton's language, which only looks like typed Python.

import triton
import triton.language as tl

from specflow.kernels.rejection.rows import first_chunk, first_of, inverse_of, load_target, sum_of_exp, tile_ids


@triton.jit
def stats_tile(
    block, step, request, logits, logits_stride, cu_rows, draft_ids, num_drafts, temperature,
    draft_logits, draft_slots, draft_stride_b, draft_stride_k,
    target_max, target_sum, target_arg, draft_max, draft_sum,
    V: tl.constexpr, K: tl.constexpr, NB: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    CAP: tl.constexpr, HAS_DRAFT: tl.constexpr, ALL_GREEDY: tl.constexpr, SCALE: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """One block of ids of one row; see `block_stats_kernel`."""
    count = tl.load(num_drafts + request)
    draft = tl.load(draft_ids + request * K + step, mask=step < count, other=-1)
    judged = (draft >= 0) & (draft < V)
    heat = 0.0
    if not ALL_GREEDY:
        heat = tl.load(temperature + request)
    greedy = heat == 0.0
    if (step <= count) & (greedy | judged):
        row = tl.load(cu_rows + request) + step
        tokens = tile_ids(block, BLOCK // WIDTH, WIDTH)
        out = (request * (K + 1) + step) * NB + block
        inverse = inverse_of(heat) if SCALE else 1.0
        row_ptr = logits + row * logits_stride
        values = load_target(row_ptr, tokens, inverse, V, SCALE)
        if greedy:
            chunk_max = tl.max(values, axis=1)
            top = tl.minimum(tl.max(chunk_max), CAP)
            ids = first_chunk(chunk_max, top, block, BLOCK // WIDTH, WIDTH)
            tl.store(target_max + out, top)
            tl.store(target_arg + out, first_of(load_target(row_ptr, ids, inverse, V, SCALE), top, ids))
        else:
            top = tl.max(values)
            if top > CAP:  # a branch, since it costs every element something and is never taken
                values = tl.minimum(values, CAP)
                top = CAP
            tl.store(target_max + out, top)
            tl.store(target_sum + out, sum_of_exp(values, top, FAST))
            if HAS_DRAFT:
                slot = tl.load(draft_slots + request)
                law = draft_logits + slot * draft_stride_b + step * draft_stride_k
                scores = tl.load(law + tokens, mask=tokens < V, other=float("-inf")).to(tl.float32)
                peak = tl.max(scores)
                tl.store(draft_max + out, peak)
                tl.store(draft_sum + out, sum_of_exp(scores, peak, FAST))


@triton.jit
def block_stats_kernel(
    logits, logits_stride, cu_rows, draft_ids, num_drafts, temperature,
    draft_logits, draft_slots, draft_stride_b, draft_stride_k,
    target_max, target_sum, target_arg, draft_max, draft_sum,
    V: tl.constexpr, K: tl.constexpr, NB: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    CAP: tl.constexpr, HAS_DRAFT: tl.constexpr, ALL_GREEDY: tl.constexpr, SCALE: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Grid (NB, K+1, B). Statistics are [B, K+1, NB]: float32, target_arg int32; rows not judged stay unwritten."""
    stats_tile(
        tl.program_id(0), tl.program_id(1), tl.program_id(2), logits, logits_stride, cu_rows, draft_ids, num_drafts,
        temperature, draft_logits, draft_slots, draft_stride_b, draft_stride_k,
        target_max, target_sum, target_arg, draft_max, draft_sum,
        V, K, NB, BLOCK, WIDTH, CAP, HAS_DRAFT, ALL_GREEDY, SCALE, FAST,
    )  # fmt: skip
