"""What one program does of the R-sized algebra of an item, in float64: C = I + G, its factor's inverse, z = C^-1 u, M,
log det Sigma, growth, the certificate and the result. Matrices are padded to WIDTH columns, with zeros in G."""

from __future__ import annotations

import triton
import triton.language as tl

from lrd_kernels import _policy
from lrd_kernels.ops.triton.common import narrowed
from lrd_kernels.ops.triton.pairs import INTERPRETED
from lrd_kernels.ops.triton.row_sums import SCALARS

FLOAT32_GROWTH = tl.constexpr(_policy.FLOAT32_GROWTH)
FLOAT32_SUM_ERROR = tl.constexpr(_policy.FLOAT32_SUM_ERROR)
QUAD_ERROR = tl.constexpr(_policy.QUAD_ERROR)
PAIR_SUM_ERROR = tl.constexpr(_policy.PAIR_SUM_ERROR)
TOLERANCE = tl.constexpr(_policy.TOLERANCE)
LOG_2PI = tl.constexpr(_policy.LOG_2PI)
LN2 = tl.constexpr(0.6931471805599453)
# What is done again of an item: nothing; everything, in float64; or M and z, from the residuals r - P z.
NOTHING, IN_FLOAT64, BY_RESIDUALS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def is_finite(x):
    return tl.abs(x) < float("inf")


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def _pick(matrix, wanted, AXIS: tl.constexpr):
    """The one number along an axis at which `wanted` is set; its bits, which needs no arithmetic in float64."""
    if INTERPRETED:
        found = tl.sum(tl.where(wanted, matrix, 0.0), AXIS)
    else:
        bits = tl.where(wanted, matrix.to(tl.int64, bitcast=True), 0)
        found = tl.reduce(bits, AXIS, _either).to(tl.float64, bitcast=True)
    return found


@triton.jit
def invert_factor(gram, R, WIDTH: tl.constexpr):
    """L^-1 of C = I + G = L L^T, and log det C. With C = M^-1 diag(d) M^-T, step k subtracts multiples of row k from
    the rows below it, in C and in M, whose columns take the place of those of C that are done."""
    i = tl.arange(0, WIDTH)[:, None]
    j = tl.arange(0, WIDTH)[None, :]
    both = gram + tl.where(i == j, 1.0, 0.0)
    pivots = tl.zeros([WIDTH], tl.float64) + 1.0
    at = tl.arange(0, WIDTH)
    for k in range(0, R):
        row = _pick(both, i == k, 0)
        column = _pick(both, j == k, 1)
        pivot = tl.sum(tl.where(at == k, row, 0.0), 0)
        # C is at least the identity, so every exact pivot is at least 1: a smaller one is rounding
        pivot = tl.where(pivot < 1.0, 1.0, pivot)
        pivot = tl.where(is_finite(pivot), pivot, float("nan"))
        pivots = tl.where(at == k, pivot, pivots)
        factor = tl.where(i > k, column[:, None] / pivot, 0.0)
        both = tl.where((j == k) & (i > k), 0.0, both) - factor * tl.where(j == k, 1.0, row[None, :])
    scale = (1.0 / tl.sqrt(pivots))[:, None]
    inverse = tl.where(j < i, both * scale, tl.where(i == j, scale, 0.0))
    return inverse, tl.sum(tl.log(pivots), 0)


