"""Stage 3b, the two-level draw (`specflow.kernels.noise.two_level_draw`): a chunk by its mass, then an id inside it.

Nothing but the chosen chunk, and the chunk of a rejected one-hot draft, is read of the row: 512 logits each.
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
    finite,
    first_of,
    load_target,
    natural_exp,
    residual_masses,
)


@triton.jit
def log_mass(values, FAST: tl.constexpr):
    """Log of the sum of exponentials of one chunk, -inf where it has no mass."""
    top = tl.max(values)
    return top + natural_log(tl.maximum(tl.sum(natural_exp(values - finite(top), FAST)), 1.0), FAST)


@triton.jit
def log_masses(place, maxima, sums, NL: tl.constexpr, NC: tl.constexpr, NCP: tl.constexpr, FAST: tl.constexpr):
    """Log masses of all chunks [NCP] from their sums relative to their part's maximum; -inf where there is none.

    maxima [_, NL] and sums [_, NC]; place is the row that counts.
    """
    chunks = tl.arange(0, NCP)
    seen = chunks < NC
    top = tl.load(maxima + place * NL + chunks // (NC // NL), mask=seen, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(sums + place * NC + chunks, mask=seen, other=0.0, cache_modifier=".cg")
    return top + safe_log(total, FAST)


@triton.jit
def safe_log(mass, FAST: tl.constexpr):
    """Logarithm of a float32 at least 0; -inf below e^-80, where nothing can win: noise lies between -3.2 and 22.9."""
    there = mass > 1.8e-35
    return tl.where(there, natural_log(tl.where(there, mass, 1.0), FAST), float("-inf"))


@triton.jit
def best_of(values, noise, ids, FP64: tl.constexpr):
    """Best noisy score of some ids or chunks and the lowest of them that has it."""
    scores = (values.to(tl.float64) if FP64 else values) + noise
    best = tl.max(scores)
    return best, first_of(scores, best, ids)


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
def chunk_without(
    rejected, masses, of_chunks, row_ptr, inverse, NCP: tl.constexpr,
    V: tl.constexpr, CAP: tl.constexpr, SCALE: tl.constexpr, FP64: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The chunk drawn from p without one id (-1: from p), and the id that is really left out.

    That id's chunk is summed again without it: subtracting its share could leave nothing but rounding. Where p(id) is 1
    up to rounding nothing is left, and the draw is from p.
    """
    chunks = tl.arange(0, NCP)
    ids = rejected // CHUNK_IDS * CHUNK_IDS + tl.arange(0, CHUNK_IDS)
    lost = tl.where(rejected < 0, -1, 0)  # then no id is read
    values = tl.minimum(load_target(row_ptr, tl.where(lost < 0, -1, ids), inverse, V, SCALE), CAP)
    rest = log_mass(tl.where(ids == rejected, float("-inf"), values), FAST)
    left = tl.where((chunks == rejected // CHUNK_IDS) & (lost == 0), rest, masses)
    nothing = tl.where(tl.max(left) == float("-inf"), 1, 0)
    _, chunk = best_of(tl.where(nothing == 1, masses, left), of_chunks, chunks, FP64)
    return chunk, tl.where(nothing == 1, -1, rejected)


@triton.jit
def draw_token(
    request, accepted, kind, rejected, norm_p, norm_q, position, seed, row, slot, inverse,
    logits, logits_stride, draft_logits, draft_stride_b, draft_stride_k, target_max, maxima, sums,
    V: tl.constexpr, K: tl.constexpr, NP: tl.constexpr, NL: tl.constexpr, NC: tl.constexpr, NCP: tl.constexpr,
    CAP: tl.constexpr, HAS_DRAFT: tl.constexpr, SCALE: tl.constexpr, FP64: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The last token of a sampling request, int32; 0 when every logit of its row is -inf.

    maxima (of NL parts) and sums: of the request's law with sampled drafts, else of row `accepted` of the statistics.
    """
    lanes = tl.arange(0, CHUNK_IDS)
    chunks = tl.arange(0, NCP)
    place = request * (K + 1) + accepted
    row_ptr = logits + (row + accepted) * logits_stride
    masses = log_masses(request if HAS_DRAFT else place, maxima, sums, NL, NC, NCP, FAST)
    first, second = noise_keys(seed, position + accepted, TARGET)
    of_chunks = target_gumbel(first, second, chunks + CHUNK_IDS, FP64, FAST)
    without = tl.where(kind == ONE_HOT, rejected, -1)
    if HAS_DRAFT:
        best, chunk = best_of(masses, of_chunks, chunks, FP64)
        if (best == float("-inf")) & (kind == RESIDUAL):
            kind = tl.full((), PLAIN, tl.int32)
            chunk = chunk_of_row(row_ptr, inverse, first, second, V, CAP, SCALE, FP64, FAST)
    else:
        chunk, without = chunk_without(
            without, masses, of_chunks, row_ptr, inverse, NCP, V, CAP, SCALE, FP64, FAST
        )  # fmt: skip
    ids = chunk * CHUNK_IDS + lanes
    values = tl.minimum(load_target(row_ptr, ids, inverse, V, SCALE), CAP)
    if HAS_DRAFT:  # noqa: SIM102
        if kind == RESIDUAL:
            law_ptr = draft_logits + slot * draft_stride_b + accepted * draft_stride_k
            scores = tl.load(law_ptr + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
            top = tl.load(target_max + place * NP + chunk // (NC // NP), cache_modifier=".cg")
            values = safe_log(residual_masses(values, scores, norm_p, norm_q, top, FAST), FAST)
    values = tl.where(ids == without, float("-inf"), values)
    _, token = best_of(values, target_gumbel(first, second, lanes, FP64, FAST), ids, FP64)
    return token
