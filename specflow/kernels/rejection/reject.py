"""Stage 2, rejection: how many leading drafts each request keeps, and what its last token is drawn from.

All drafts of a request are judged at once: its statistics are a small [K+1, NP] tile, and one round trip to memory
costs less than K of them. Where drafts were sampled it is a launch of its own, of one program per request: the many
programs of `masses` would read the statistics again and again. Otherwise it is part of the last launch.
"""

# mypy: ignore-errors
# Bodies below are Triton's language, which only looks like typed Python.

import triton
import triton.language as tl

from specflow.kernels.rejection.device_noise import coin, natural_log
from specflow.kernels.rejection.overlap import let_next_start, wait_for_previous
from specflow.kernels.rejection.rows import DONE, NO_TOKEN, ONE_HOT, PLAIN, RESIDUAL, natural_exp


@triton.jit
def log_normaliser(maxima, sums, FAST: tl.constexpr):
    """Log of the sum of exponentials of rows from block statistics [K+1, NP]; -inf where all is -inf."""
    top = tl.max(maxima, axis=1)
    shift = tl.where(top == float("-inf"), 0.0, top)
    return shift + natural_log(tl.sum(sums * natural_exp(maxima - shift[:, None], FAST), axis=1), FAST)


@triton.jit
def sampled_accepts(norm_p, logit, norm_q, score, flip, FAST: tl.constexpr):
    """Coins [K+1]: log p(d) > log u + log q(d)."""
    log_q = score - norm_q
    # q(d) = 0 cannot have been sampled; without the first test a wrong q would accept everything.
    return (log_q > float("-inf")) & (logit - norm_p > natural_log(flip, FAST) + log_q)


