"""Stage 2, rejection: how many leading drafts each request keeps, and what its last token is drawn from.

All drafts of a request are judged at once: its statistics are a small [K+1, NB] tile, and one round trip to memory
costs less than K of them.
"""

# mypy: ignore-errors
# Bodies below are Triton's language, which only looks like typed Python.

import triton
import triton.language as tl

from specflow.kernels.rejection.device_noise import coin
from specflow.kernels.rejection.rows import DONE, NO_TOKEN, ONE_HOT, PLAIN, RESIDUAL, inverse_of, load_target


@triton.jit
def log_normaliser(maxima, sums):
    """Row maximum and log of the sum of exponentials from block statistics [K+1, NB]; -inf where all is -inf."""
    top = tl.max(maxima, axis=1)
    shift = tl.where(top == float("-inf"), 0.0, top)
    return top, shift + tl.log(tl.sum(sums * tl.exp(maxima - shift[:, None]), axis=1))


@triton.jit
def judge_greedy(base, steps, seen, draft, count, target_max, target_arg, KP: tl.constexpr):
    """Accepted drafts and the token after them: a draft is accepted iff it is the row's argmax."""
    maxima = tl.load(target_max + base, mask=seen, other=float("-inf"), cache_modifier=".cg")
    ids = tl.load(target_arg + base, mask=seen, other=NO_TOKEN, cache_modifier=".cg")
    best = tl.min(tl.where(maxima == tl.max(maxima, axis=1)[:, None], ids, NO_TOKEN), axis=1)
    accepted = tl.min(tl.where((draft == best) & (steps < count), KP, steps))
    return accepted, tl.sum(tl.where(steps == accepted, best, 0))


