"""Tiles of a row: which ids a program holds, in what order, and what it makes of them.

A tile is [W, C, H, L]: W parts of C chunks of H * L = 512 ids. A part belongs to one warp, and L ids are one 16-byte
read of each of its threads: maxima and sums are reductions inside a warp, and only they cross warps, to be stored.
Warps that wait for each other cost more than the arithmetic (docs/kernels.md). The order of the dimensions makes the
compiler choose that layout.

On NVIDIA an id of a sampling row takes six instructions: widen, maximum, multiply and add, exponential, saturate, add.
"""

# mypy: ignore-errors
# Bodies below are Triton's language, which only looks like typed Python.

import triton
import triton.language as tl
from triton.language.extra import libdevice

from specflow.kernels.rejection.device_noise import CHUNK_IDS
from specflow.kernels.rejection.rows import finite

LOG2E = tl.constexpr(1.4426950408889634)
HUGE = tl.constexpr(1e38)  # above it, a product with LOG2E can overflow


@triton.jit
def tile_ids(block, BLOCK: tl.constexpr, PART: tl.constexpr, BITS: tl.constexpr):
    """Ids of a tile [W, C, H, L], int32; BITS of one logit: L is 256 for 16, 128 for 32."""
    LANES: tl.constexpr = 32 * 128 // BITS
    part = tl.arange(0, BLOCK // PART)[:, None, None, None] * PART
    chunk = tl.arange(0, PART // CHUNK_IDS)[None, :, None, None] * CHUNK_IDS
    stripe = tl.arange(0, CHUNK_IDS // LANES)[None, None, :, None] * LANES
    return block * BLOCK + part + chunk + stripe + tl.arange(0, LANES)[None, None, None, :]


@triton.jit
def offsets_in_part(values, PART: tl.constexpr):
    """Numbers [1, C, H, 1] of the ids of a tile's first lane in their part; constants once compiled."""
    LANES: tl.constexpr = values.shape[3]
    chunk = tl.arange(0, PART // CHUNK_IDS)[None, :, None, None] * CHUNK_IDS
    return chunk + tl.arange(0, CHUNK_IDS // LANES)[None, None, :, None] * LANES


@triton.jit
def places_of_chunks(block, BLOCK: tl.constexpr, PART: tl.constexpr):
    """Numbers [W, C] of the chunks of a tile."""
    part = tl.arange(0, BLOCK // PART)[:, None] * (PART // CHUNK_IDS)
    return block * (BLOCK // CHUNK_IDS) + part + tl.arange(0, PART // CHUNK_IDS)[None, :]


@triton.jit
def places_of_parts(block, BLOCK: tl.constexpr, PART: tl.constexpr):
    """Numbers [W] of the parts of a tile."""
    return block * (BLOCK // PART) + tl.arange(0, BLOCK // PART)


@triton.jit
def widened(raw, FAST: tl.constexpr):
    """Float32; bfloat16 by one instruction per id, where the compiler takes up to two."""
    if FAST and raw.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=f,=f,r", [raw],
            dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return raw.to(tl.float32)


@triton.jit
def load_tile(row_ptr, ids, block, V: tl.constexpr, BLOCK: tl.constexpr, FAST: tl.constexpr, EVICT: tl.constexpr):
    """A tile in float32, -inf behind the end of the row; only the row's last block is looked at for that."""
    if (block + 1) * BLOCK <= V:
        values = widened(tl.load(row_ptr + ids, eviction_policy=EVICT), FAST)
    else:
        values = widened(tl.load(row_ptr + ids, mask=ids < V, other=float("-inf"), eviction_policy=EVICT), FAST)
    return values


@triton.jit
def two_to(value, FAST: tl.constexpr):
    """Power of two; FAST flushes results below 1e-38 to 0."""
    if FAST:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [value], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp2(value)


@triton.jit
def within_one(value, FAST: tl.constexpr):
    """Clamped to [0, 1]; NaN becomes 0, and infinity 1, which is what the largest finite logit gives."""
    if FAST:
        return libdevice.saturatef(value)
    else:
        return tl.minimum(tl.where(value > 0.0, value, 0.0), 1.0)


@triton.jit
def part_maxima(values):
    """Maxima [W] of a tile; NaN counts as -inf."""
    top = tl.max(tl.max(tl.max(values, axis=1), axis=1), axis=1)
    return tl.where(top > float("-inf"), top, float("-inf"))


@triton.jit
def beside_tile(parts):
    """[W] for use beside a tile [W, C, H, L]."""
    return parts[:, None, None, None]


@triton.jit
def power_of(top, inverse):
    """Factor and shift [W] with 2^(factor * logit - shift) = exp(logit * inverse - top).

    Among logits near the limits of float32 neighbours are so far apart that the base does not matter, and LOG2E, with
    which they could overflow, is left out.
    """
    huge = tl.abs(finite(top)) > HUGE
    factor = tl.where(huge, inverse, inverse * LOG2E)
    return factor, finite(top) * tl.where(huge, 1.0, LOG2E)


@triton.jit
def sum_of_chunks(masses):
    """Sums [W, C] of a tile."""
    return tl.sum(tl.sum(masses, axis=2), axis=2)


@triton.jit
def target_masses(values, inverse, CAP: tl.constexpr, FAST: tl.constexpr):
    """Maxima [W] of logits * inverse by part, and sums [W, C] of exponentials relative to them; 0 where all is -inf.

    NaN counts as -inf and what lies above CAP as CAP.
    """
    top = tl.minimum(part_maxima(values) * inverse, CAP)
    factor, shift = power_of(top, inverse)
    return top, sum_of_chunks(within_one(two_to(values * beside_tile(factor) - beside_tile(shift), FAST), FAST))


@triton.jit
def law_masses(scores, FAST: tl.constexpr):
    """Maxima and sums [W] of the parts of a draft's law; NaN where a NaN or an infinity is."""
    top = part_maxima(scores)
    factor, shift = power_of(top, 1.0)
    return top, tl.sum(sum_of_chunks(two_to(scores * beside_tile(factor) - beside_tile(shift), FAST)), axis=1)


@triton.jit
def residual_sums(values, scores, inverse, norm_p, norm_q, top, FAST: tl.constexpr):
    """Sums [W, C] of [p - q]+ over exp(top - norm_p) by chunk, from logits of p and of q.

    top [W]: maximum of logits * inverse in the part, -inf where all are. No less exact than the difference of logs: its
    error, too, is the rounding of one exponential.
    """
    factor, shift = power_of(top, inverse)
    p = within_one(two_to(values * beside_tile(factor) - beside_tile(shift), FAST), FAST)
    q_shift = beside_tile((norm_q - (norm_p - finite(top))) * LOG2E)
    rest = p - two_to(scores * LOG2E - q_shift, FAST)
    return sum_of_chunks(tl.maximum(rest, 0.0) if FAST else tl.where(rest > 0.0, rest, 0.0))