@triton.jit
def judge_request(
    request, draft_ids, num_drafts, positions, temperature, seeds,
    target_max, target_sum, target_arg, draft_max, draft_sum, draft_logit, draft_score,
    V: tl.constexpr, K: tl.constexpr, NP: tl.constexpr, KP: tl.constexpr, NPP: tl.constexpr,
    HAS_DRAFT: tl.constexpr, ALL_GREEDY: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Decision about one request, five scalars.

    Accepted drafts; kind of draw; rejected draft (-1 where there is none), or final token of a greedy request; log
    normalisers of p and q in the row that is drawn from, where a draft was rejected there.

    Everything is loaded at once and without a branch, statistics that nobody has written included: one wait for memory
    instead of three. What was not written decides about nothing.
    """
    steps, parts = tl.arange(0, KP), tl.arange(0, NPP)
    stat = (request * (K + 1) + steps[:, None]) * NP + parts[None, :]
    place = request * (K + 1) + steps
    here = (steps <= K)[:, None] & (parts < NP)[None, :]
    count = tl.load(num_drafts + request)
    draft = tl.load(draft_ids + request * K + steps, mask=steps < K, other=-1)
    maxima = tl.load(target_max + stat, mask=here, other=float("-inf"), cache_modifier=".cg")
    args = tl.load(target_arg + stat, mask=here, other=NO_TOKEN, cache_modifier=".cg")
    if not ALL_GREEDY:
        heat = tl.load(temperature + request)
        seed, position = tl.load(seeds + request), tl.load(positions + request)
        sums = tl.load(target_sum + stat, mask=here, other=0.0, cache_modifier=".cg")
        logit = tl.load(draft_logit + place, mask=steps <= K, other=float("-inf"), cache_modifier=".cg")
        if HAS_DRAFT:
            peaks = tl.load(draft_max + stat, mask=here, other=float("-inf"), cache_modifier=".cg")
            masses = tl.load(draft_sum + stat, mask=here, other=0.0, cache_modifier=".cg")
            score = tl.load(draft_score + place, mask=steps <= K, other=float("-inf"), cache_modifier=".cg")
    draft = tl.where(steps < count, draft, -1)
    valid = (draft >= 0) & (draft < V)
    best = tl.min(tl.where(maxima == tl.max(maxima, axis=1)[:, None], args, NO_TOKEN), axis=1)
    accept = draft == best
    kinds = tl.full((KP,), DONE, tl.int32)
    tokens = best
    norms_p = tl.zeros((KP,), tl.float32)
    norms_q = norms_p
    if not ALL_GREEDY:
        greedy = tl.where(heat == 0.0, 1, 0)
        norms_p = log_normaliser(maxima, sums, FAST)
        if HAS_DRAFT:
            norms_q = log_normaliser(peaks, masses, FAST)
        else:
            score = norms_q
        # A law with a NaN, or all -inf, is none: q is then unknown and the row is drawn from p.
        lawful = (norms_q == norms_q) & (norms_q > float("-inf")) & (norms_q < float("inf"))
        flip = coin(seed, position + steps)
        sampled = tl.where(valid & lawful, RESIDUAL if HAS_DRAFT else ONE_HOT, PLAIN)
        accept = tl.where(greedy == 1, accept, sampled_accepts(norms_p, logit, norms_q, score, flip, FAST))
        kinds = tl.where(greedy == 1, kinds, sampled)
        tokens = tl.where(greedy == 1, best, draft.to(tl.int32))
    accepted = tl.min(tl.where(accept & valid, KP, steps))
    last = steps == accepted
    kind = tl.sum(tl.where(last, kinds, 0))
    token = tl.sum(tl.where(last, tokens, 0))
    norm_p = tl.max(tl.where(last, norms_p, float("-inf")))
    norm_q = tl.max(tl.where(last, norms_q, float("-inf")))
    return accepted, kind, token, norm_p, norm_q


@triton.jit
def store_decision(request, accepted, kind, token, norm_p, norm_q, decision, norms):
    """For the kernel that follows, and for tests: decision [B, 3] int32, norms [B, 2] float32."""
    tl.store(decision + request * 3, accepted)
    tl.store(decision + request * 3 + 1, kind)
    tl.store(decision + request * 3 + 2, token)
    tl.store(norms + request * 2, norm_p)
    tl.store(norms + request * 2 + 1, norm_q)


@triton.jit
def load_decision(request, decision, norms):
    """What `store_decision` left, past the caches that another kernel's writes do not reach."""
    accepted = tl.load(decision + request * 3, cache_modifier=".cg")
    kind = tl.load(decision + request * 3 + 1, cache_modifier=".cg")
    token = tl.load(decision + request * 3 + 2, cache_modifier=".cg")
    norm_p = tl.load(norms + request * 2, cache_modifier=".cg")
    norm_q = tl.load(norms + request * 2 + 1, cache_modifier=".cg")
    return accepted, kind, token, norm_p, norm_q


@triton.jit(
    do_not_specialize_on_alignment=[
        "draft_ids", "num_drafts", "positions", "temperature", "seeds", "draft_logit", "draft_score", "decision",
        "norms",
    ]
)  # fmt: skip
def reject_kernel(
    draft_ids, num_drafts, positions, temperature, seeds,
    target_max, target_sum, target_arg, draft_max, draft_sum, draft_logit, draft_score, decision, norms,
    V: tl.constexpr, K: tl.constexpr, NP: tl.constexpr, KP: tl.constexpr, NPP: tl.constexpr,
    FAST: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (B,), for sampled drafts: decision [B, 3] int32 and norms [B, 2] float32."""
    request = tl.program_id(0)
    wait_for_previous(OVERLAP)
    let_next_start(OVERLAP)
    accepted, kind, token, norm_p, norm_q = judge_request(
        request, draft_ids, num_drafts, positions, temperature, seeds,
        target_max, target_sum, target_arg, draft_max, draft_sum, draft_logit, draft_score,
        V, K, NP, KP, NPP, True, False, FAST,
    )  # fmt: skip
    store_decision(request, accepted, kind, token, norm_p, norm_q, decision, norms)
