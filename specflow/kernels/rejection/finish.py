"""The last launch: rejection, draw and insert of one request by one program; all it reads is small."""

# mypy: ignore-errors
# Bodies below are Triton's language, which only looks like typed Python.

import triton
import triton.language as tl

from specflow.kernels.rejection.draw import draw_token
from specflow.kernels.rejection.insert import insert_request
from specflow.kernels.rejection.overlap import let_next_start, wait_for_previous
from specflow.kernels.rejection.reject import judge_request, load_decision, load_request, store_decision
from specflow.kernels.rejection.rows import DONE, inverse_of


@triton.jit(
    do_not_specialize_on_alignment=[
        "cu_rows", "draft_ids", "num_drafts", "positions", "temperature", "seeds", "draft_slots", "draft_logit",
        "draft_score", "draft_rest", "decision", "norms", "token_ids", "num_emitted", "num_accepted",
    ]
)  # fmt: skip
def finish_kernel(
    logits, logits_stride, cu_rows, draft_ids, num_drafts, positions, temperature, seeds,
    draft_logits, draft_slots, draft_stride_b, draft_stride_k,
    target_max, target_sum, target_arg, target_chunks, draft_logit, draft_rest,
    law_max, law_chunks, decision, norms, token_ids, num_emitted, num_accepted,
    V: tl.constexpr, K: tl.constexpr, NP: tl.constexpr, KP: tl.constexpr, NPP: tl.constexpr,
    NL: tl.constexpr, NC: tl.constexpr, NCP: tl.constexpr, CAP: tl.constexpr, HAS_DRAFT: tl.constexpr,
    ALL_GREEDY: tl.constexpr, SCALE: tl.constexpr, FP64: tl.constexpr, FAST: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (B,). With sampled drafts the decision is `reject_kernel`'s, else it is made here, and written down.

    `reject_kernel` has ended when this kernel starts: the programs of `masses_kernel` wait for it before they let this
    one start. Its decision need therefore not wait for the masses.
    """
    request = tl.program_id(0)
    row = tl.load(cu_rows + request)
    slot = tl.load(draft_slots + request) if HAS_DRAFT else 0
    draft, count, heat, seed, position = load_request(
        request, draft_ids, num_drafts, positions, temperature, seeds, K, KP, ALL_GREEDY
    )  # fmt: skip
    if HAS_DRAFT:
        accepted, kind, token, norm_p, norm_q = load_decision(request, decision, norms)
        wait_for_previous(OVERLAP)
        let_next_start(OVERLAP)
    else:
        wait_for_previous(OVERLAP)
        let_next_start(OVERLAP)
        accepted, kind, token, norm_p, norm_q = judge_request(
            request, draft, count, heat, seed, position,
            target_max, target_sum, target_arg, target_max, target_sum, draft_logit, draft_logit,
            V, K, NP, KP, NPP, False, ALL_GREEDY, FAST,
        )  # fmt: skip
        store_decision(request, accepted, kind, token, norm_p, norm_q, decision, norms)
    if not ALL_GREEDY:
        drawn = draw_token(
            request, accepted, kind, token, norm_p, norm_q, position, seed, row, slot,
            inverse_of(heat) if SCALE else 1.0,
            logits, logits_stride, draft_logits, draft_stride_b, draft_stride_k, target_max,
            law_max if HAS_DRAFT else target_max, law_chunks if HAS_DRAFT else target_chunks, draft_rest,
            V, K, NP, NL if HAS_DRAFT else NP, NC, NCP, CAP, HAS_DRAFT, SCALE, FP64, FAST,
        )  # fmt: skip
        token = tl.where(kind == DONE, token, drawn)
    insert_request(request, accepted, token, draft_ids, token_ids, num_emitted, num_accepted, K, KP)
