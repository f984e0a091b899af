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
def first_step(step, kind, token, norm_p, norm_q, other, other_kind, other_token, other_p, other_q):
    """The lower of two steps and what belongs to it."""
    mine = step <= other
    return (
        tl.where(mine, step, other),
        tl.where(mine, kind, other_kind),
        tl.where(mine, token, other_token),
        tl.where(mine, norm_p, other_p),
        tl.where(mine, norm_q, other_q),
    )


@triton.jit
def load_request(
    request, draft_ids, num_drafts, positions, temperature, seeds, K: tl.constexpr, KP: tl.constexpr,
    ALL_GREEDY: tl.constexpr,
):  # fmt: skip
    """What a request asks for, known before its statistics: drafts [KP], their number, temperature, seed, position."""
    steps = tl.arange(0, KP)
    count = tl.load(num_drafts + request)
    draft = tl.load(draft_ids + request * K + steps, mask=steps < K, other=-1)
    heat, seed, position = 0.0, 0, 0
    if not ALL_GREEDY:
        heat = tl.load(temperature + request)
        seed, position = tl.load(seeds + request), tl.load(positions + request)
    return draft, count, heat, seed, position


@triton.jit
def judge_request(
    request, draft, count, heat, seed, position,
    target_max, target_sum, target_arg, draft_max, draft_sum, draft_logit, draft_score,
    V: tl.constexpr, K: tl.constexpr, NP: tl.constexpr, KP: tl.constexpr, NPP: tl.constexpr,
    HAS_DRAFT: tl.constexpr, ALL_GREEDY: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Decision about one request, five scalars.

    Accepted drafts; kind of draw; rejected draft (-1 where there is none), or final token of a greedy request; log
    normalisers of p and q in the row that is drawn from, where a draft was rejected there.

    Everything is loaded at once: one wait for memory instead of three. Only what this step's statistics may have
    written is asked for: the rest would come from memory instead of the cache.
    """
    steps, parts = tl.arange(0, KP), tl.arange(0, NPP)
    stat = (request * (K + 1) + steps[:, None]) * NP + parts[None, :]
    place = request * (K + 1) + steps
    greedy = tl.full((), 1, tl.int32)
    if not ALL_GREEDY:
        greedy = tl.where(heat == 0.0, 1, 0)
    judged = steps < count
    rows = steps < count + greedy if HAS_DRAFT else steps <= count
    here = rows[:, None] & (parts < NP)[None, :]
    maxima = tl.load(target_max + stat, mask=here, other=float("-inf"), cache_modifier=".cg")
    args = tl.load(target_arg + stat, mask=here & (greedy == 1), other=NO_TOKEN, cache_modifier=".cg")
    if not ALL_GREEDY:
        sums = tl.load(target_sum + stat, mask=here, other=0.0, cache_modifier=".cg")
        logit = tl.load(draft_logit + place, mask=judged, other=float("-inf"), cache_modifier=".cg")
        if HAS_DRAFT:
            laws = judged[:, None] & here
            peaks = tl.load(draft_max + stat, mask=laws, other=float("-inf"), cache_modifier=".cg")
            masses = tl.load(draft_sum + stat, mask=laws, other=0.0, cache_modifier=".cg")
            score = tl.load(draft_score + place, mask=judged, other=float("-inf"), cache_modifier=".cg")
    draft = tl.where(judged, draft, -1)
    valid = (draft >= 0) & (draft < V)
    best = tl.min(tl.where(maxima == tl.max(maxima, axis=1)[:, None], args, NO_TOKEN), axis=1)
    accept = draft == best
    kinds = tl.full((KP,), DONE, tl.int32)
    tokens = best
    norms_p = tl.zeros((KP,), tl.float32)
    norms_q = norms_p
    if not ALL_GREEDY:
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
    # In one reduction: each makes all warps wait for each other.
    last = tl.where(accept & valid, KP, steps)
    return tl.reduce((last, kinds, tokens, norms_p, norms_q), 0, first_step)


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
    draft, count, heat, seed, position = load_request(
        request, draft_ids, num_drafts, positions, temperature, seeds, K, KP, False
    )  # fmt: skip
    wait_for_previous(OVERLAP)
    let_next_start(OVERLAP)
    accepted, kind, token, norm_p, norm_q = judge_request(
        request, draft, count, heat, seed, position,
        target_max, target_sum, target_arg, draft_max, draft_sum, draft_logit, draft_score,
        V, K, NP, KP, NPP, True, False, FAST,
    )  # fmt: skip
    store_decision(request, accepted, kind, token, norm_p, norm_q, decision, norms)
