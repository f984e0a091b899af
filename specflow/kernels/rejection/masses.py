"""Stage 3a, masses of the last token's law, needed where drafts were sampled: chunk by chunk, of [p - q]+ or of p.

With one-hot drafts the block statistics hold them already.
"""

# mypy: ignore-errors
# Bodies below are Triton's language, which only looks like typed Python.

import triton
import triton.language as tl

from specflow.kernels.rejection.overlap import let_next_start, wait_for_previous
from specflow.kernels.rejection.reject import load_decision
from specflow.kernels.rejection.rows import DONE, RESIDUAL, inverse_of
from specflow.kernels.rejection.tiles import (
    places_of_chunks,
    places_of_parts,
    residual_sums,
    target_masses,
    tile_ids,
    widened,
)


@triton.jit
def load_both(row_ptr, law_ptr, ids, block, judged, V: tl.constexpr, BLOCK: tl.constexpr, FAST: tl.constexpr):
    """A tile of the target's logits and, where a draft was judged, of its law; both are asked for at once."""
    if (block + 1) * BLOCK <= V:
        raw = tl.load(row_ptr + ids)
        law = tl.load(law_ptr + ids, mask=judged, other=float("-inf"))
        values, scores = widened(raw, FAST), widened(law, FAST)
    else:
        raw = tl.load(row_ptr + ids, mask=ids < V, other=float("-inf"))
        law = tl.load(law_ptr + ids, mask=(ids < V) & judged, other=float("-inf"))
        values, scores = widened(raw, FAST), widened(law, FAST)
    return values, scores


@triton.jit(
    do_not_specialize_on_alignment=[
        "cu_rows", "temperature", "draft_slots", "decision", "norms",
    ]
)  # fmt: skip
def masses_kernel(
    logits, logits_stride, cu_rows, temperature, draft_logits, draft_slots, draft_stride_b, draft_stride_k,
    target_max, law_max, law_chunks, decision, norms,
    V: tl.constexpr, K: tl.constexpr, NP: tl.constexpr, NL: tl.constexpr, NC: tl.constexpr, BLOCK: tl.constexpr,
    PART: tl.constexpr, LAW_PART: tl.constexpr, CAP: tl.constexpr, SCALE: tl.constexpr, FAST: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (blocks, B). law_max [B, NL] and law_chunks [B, NC] float32; greedy requests write none.

    Parts are those of this kernel's warps, [p - q]+ is relative to p's maximum in the part of the statistics.
    """
    block, request = tl.program_id(0), tl.program_id(1)
    row = tl.load(cu_rows + request)
    slot = tl.load(draft_slots + request)
    inverse = inverse_of(tl.load(temperature + request)) if SCALE else 1.0
    wait_for_previous(OVERLAP)
    let_next_start(OVERLAP)
    accepted, kind, _, norm_p, norm_q = load_decision(request, decision, norms)
    if (kind != DONE) & (row >= 0) & (slot >= 0):
        P_BITS: tl.constexpr = logits.dtype.element_ty.primitive_bitwidth
        Q_BITS: tl.constexpr = draft_logits.dtype.element_ty.primitive_bitwidth
        ids = tile_ids(block, BLOCK, LAW_PART, P_BITS if P_BITS > Q_BITS else Q_BITS)
        row_ptr = logits + (row + accepted) * logits_stride
        law_ptr = draft_logits + slot * draft_stride_b + accepted * draft_stride_k
        parts = places_of_parts(block, BLOCK, LAW_PART)
        of_row = target_max + (request * (K + 1) + accepted) * NP
        of_p = tl.load(of_row + parts * LAW_PART // PART, cache_modifier=".cg")
        values, scores = load_both(row_ptr, law_ptr, ids, block, kind == RESIDUAL, V, BLOCK, FAST)
        if kind == RESIDUAL:
            top, sums = of_p, residual_sums(values, scores, inverse, norm_p, norm_q, of_p, FAST)
        else:
            top, sums = target_masses(values, inverse, CAP, FAST)
        tl.store(law_max + request * NL + parts, top)
        tl.store(law_chunks + request * NC + places_of_chunks(block, BLOCK, LAW_PART), sums)
