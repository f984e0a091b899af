"""Stage 3b, the two-level draw (`specflow.kernels.noise.two_level_draw`): a chunk by its mass, then an id inside it.

Nothing but the chosen chunk is read of the row, 512 logits. What is left of the chunk of a rejected one-hot draft was
summed with the statistics: subtracting the draft's share could leave nothing but rounding.
"""

# mypy: ignore-errors
# Bodies below are Triton's language, which only looks like typed Python.

import triton
import triton.language as tl

from specflow.kernels.rejection.device_noise import CHUNK_IDS, TARGET, natural_log, noise_keys, target_gumbel
from specflow.kernels.rejection.rows import (
    ONE_HOT,
    PLAIN,
    RESIDUAL,
    clean_target,
    load_target,
    log_mass,
    residual_masses,
)


@triton.jit
def load_masses(place, maxima, sums, NL: tl.constexpr, NC: tl.constexpr, NCP: tl.constexpr):
    """Maxima and sums [NCP] of all chunks of a row: of [_, NL] and [_, NC], what the row numbered place has."""
    chunks = tl.arange(0, NCP)
    seen = chunks < NC
    top = tl.load(maxima + place * NL + chunks // (NC // NL), mask=seen, other=float("-inf"), cache_modifier=".cg")
    return top, tl.load(sums + place * NC + chunks, mask=seen, other=0.0, cache_modifier=".cg")


@triton.jit
def safe_log(mass, FAST: tl.constexpr):
    """Logarithm of a float32 at least 0; -inf below e^-80, where nothing can win: noise lies between -3.2 and 22.9."""
    there = mass > 1.8e-35
    return tl.where(there, natural_log(tl.where(there, mass, 1.0), FAST), float("-inf"))


@triton.jit
def best_of(values, noise, FP64: tl.constexpr):
    """Best noisy score and the lowest number of those that have it, in one reduction."""
    return tl.max((values.to(tl.float64) if FP64 else values) + noise, axis=0, return_indices=True)


@triton.jit
def chunk_of_row(
    row_ptr, inverse, first, second,
    V: tl.constexpr, CAP: tl.constexpr, SCALE: tl.constexpr, FP64: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The chunk drawn from p itself, by one program that reads the whole row.

    For a residual without mass, which only rounding can leave (p equals q): it happens almost never.
    """
    best = tl.full((), float("-inf"), tl.float64 if FP64 else tl.float32)
    winner = tl.full((), 0, tl.int32)
    for chunk in range(0, (V + CHUNK_IDS - 1) // CHUNK_IDS):
        tokens = chunk * CHUNK_IDS + tl.arange(0, CHUNK_IDS)
        mass = log_mass(tl.minimum(load_target(row_ptr, tokens, inverse, V, SCALE), CAP), FAST)
        place = tl.full((), CHUNK_IDS, tl.int32) + chunk
        score = (mass.to(tl.float64) if FP64 else mass) + target_gumbel(first, second, place, FP64, FAST)
        winner = tl.where(score > best, chunk, winner)
        best = tl.maximum(best, score)
    return winner


@triton.jit
def chunk_without(rejected, rest, masses, of_chunks, NCP: tl.constexpr, FP64: tl.constexpr):
    """The chunk drawn from p without one id (-1: from p), and the id that is really left out.

    rest: log mass of that id's chunk without it. Where p(id) is 1 up to rounding nothing is left: the draw is from p.
    """
    here = (tl.arange(0, NCP) == rejected // CHUNK_IDS) & (rejected >= 0)
    best, chunk = best_of(tl.where(here, rest, masses), of_chunks, FP64)
    if best == float("-inf"):
        _, chunk = best_of(masses, of_chunks, FP64)
        rejected = tl.full((), -1, tl.int32)
    return chunk, rejected


@triton.jit
def draw_token(
    request, accepted, kind, rejected, norm_p, norm_q, position, seed, row, slot, inverse,
    logits, logits_stride, draft_logits, draft_stride_b, draft_stride_k, target_max, maxima, sums, draft_rest,
    V: tl.constexpr, K: tl.constexpr, NP: tl.constexpr, NL: tl.constexpr, NC: tl.constexpr, NCP: tl.constexpr,
    CAP: tl.constexpr, HAS_DRAFT: tl.constexpr, SCALE: tl.constexpr, FP64: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The last token of a sampling request, int32; 0 when every logit of its row is -inf.

    maxima (of NL parts) and sums: of the request's law with sampled drafts, else of row `accepted` of the statistics.
    Logits of p and of q are asked for together: one wait for memory instead of two. Greedy requests come here as well,
    and what they draw is not used.
    """
    lanes = tl.arange(0, CHUNK_IDS)
    place = request * (K + 1) + accepted
    row_ptr = logits + (row + accepted) * logits_stride
    top, total = load_masses(request if HAS_DRAFT else place, maxima, sums, NL, NC, NCP)
    rest = 0.0 if HAS_DRAFT else tl.load(draft_rest + place, cache_modifier=".cg")
    first, second = noise_keys(seed, position + accepted, TARGET)
    of_chunks = target_gumbel(first, second, tl.arange(0, NCP) + CHUNK_IDS, FP64, FAST)
    masses = top + safe_log(total, FAST)
    without = tl.where(kind == ONE_HOT, rejected, -1)
    if HAS_DRAFT:
        best, chunk = best_of(masses, of_chunks, FP64)
        if (best == float("-inf")) & (kind == RESIDUAL):
            kind = tl.full((), PLAIN, tl.int32)
            chunk = chunk_of_row(row_ptr, inverse, first, second, V, CAP, SCALE, FP64, FAST)
    else:
        chunk, without = chunk_without(without, rest, masses, of_chunks, NCP, FP64)
    chunk = tl.minimum(chunk, NC - 1)  # a greedy request's masses are whatever the buffer holds, NaN included
    ids = chunk * CHUNK_IDS + lanes
    raw = tl.load(row_ptr + ids, mask=ids < V, other=float("-inf"))
    if HAS_DRAFT:
        law_ptr = draft_logits + slot * draft_stride_b + accepted * draft_stride_k
        scores = tl.load(law_ptr + ids, mask=(ids < V) & (kind == RESIDUAL), other=float("-inf")).to(tl.float32)
        peak = tl.load(target_max + place * NP + chunk // (NC // NP), cache_modifier=".cg")
    of_lanes = target_gumbel(first, second, lanes, FP64, FAST)
    values = tl.minimum(clean_target(raw, inverse, SCALE), CAP)
    if HAS_DRAFT:
        left = safe_log(residual_masses(values, scores, norm_p, norm_q, peak, FAST), FAST)
        values = tl.where(kind == RESIDUAL, left, values)
    _, lane = best_of(tl.where(ids == without, float("-inf"), values), of_lanes, FP64)
    return chunk * CHUNK_IDS + lane
