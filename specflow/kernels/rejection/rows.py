"""Reading logits inside kernels, by one rule for NaN and infinities."""

# mypy: ignore-errors
# Bodies below are Triton's language, which only looks like typed Python.

import triton
import triton.language as tl
from triton.language.extra import libdevice

from specflow.kernels.rejection.device_noise import natural_log

# What the last token is drawn from.
DONE = tl.constexpr(0)  # nothing to draw: the token is known
PLAIN = tl.constexpr(1)  # p: the bonus token, a placeholder, or a draft law that is not a law
ONE_HOT = tl.constexpr(2)  # p without the rejected draft
RESIDUAL = tl.constexpr(3)  # [p - q]+

NO_TOKEN = tl.constexpr(2147483647)  # past every id


@triton.jit
def clean_target(raw, inverse_temperature, SCALE: tl.constexpr):
    """Float32 logits; NaN becomes -inf, since it could win a maximum, and -inf never does beside a finite logit."""
    logits = raw.to(tl.float32)
    if SCALE:
        logits = logits * inverse_temperature
    return tl.where(logits > float("-inf"), logits, float("-inf"))


@triton.jit
def load_target(row_ptr, tokens, inverse_temperature, V: tl.constexpr, SCALE: tl.constexpr):
    """Float32 logits of some ids; NaN and ids outside [0, V) become -inf.

    +inf stands for the largest finite value: callers with many ids cap what they derive from them, not every one.
    """
    raw = tl.load(row_ptr + tokens, mask=(tokens >= 0) & (tokens < V), other=float("-inf"))
    return clean_target(raw, inverse_temperature, SCALE)


@triton.jit
def inverse_of(temperature):
    """1 / temperature, and 1 for greedy requests, whose order no scale changes."""
    return 1.0 / tl.where(temperature == 0, 1.0, temperature)


@triton.jit
def natural_exp(value, FAST: tl.constexpr):
    """Exponential of a float32; FAST flushes results below 1e-38 to 0."""
    if FAST:
        return libdevice.fast_expf(value)
    else:
        return tl.exp(value)


@triton.jit
def finite(top):
    """A maximum to subtract: 0 in place of -inf."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def residual_masses(values, scores, norm_p, norm_q, top, FAST: tl.constexpr):
    """[p - q]+ over exp(top - norm_p), from logits of p and of q; top is p's maximum thereabouts, may be -inf.

    No less exact than the difference of logs: its error, too, is the rounding of one exponential.
    """
    shift = finite(top)
    p = natural_exp(values - shift, FAST)
    return tl.maximum(p - natural_exp(scores - (norm_q - (norm_p - shift)), FAST), 0.0)


@triton.jit
def log_mass(values, FAST: tl.constexpr):
    """Log of the sum of exponentials of one chunk, -inf where it has no mass."""
    top = tl.max(values)
    return top + natural_log(tl.maximum(tl.sum(natural_exp(values - finite(top), FAST)), 1.0), FAST)
