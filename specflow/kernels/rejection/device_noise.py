"""`specflow.kernels.noise` for use inside kernels: the same hashes, the same uniforms, the same formula.

The hash is bit for bit the same. A float32 uniform is rounded once from float32 instead of once from float64, which
differs by one unit in the last place for a few hashes; a logarithm may differ by a few, as it does between devices.
"""

# mypy: ignore-errors
# Bodies below are Triton's language, which only looks like typed Python.

import triton
import triton.language as tl
from triton.language.extra import libdevice

from specflow.kernels import noise

COIN = tl.constexpr(noise.COIN)
TARGET = tl.constexpr(noise.TARGET)
CHUNK_IDS = tl.constexpr(noise.CHUNK_IDS)


@triton.jit
def mix32(value):
    """The 32-bit finaliser of MurmurHash3 on uint32."""
    value = (value ^ (value >> 16)) * 0x85EBCA6B
    value = (value ^ (value >> 13)) * 0xC2B2AE35
    return value ^ (value >> 16)


@triton.jit
def noise_keys(seed, position, DOMAIN: tl.constexpr):
    """Two uint32 keys of an int64 seed and an int64 position."""
    first = mix32(seed.to(tl.uint32) ^ mix32(position.to(tl.uint32) * 0x9E3779B1 + DOMAIN))
    second = mix32((seed >> 32).to(tl.uint32) ^ mix32(first + ((0x7F4A7C15 * DOMAIN) & 0xFFFFFFFF)))
    return first, second


@triton.jit
def open_unit(hashed):
    """Float32 in (0, 1) of a uint32."""
    return tl.minimum(hashed.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10, 0.99999994039535522)


@triton.jit
def coin(seed, position):
    """The float32 uniform that decides about one draft."""
    first, second = noise_keys(seed, position, COIN)
    return open_unit(mix32(first ^ mix32(second)))


@triton.jit
def natural_log(value, FAST: tl.constexpr):
    """Logarithm of a normal positive float32.

    FAST takes the hardware's base-2 logarithm where there is one: absolute error 2e-7 near 1, relative 2e-7 elsewhere.
    """
    if FAST:
        return libdevice.fast_logf(value)
    else:
        return tl.log(value)


@triton.jit
def minus_log1p_minus(unit, FAST: tl.constexpr):
    """-log(1 - u) of float32 u in [0, 1), relative error below 1e-6 everywhere.

    Below 1/4 a polynomial fitted to (-log1p(-u)/u - 1)/u (relative error 8e-9 before rounding); from 1/4 on, 1 - u
    loses nothing that matters.
    """
    poly = 0.11699668318033218 + unit * 0.2957340478897095
    poly = 0.24957609176635742 + unit * (0.20692184567451477 + unit * poly)
    poly = 0.4999999701976776 + unit * (0.33334270119667053 + unit * poly)
    return tl.where(unit < 0.25, unit + unit * unit * poly, -natural_log(1.0 - unit, FAST))


@triton.jit
def target_gumbel(first, second, tokens, FP64: tl.constexpr, FAST: tl.constexpr):
    """Standard Gumbel noise of int32 token ids, float32 or float64: -log(-log1p(-u))."""
    hashed = mix32(mix32((tokens.to(tl.uint32) * 0x9E3779B1) ^ first) ^ second)
    if FP64:
        # 1 - u is exact in float64, so log needs no log1p.
        unit = (hashed.to(tl.float64) + 0.5) * 2.3283064365386963e-10
        return -tl.log(-tl.log(1.0 - unit))
    else:
        return -natural_log(minus_log1p_minus(open_unit(hashed), FAST), FAST)
