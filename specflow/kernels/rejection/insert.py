"""Stage 4, insert: accepted drafts, then the drawn token, then -1.

A residual without mass can only come from rounding (p equals q, or p(d) is 1): the row is then drawn from p, here and
by one program, since it happens almost never.
"""

# mypy: ignore-errors
# Bodies below are Triton's language, which only looks like typed Python.

import triton
import triton.language as tl

from specflow.kernels.rejection.device_noise import TARGET, noise_keys, target_gumbel
from specflow.kernels.rejection.rows import DONE, NO_TOKEN, PLAIN, first_of, inverse_of, load_target


@triton.jit
def draw_from_target(
    request, accepted, logits, logits_stride, cu_rows, positions, temperature, seeds,
    V: tl.constexpr, BLOCK: tl.constexpr, CAP: tl.constexpr, SCALE: tl.constexpr,
    FP64: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Gumbel argmax over the whole row by one program; 0 when every logit is -inf."""
    row = logits + (tl.load(cu_rows + request) + accepted) * logits_stride
    inverse = inverse_of(tl.load(temperature + request)) if SCALE else 1.0
    first, second = noise_keys(tl.load(seeds + request), tl.load(positions + request) + accepted, TARGET)
    best = tl.full((), float("-inf"), tl.float64 if FP64 else tl.float32)
    token = tl.full((), 0, tl.int32)
    for start in range(0, V, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        values = load_target(row, tokens, inverse, V, SCALE) + target_gumbel(first, second, tokens, FP64, FAST)
        top = tl.minimum(tl.max(values), CAP)
        token = tl.where(top > best, first_of(values, top, tokens), token)
        best = tl.maximum(best, top)
    return token


@triton.jit
def insert_request(
    request, logits, logits_stride, cu_rows, draft_ids, positions, temperature, seeds,
    decision, best_score, best_id, token_ids, num_emitted, num_accepted,
    V: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, NS: tl.constexpr, NSP: tl.constexpr, BLOCK: tl.constexpr,
    CAP: tl.constexpr, SCALE: tl.constexpr, FP64: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """One request; see `insert_kernel`."""
    accepted = tl.load(decision + request * 3, cache_modifier=".cg")
    kind = tl.load(decision + request * 3 + 1, cache_modifier=".cg")
    token = tl.load(decision + request * 3 + 2, cache_modifier=".cg")
    if kind != DONE:
        blocks = tl.arange(0, NSP)
        out = best_score + request * NS + blocks
        scores = tl.load(out, mask=blocks < NS, other=float("-inf"), cache_modifier=".cg")
        ids = tl.load(best_id + request * NS + blocks, mask=blocks < NS, other=NO_TOKEN, cache_modifier=".cg")
        best = tl.max(scores)
        token = first_of(scores, best, ids)
        if (best == float("-inf")) & (kind != PLAIN):
            token = draw_from_target(
                request, accepted, logits, logits_stride, cu_rows, positions, temperature, seeds,
                V, BLOCK, CAP, SCALE, FP64, FAST,
            )  # fmt: skip
    steps = tl.arange(0, KP)
    draft = tl.load(draft_ids + request * K + steps, mask=steps < accepted, other=-1)
    row = tl.where(steps == accepted, token.to(tl.int64), draft)
    tl.store(token_ids + request * (K + 1) + steps, row, mask=steps <= K)
    tl.store(num_emitted + request, accepted.to(tl.int64) + 1)
    tl.store(num_accepted + request, accepted.to(tl.int64))


@triton.jit
def insert_kernel(
    logits, logits_stride, cu_rows, draft_ids, positions, temperature, seeds,
    decision, best_score, best_id, token_ids, num_emitted, num_accepted,
    V: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, NS: tl.constexpr, NSP: tl.constexpr, BLOCK: tl.constexpr,
    CAP: tl.constexpr, SCALE: tl.constexpr, FP64: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Grid (B,). token_ids [B, K+1], num_emitted [B] and num_accepted [B], all int64."""
    insert_request(
        tl.program_id(0), logits, logits_stride, cu_rows, draft_ids, positions, temperature, seeds,
        decision, best_score, best_id, token_ids, num_emitted, num_accepted,
        V, K, KP, NS, NSP, BLOCK, CAP, SCALE, FP64, FAST,
    )  # fmt: skip
