"""Stage 3a, masses of the last token's law, needed where drafts were sampled: chunk by chunk, of [p - q]+ or of p.

With one-hot drafts the block statistics hold them already.
"""

# mypy: ignore-errors
# Bodies below are Triton's language, which only looks like typed Python.

import triton
import triton.language as tl

from specflow.kernels.rejection.device_noise import CHUNK_IDS
from specflow.kernels.rejection.overlap import let_next_start, wait_for_previous
from specflow.kernels.rejection.reject import judge_request, store_decision
from specflow.kernels.rejection.rows import (
    DONE,
    RESIDUAL,
    chunk_sums,
    clean_target,
    inverse_of,
    residual_masses,
    tile_ids,
)


@triton.jit
def store_masses(out, values, scores, kind, norm_p, norm_q, top_of_p, law_max, law_chunks,
                 BLOCK: tl.constexpr, CAP: tl.constexpr, FAST: tl.constexpr):  # fmt: skip
    """Masses of the chunks of one tile [CHUNKS, WIDTH], relative to a logit that is stored as the tile's maximum."""
    if kind == RESIDUAL:
        top = top_of_p  # at least the residual's own maximum, and near enough
        sums = tl.sum(residual_masses(tl.minimum(values, CAP), scores, norm_p, norm_q, top, FAST), axis=1)
    else:
        top = tl.max(values)
        if top > CAP:
            values = tl.minimum(values, CAP)
            top = CAP
        sums = chunk_sums(values, top, FAST)
    tl.store(law_max + out, top)
    tl.store(law_chunks + out * (BLOCK // CHUNK_IDS) + tl.arange(0, BLOCK // CHUNK_IDS), sums)


@triton.jit(
    do_not_specialize_on_alignment=[
        "cu_rows", "draft_ids", "num_drafts", "positions", "temperature", "seeds", "draft_slots",
        "target_max", "target_sum", "target_arg", "draft_max", "draft_sum", "draft_logit", "draft_score",
        "law_max", "law_chunks", "decision", "norms",
    ]
)  # fmt: skip
def masses_kernel(
    logits, logits_stride, cu_rows, draft_ids, num_drafts, positions, temperature, seeds,
    draft_logits, draft_slots, draft_stride_b, draft_stride_k,
    target_max, target_sum, target_arg, draft_max, draft_sum, draft_logit, draft_score,
    law_max, law_chunks, decision, norms,
    V: tl.constexpr, K: tl.constexpr, NB: tl.constexpr, KP: tl.constexpr, NBP: tl.constexpr, BLOCK: tl.constexpr,
    CAP: tl.constexpr, SCALE: tl.constexpr, FAST: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (NB, B). law_max [B, NB] and law_chunks [B, NB * chunks of a block], float32; greedy requests write none.

    Every program decides about its request by itself; the first of a request writes `decision` and `norms` down.
    """
    block, request = tl.program_id(0), tl.program_id(1)
    row = tl.load(cu_rows + request)
    slot = tl.load(draft_slots + request)
    inverse = inverse_of(tl.load(temperature + request)) if SCALE else 1.0
    wait_for_previous(OVERLAP)
    let_next_start(OVERLAP)
    accepted, kind, token, norm_p, norm_q = judge_request(
        request, draft_ids, num_drafts, positions, temperature, seeds,
        target_max, target_sum, target_arg, draft_max, draft_sum, draft_logit, draft_score,
        V, K, NB, KP, NBP, True, False,
    )  # fmt: skip
    if block == 0:
        store_decision(request, accepted, kind, token, norm_p, norm_q, decision, norms)
    if kind != DONE:
        tokens = tile_ids(block, BLOCK // CHUNK_IDS, CHUNK_IDS)
        seen = tokens < V
        raw = tl.load(logits + (row + accepted) * logits_stride + tokens, mask=seen, other=float("-inf"))
        law_ptr = draft_logits + slot * draft_stride_b + accepted * draft_stride_k
        scores = tl.load(law_ptr + tokens, mask=seen & (kind == RESIDUAL), other=float("-inf"))
        stat = (request * (K + 1) + accepted) * NB + block
        top_of_p = tl.load(target_max + stat, mask=kind == RESIDUAL, other=0.0, cache_modifier=".cg")
        values = clean_target(raw, inverse, SCALE)
        store_masses(
            request * NB + block, values, scores.to(tl.float32), kind, norm_p, norm_q, top_of_p, law_max, law_chunks,
            BLOCK, CAP, FAST,
        )  # fmt: skip