@triton.jit
def judge_sampled(
    base, steps, seen, valid, draft, request, logits, logits_stride, cu_rows, temperature, positions, seeds,
    draft_logits, draft_slots, draft_stride_b, draft_stride_k,
    target_max, target_sum, draft_max, draft_sum,
    V: tl.constexpr, CAP: tl.constexpr, HAS_DRAFT: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Coins of all drafts [K+1]: log p(d) > log u + log q(d). Also row maxima, normalisers of p and q, logits of d."""
    maxima = tl.load(target_max + base, mask=seen, other=float("-inf"), cache_modifier=".cg")
    sums = tl.load(target_sum + base, mask=seen, other=0.0, cache_modifier=".cg")
    top, norm_p = log_normaliser(maxima, sums)
    rows = tl.load(cu_rows + request) + steps
    picked = tl.where(valid, draft, -1)
    inverse = inverse_of(tl.load(temperature + request)) if SCALE else 1.0
    logit = tl.minimum(load_target(logits + rows * logits_stride, picked, inverse, V, SCALE), CAP)
    log_q = tl.zeros_like(logit)
    norm_q = tl.zeros_like(logit)
    if HAS_DRAFT:
        peaks = tl.load(draft_max + base, mask=seen, other=float("-inf"), cache_modifier=".cg")
        masses = tl.load(draft_sum + base, mask=seen, other=0.0, cache_modifier=".cg")
        _, norm_q = log_normaliser(peaks, masses)
        law = draft_logits + tl.load(draft_slots + request) * draft_stride_b + steps * draft_stride_k
        log_q = tl.load(law + draft, mask=valid, other=float("-inf")).to(tl.float32) - norm_q
    flip = coin(tl.load(seeds + request), tl.load(positions + request) + steps)
    # q(d) = 0 cannot have been sampled; without the second test a wrong q would accept everything.
    accept = valid & (log_q > float("-inf")) & (logit - norm_p > tl.log(flip) + log_q)
    return accept, top, norm_p, norm_q, logit


@triton.jit
def judge_request(
    request, logits, logits_stride, cu_rows, draft_ids, num_drafts, positions, temperature, seeds,
    draft_logits, draft_slots, draft_stride_b, draft_stride_k,
    target_max, target_sum, target_arg, draft_max, draft_sum, decision, norms,
    V: tl.constexpr, K: tl.constexpr, NB: tl.constexpr, KP: tl.constexpr, NBP: tl.constexpr, CAP: tl.constexpr,
    HAS_DRAFT: tl.constexpr, ALL_GREEDY: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """One request; see `reject_kernel`."""
    steps = tl.arange(0, KP)
    blocks = tl.arange(0, NBP)
    count = tl.load(num_drafts + request)
    draft = tl.load(draft_ids + request * K + steps, mask=steps < count, other=-1)
    valid = (draft >= 0) & (draft < V)
    base = (request * (K + 1) + steps[:, None]) * NB + blocks[None, :]
    heat = 0.0
    if not ALL_GREEDY:
        heat = tl.load(temperature + request)
    if heat == 0.0:
        seen = (steps <= count)[:, None] & (blocks < NB)[None, :]
        accepted, token = judge_greedy(base, steps, seen, draft, count, target_max, target_arg, KP)
        tl.store(decision + request * 3, accepted)
        tl.store(decision + request * 3 + 1, DONE)
        tl.store(decision + request * 3 + 2, token)
    else:
        seen = valid[:, None] & (blocks < NB)[None, :]
        accept, top, norm_p, norm_q, logit = judge_sampled(
            base, steps, seen, valid, draft, request, logits, logits_stride, cu_rows, temperature, positions, seeds,
            draft_logits, draft_slots, draft_stride_b, draft_stride_k, target_max, target_sum, draft_max, draft_sum,
            V, CAP, HAS_DRAFT, SCALE,
        )  # fmt: skip
        accepted = tl.min(tl.where(accept, KP, steps))
        here = steps == accepted
        # A law with a NaN, or all -inf, is none: q is then unknown and the row is drawn from p.
        lawful = (norm_q == norm_q) & (norm_q > float("-inf")) & (norm_q < float("inf"))
        kind = tl.where(valid & lawful, RESIDUAL if HAS_DRAFT else ONE_HOT, PLAIN)
        # Noise lies between -3.2 and 22.9, so an id 27 below one that may be drawn never wins.
        floor = tl.where((kind == ONE_HOT) & (logit < top), top - 27.0, float("-inf"))
        tl.store(decision + request * 3, accepted)
        tl.store(decision + request * 3 + 1, tl.sum(tl.where(here, kind, 0)))
        tl.store(decision + request * 3 + 2, tl.sum(tl.where(here, draft, 0)).to(tl.int32))
        tl.store(norms + request * 3, tl.max(tl.where(here, norm_p, float("-inf"))))
        tl.store(norms + request * 3 + 1, tl.max(tl.where(here, norm_q, float("-inf"))))
        tl.store(norms + request * 3 + 2, tl.max(tl.where(here, floor, float("-inf"))))


@triton.jit
def reject_kernel(
    logits, logits_stride, cu_rows, draft_ids, num_drafts, positions, temperature, seeds,
    draft_logits, draft_slots, draft_stride_b, draft_stride_k,
    target_max, target_sum, target_arg, draft_max, draft_sum, decision, norms,
    V: tl.constexpr, K: tl.constexpr, NB: tl.constexpr, KP: tl.constexpr, NBP: tl.constexpr, CAP: tl.constexpr,
    HAS_DRAFT: tl.constexpr, ALL_GREEDY: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Grid (B,). decision [B, 3] int32: accepted drafts, kind of draw, rejected draft or final token.

    norms [B, 3] float32, unwritten for greedy requests: log normaliser of p and of q in the row that is drawn from,
    and the logit at and below which no id can be drawn.
    """
    judge_request(
        tl.program_id(0), logits, logits_stride, cu_rows, draft_ids, num_drafts, positions, temperature, seeds,
        draft_logits, draft_slots, draft_stride_b, draft_stride_k,
        target_max, target_sum, target_arg, draft_max, draft_sum, decision, norms,
        V, K, NB, KP, NBP, CAP, HAS_DRAFT, ALL_GREEDY, SCALE,
    )  # fmt: skip
