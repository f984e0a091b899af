"""Stage 3, Gumbel resample: the best id of every block of the one row per request that a token is drawn from.

Noise is a function of (seed, position, id), so that the best of the blocks' bests is the id that one pass over the row
would have drawn. Greedy requests, and blocks in which no id can win, are not read.
"""

# mypy: ignore-errors
# Bodies below are Triton's language, which only looks like typed Python.

import triton
import triton.language as tl

from specflow.kernels.rejection.device_noise import TARGET, minus_log1p_minus, noise_keys, target_gumbel
from specflow.kernels.rejection.rows import (
    DONE,
    ONE_HOT,
    PLAIN,
    RESIDUAL,
    first_chunk,
    first_of,
    inverse_of,
    load_target,
    natural_exp,
    tile_ids,
)


@triton.jit
def residual_logits(log_p, log_q, FAST: tl.constexpr):
    """log [p - q]+ from logs, -inf where q >= p or either is undefined; stable where the two are close."""
    ratio = natural_exp(log_q - log_p, FAST)
    below = ratio < 1.0
    return tl.where(below, log_p - minus_log1p_minus(tl.where(below, ratio, 0.0), FAST), float("-inf"))


@triton.jit
def noisy_scores(
    tokens, kind, without, row, law, inverse, norm_p, norm_q, first, second,
    V: tl.constexpr, CAP: tl.constexpr, HAS_DRAFT: tl.constexpr, SCALE: tl.constexpr,
    FP64: tl.constexpr, FAST: tl.constexpr, EXCLUDE: tl.constexpr,
):  # fmt: skip
    """Log of the law that is drawn from, up to a constant, plus Gumbel noise, of some ids; `without` has no mass if
    EXCLUDE."""
    values = load_target(row, tokens, inverse, V, SCALE)
    if HAS_DRAFT:  # noqa: SIM102
        if kind == RESIDUAL:
            scores = tl.load(law + tokens, mask=tokens < V, other=float("-inf")).to(tl.float32)
            values = residual_logits(tl.minimum(values, CAP) - norm_p, scores - norm_q, FAST)
    if EXCLUDE:
        values = tl.where(tokens == without, float("-inf"), values)
    return values + target_gumbel(first, second, tokens, FP64, FAST)


@triton.jit
def best_of_tile(
    block, kind, without, row, law, inverse, norm_p, norm_q, first, second,
    V: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, CAP: tl.constexpr, HAS_DRAFT: tl.constexpr,
    SCALE: tl.constexpr, FP64: tl.constexpr, FAST: tl.constexpr, EXCLUDE: tl.constexpr,
):  # fmt: skip
    """Best score of a tile and its lowest id."""
    values = noisy_scores(
        tile_ids(block, BLOCK // WIDTH, WIDTH), kind, without, row, law, inverse, norm_p, norm_q,
        first, second, V, CAP, HAS_DRAFT, SCALE, FP64, FAST, EXCLUDE,
    )  # fmt: skip
    chunk_max = tl.max(values, axis=1)
    ids = first_chunk(chunk_max, tl.max(chunk_max), block, BLOCK // WIDTH, WIDTH)
    values = noisy_scores(
        ids, kind, without, row, law, inverse, norm_p, norm_q,
        first, second, V, CAP, HAS_DRAFT, SCALE, FP64, FAST, EXCLUDE,
    )  # fmt: skip
    best = tl.minimum(tl.max(values), CAP)
    return best, first_of(values, best, ids)


@triton.jit
def resample_tile(
    block, request, logits, logits_stride, cu_rows, positions, temperature, seeds,
    draft_logits, draft_slots, draft_stride_b, draft_stride_k, target_max, decision, norms, best_score, best_id,
    V: tl.constexpr, K: tl.constexpr, NB: tl.constexpr, STATS_BLOCK: tl.constexpr, NS: tl.constexpr,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, CAP: tl.constexpr, HAS_DRAFT: tl.constexpr, SCALE: tl.constexpr,
    FP64: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """One block of ids of one request; see `resample_kernel`."""
    kind = tl.load(decision + request * 3 + 1, cache_modifier=".cg")
    if kind != DONE:
        accepted = tl.load(decision + request * 3, cache_modifier=".cg")
        token = tl.load(decision + request * 3 + 2, cache_modifier=".cg")
        known = kind != PLAIN
        stat = (request * (K + 1) + accepted) * NB + block * BLOCK // STATS_BLOCK
        top = tl.load(target_max + stat, mask=known, other=0.0, cache_modifier=".cg")
        floor = tl.load(norms + request * 3 + 2, cache_modifier=".cg")
        out = request * NS + block
        if known & (top <= floor):
            tl.store(best_score + out, float("-inf"))
            tl.store(best_id + out, block * BLOCK)
        else:
            row = logits + (tl.load(cu_rows + request) + accepted) * logits_stride
            law = draft_logits
            if HAS_DRAFT:
                law += tl.load(draft_slots + request) * draft_stride_b + accepted * draft_stride_k
            inverse = inverse_of(tl.load(temperature + request)) if SCALE else 1.0
            norm_p = tl.load(norms + request * 3, cache_modifier=".cg")
            norm_q = tl.load(norms + request * 3 + 1, cache_modifier=".cg")
            first, second = noise_keys(tl.load(seeds + request), tl.load(positions + request) + accepted, TARGET)
            best, winner = best_of_tile(
                block, kind, -1, row, law, inverse, norm_p, norm_q,
                first, second, V, BLOCK, WIDTH, CAP, HAS_DRAFT, SCALE, FP64, FAST, False,
            )  # fmt: skip
            if not HAS_DRAFT:  # noqa: SIM102
                # Seldom true, so that the comparison with every id is paid for in one tile of the row at most.
                if (kind == ONE_HOT) & (token // BLOCK == block):
                    best, winner = best_of_tile(
                        block, kind, token, row, law, inverse, norm_p, norm_q,
                        first, second, V, BLOCK, WIDTH, CAP, HAS_DRAFT, SCALE, FP64, FAST, True,
                    )  # fmt: skip
            tl.store(best_score + out, best)
            tl.store(best_id + out, winner)


@triton.jit
def resample_kernel(
    logits, logits_stride, cu_rows, positions, temperature, seeds,
    draft_logits, draft_slots, draft_stride_b, draft_stride_k, target_max, decision, norms, best_score, best_id,
    V: tl.constexpr, K: tl.constexpr, NB: tl.constexpr, STATS_BLOCK: tl.constexpr, NS: tl.constexpr,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, CAP: tl.constexpr, HAS_DRAFT: tl.constexpr, SCALE: tl.constexpr,
    FP64: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Grid (NS, B), BLOCK a divisor of STATS_BLOCK. best_score [B, NS] float32 or float64, best_id [B, NS] int32."""
    resample_tile(
        tl.program_id(0), tl.program_id(1), logits, logits_stride, cu_rows, positions, temperature, seeds,
        draft_logits, draft_slots, draft_stride_b, draft_stride_k, target_max, decision, norms, best_score, best_id,
        V, K, NB, STATS_BLOCK, NS, BLOCK, WIDTH, CAP, HAS_DRAFT, SCALE, FP64, FAST,
    )  # fmt: skip