@triton.jit
def _load_gram(totals, WIDTH: tl.constexpr):
    i = tl.arange(0, WIDTH)[:, None]
    j = tl.arange(0, WIDTH)[None, :]
    low, high = tl.minimum(i, j), tl.maximum(i, j)
    return tl.load(totals + high * (high + 1) // 2 + low, cache_modifier=".cg")


@triton.jit
def _store_matrix(to, matrix, R, WIDTH: tl.constexpr):
    i = tl.arange(0, WIDTH)[:, None]
    j = tl.arange(0, WIDTH)[None, :]
    tl.store(to + i * R + j, matrix, mask=(i < R) & (j < R))


@triton.jit
def add_slots(sums, totals, numbers, splits, WIDTH: tl.constexpr, SLOTS: tl.constexpr):
    """Numbers of an item's sums: added over its slots, in their order."""
    ALL: tl.constexpr = WIDTH * (WIDTH + 1) // 2 + WIDTH
    wanted = numbers < ALL
    total = tl.zeros([SLOTS, numbers.shape[0]], tl.float64)
    for first in range(0, splits, SLOTS):
        slots = first + tl.arange(0, SLOTS).to(tl.int64)
        where = slots[:, None] * ALL + numbers[None, :]
        there = (slots < splits)[:, None] & wanted[None, :]
        total += tl.load(sums + where, mask=there, other=0.0, cache_modifier=".cg").to(tl.float64)
    tl.store(totals + numbers, tl.sum(total, 0), mask=wanted)


@triton.jit
def add_scalars(scalars, splits, SLOTS: tl.constexpr):
    """quad, sum log D, and whether a D is not ordinary."""
    quads = tl.zeros([SLOTS], tl.float64)
    logs = tl.zeros([SLOTS], tl.float64)
    odd = tl.zeros([SLOTS], tl.float64)
    for first in range(0, splits, SLOTS):
        slots = first + tl.arange(0, SLOTS).to(tl.int64)
        own, there = scalars + slots * SCALARS, slots < splits
        quads += tl.load(own, mask=there, other=0.0, cache_modifier=".cg")
        mantissa = tl.load(own + 1, mask=there, other=1.0, cache_modifier=".cg")
        exponents = tl.load(own + 2, mask=there, other=0.0, cache_modifier=".cg")
        rest = tl.load(own + 3, mask=there, other=0.0, cache_modifier=".cg")
        logs += tl.log(mantissa) + (exponents * tl.full([], LN2, tl.float64) + rest)
        odd += tl.load(own + 4, mask=there, other=0.0, cache_modifier=".cg")
    return tl.sum(quads, 0), tl.sum(logs, 0), tl.sum(odd, 0) > 0


@triton.jit
def is_last(ticket, programs):
    """Whether this program is the last one of `programs` to come here. It sees what the others have written before."""
    tl.debug_barrier()  # what the threads of this program have written comes before
    arrived = tl.atomic_add(ticket, 1, sem="acq_rel")
    tl.debug_barrier()
    return arrived == programs - 1


@triton.jit
def factorise(totals, quad, log_diag, chol_inv, summary, z, R, WIDTH: tl.constexpr, HAS_VALUE: tl.constexpr):
    """From the sums of an item: stores L^-1, the summary and z; L^-1 and z of an item that failed are 0. Returns the
    growth, log det Sigma, M, and the sum of z_j^2 G_jj."""
    HALF: tl.constexpr = WIDTH * (WIDTH + 1) // 2
    at = tl.arange(0, WIDTH)
    gram = _load_gram(totals, WIDTH)
    diagonal = tl.load(totals + at * (at + 1) // 2 + at, cache_modifier=".cg")
    inverse, logs = invert_factor(gram, R, WIDTH)
    logdet = log_diag + logs
    growths = tl.sum(inverse * inverse * diagonal[None, :], 1)
    good = (tl.sum(tl.where(is_finite(growths), 0, 1), 0) == 0) & is_finite(logdet)
    growth = tl.where(good, tl.maximum(tl.max(growths, 0), 1.0), float("inf"))
    M, weighted = quad, quad * 0.0
    if HAS_VALUE:
        u = tl.load(totals + HALF + at, cache_modifier=".cg")
        y = tl.sum(inverse * u[None, :], 1)
        own = tl.sum(inverse * y[:, None], 0)
        M = quad - tl.sum(y * y, 0)
        weighted = tl.sum(own * own * diagonal, 0)
        tl.store(z + at, tl.where(good & is_finite(M), own, 0.0), mask=at < R)
    _store_matrix(chol_inv, tl.where(good, inverse, 0.0), R, WIDTH)
    tl.store(summary, growth)
    tl.store(summary + 1, logdet)
    return growth, logdet, M, weighted


@triton.jit
def refine(totals, quad, chol_inv, z, R, WIDTH: tl.constexpr):
    """z, stored, and M, from sums over the residuals r - P z of the z before: z minimises
    |sqrt(w) (r - P z)|^2 + |z|^2, so the step is small, and the correction of M quadratic in it."""
    HALF: tl.constexpr = WIDTH * (WIDTH + 1) // 2
    at = tl.arange(0, WIDTH)
    i, j = at[:, None], at[None, :]
    inverse = tl.load(chol_inv + i * R + j, mask=(i < R) & (j < R), other=0.0)
    before = tl.load(z + at, mask=at < R, other=0.0)
    u = tl.load(totals + HALF + at, cache_modifier=".cg")
    y = tl.sum(inverse * (u - before)[None, :], 1)
    step = tl.sum(inverse * y[:, None], 0)
    M = quad + (tl.sum(before * before, 0) - tl.sum(y * y, 0))
    tl.debug_barrier()  # all threads have read z
    tl.store(z + at, tl.where(is_finite(M), before + step, 0.0), mask=at < R)
    return M


@triton.jit
def judge(growth, logdet, M, weighted, quad, odd, S, sum_error, HAS_VALUE: tl.constexpr, BY_CERTIFICATE: tl.constexpr):
    """What sums of a relative error leave to be done again of an item."""
    again = tl.where(odd, IN_FLOAT64, NOTHING)
    if BY_CERTIFICATE:
        if HAS_VALUE:
            error = (weighted + 2.0 * tl.sqrt(weighted * quad) + quad * QUAD_ERROR) * sum_error
            error += quad * PAIR_SUM_ERROR
            density = 0.5 * tl.abs(M + logdet + S.to(tl.float64) * tl.full([], LOG_2PI, tl.float64))
            fine = (error <= M * TOLERANCE) & (error <= density * TOLERANCE)
            again = tl.where((again == NOTHING) & (fine == 0), BY_RESIDUALS, again)
        again = tl.where(growth * sum_error <= FLOAT32_GROWTH * FLOAT32_SUM_ERROR, again, IN_FLOAT64)
    return again


@triton.jit
def settle(growth, logdet, M, result, value_info, of_maha, of_logdet, constant, HAS_VALUE: tl.constexpr):
    """The result. What is not finite has failed, and is NaN."""
    failed = is_finite(growth) == 0
    number = of_logdet * logdet + constant
    if HAS_VALUE:
        failed = failed | (is_finite(M) == 0)
        number += of_maha * tl.maximum(M, 0.0)  # a sum of squares: below zero it is rounding
        tl.store(value_info, failed.to(tl.int32))
    tl.store(result, narrowed(tl.where(failed, float("nan"), number), result))
