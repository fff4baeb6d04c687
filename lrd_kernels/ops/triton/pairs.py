"""Numbers of about 48 bits as unevaluated sums (hi, lo) of two float32 numbers: most GPUs are slow in float64.

Kernels that use these must be launched with `enable_fp_fusion=False`, so that what has to be rounded is rounded.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lrd_kernels import _policy
from lrd_kernels.ops import dispatch

INTERPRETED = tl.constexpr(dispatch.triton_interprets())
LEAST, MOST = tl.constexpr(_policy.PAIR_LEAST), tl.constexpr(_policy.PAIR_MOST)


@triton.jit
def split(x):
    hi = x.to(tl.float32)
    return hi, (x - hi.to(tl.float64)).to(tl.float32)


@triton.jit
def wide(hi, lo):
    return hi.to(tl.float64) + lo.to(tl.float64)


@triton.jit
def two_sum(a, b):
    """a + b exactly."""
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


@triton.jit
def two_product(a, b):
    """a b exactly."""
    p = a * b
    if INTERPRETED:  # whose fma rounds twice
        rest = (a.to(tl.float64) * b.to(tl.float64) - p.to(tl.float64)).to(tl.float32)
    else:
        rest = tl.fma(a, b, -p)
    return p, rest


@triton.jit
def scaled(hi, lo, b):
    p, rest = two_product(hi, b)
    return p, tl.fma(lo, b, rest)


@triton.jit
def product(a_hi, a_lo, b_hi, b_lo):
    p, rest = two_product(a_hi, b_hi)
    return p, tl.fma(a_hi, b_lo, tl.fma(a_lo, b_hi, rest))


@triton.jit
def add(a_hi, a_lo, b_hi, b_lo):
    s, rest = two_sum(a_hi, b_hi)
    return s, a_lo + (rest + b_lo)


@triton.jit
def reciprocal(hi, lo):
    """1 / d to about 2^-46, for |d| between LEAST and MOST."""
    w = 1.0 / hi
    if not INTERPRETED:  # a quotient on a GPU errs by up to two units
        w = tl.fma(w, tl.fma(-hi, w, 1.0), w)
    if INTERPRETED:
        rest = (1.0 - hi.to(tl.float64) * w.to(tl.float64)).to(tl.float32)
    else:
        rest = tl.fma(-hi, w, 1.0)
    return w, w * tl.fma(-lo, w, rest)


@triton.jit
def exponential(x):
    """exp(x) to about 2^-28, x at most 80: 1 + r + r^2 (1/2 + ...) of the remainder r of a power of two. Only the last
    term is rounded to float32."""
    n = tl.floor(x * 1.442695041 + 0.5)
    n = tl.where(n > -200.0, tl.where(n < 128.0, n, 128.0), -200.0)  # as an integer; NaN stays NaN by its remainder
    hi, lo = two_sum(tl.fma(n, -0.693145752, x), n * -1.42860682e-6)  # ln 2: 16 bits, and the rest
    tail = tl.fma(hi, 1.0 / 5040.0, 1.0 / 720.0)
    tail = tl.fma(hi, tail, 1.0 / 120.0)
    tail = tl.fma(hi, tail, 1.0 / 24.0)
    tail = tl.fma(hi, tail, 1.0 / 6.0)
    tail = tl.fma(hi, tail, 0.5)
    tail = tl.fma(hi * hi, tail, tl.fma(hi, lo, lo))
    one, rest = two_sum(hi * 0.0 + 1.0, hi)
    s, rest = two_sum(one, rest + tail)
    power = tl.where(n < -126.0, 0.0, ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True))
    return s * power, rest * power


@triton.jit
def is_ordinary(d):
    """Whether d and 1 / d are within the range of pairs. Items with other diagonal entries are done in float64."""
    return (d >= LEAST) & (d <= MOST)


@triton.jit
def times_mantissa(hi, lo, exponents, d):
    """Adds d to a sum of logarithms: a product of mantissas within [1 / sqrt 2, sqrt 2), and a sum of exponents. After
    at most 128 numbers the product must be brought back to this range, by `renormalised`."""
    bits = d.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23
    hi, lo = scaled(hi, lo, (bits - (exponent << 23)).to(tl.float32, bitcast=True))
    return hi, lo, exponents + exponent


@triton.jit
def renormalised(hi, lo, exponents):
    exponent = (hi.to(tl.int32, bitcast=True) - 0x3F3504F3) >> 23
    power = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    return hi * power, lo * power, exponents + exponent


@triton.jit
def _multiply(a, b):
    return a * b


@triton.jit
def multiply_all(x):
    """The product of the numbers of a tensor [n]."""
    if INTERPRETED:  # whose reductions by other functions than sums are slow
        found = tl.exp(tl.sum(tl.log(x), 0))
    else:
        found = tl.reduce(x, 0, _multiply)
    return found


@triton.jit
def add_columns(hi, lo):
    """Sums of pairs [n, m] over the columns."""
    if INTERPRETED:
        hi, lo = split(tl.sum(wide(hi, lo), 1))
    else:
        hi, lo = tl.reduce((hi, lo), 1, add)
    return hi, lo
