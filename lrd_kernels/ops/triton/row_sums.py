"""The Gram pass of ranks up to 16, with one value at most. Every row has a thread, which adds the row's half of G and
its u to sums in registers: in float32; or up to rank 8 to the quality of float64, as pairs of float32 or, where float64
is fast, in float64."""

from __future__ import annotations

import triton
import triton.language as tl

from lrd_kernels._policy import FLUSH_ROWS
from lrd_kernels.ops.triton import pairs
from lrd_kernels.ops.triton.pairs import wide
from lrd_kernels.ops.triton.rows import load_columns, load_scalars

# Rows of a thread. Their sums are added to those of the other threads as a tree, of at most ten levels.
TURNS = FLUSH_ROWS // 2
# Of a slot: quad; of the logarithms, the product of mantissas, the sum of exponents and the rest; whether a D is odd.
SCALARS = tl.constexpr(5)
IN_FLOAT32, IN_PAIRS, IN_FLOAT64 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # how they are summed
NOT_SPECIALISED = ["S", "R", "per_factor", "splits", "rows_per_split", "factor_b", "factor_s", "factor_r"]
NOT_SPECIALISED += [f"{vector}_{of}" for vector in ("diag", "value", "loc", "mask") for of in "bs"]


@triton.jit
def store_scalars(slot, quad_hi, quad_lo, hi, lo, exponents, rest, odd):
    tl.store(slot, tl.sum(wide(quad_hi, quad_lo), 0))
    tl.store(slot + 1, pairs.multiply_all(wide(hi, lo)))
    tl.store(slot + 2, tl.sum(exponents, 0).to(tl.float64))
    tl.store(slot + 3, tl.sum(rest, 0).to(tl.float64))
    tl.store(slot + 4, tl.max(odd, 0).to(tl.float64))


@triton.jit
def add_product(hi, lo, a_hi, a_lo, b, SUMS: tl.constexpr):
    if SUMS == IN_PAIRS:
        hi, lo = pairs.add(hi, lo, *pairs.scaled(a_hi, a_lo, b))
    else:
        hi = tl.fma(a_hi, b, hi)
    return hi, lo


@triton.jit
def _add_row(own, low, x, w_hi, w_lo, wr_hi, wr_lo, WIDTH: tl.constexpr, SUMS: tl.constexpr):
    """The sums with the products of a row added."""
    HALF: tl.constexpr = WIDTH * (WIDTH + 1) // 2
    added, rest = (), ()
    if SUMS == IN_FLOAT64:
        doubles = ()
        for i in tl.static_range(WIDTH):
            doubles = doubles + (x[i].to(tl.float64),)
        w, wr = wide(w_hi, w_lo), wide(wr_hi, wr_lo)
    for i in tl.static_range(WIDTH):
        if SUMS == IN_FLOAT64:
            left, left_low = w * doubles[i], wr_lo
        elif SUMS == IN_PAIRS:
            left, left_low = pairs.scaled(w_hi, w_lo, x[i])
        else:
            left, left_low = w_hi * x[i], wr_lo
        for j in tl.static_range(i + 1):
            if SUMS == IN_FLOAT64:
                hi, lo = add_product(
                    own[i * (i + 1) // 2 + j], low[i * (i + 1) // 2 + j], left, left_low, doubles[j], SUMS
                )
            else:
                hi, lo = add_product(own[i * (i + 1) // 2 + j], low[i * (i + 1) // 2 + j], left, left_low, x[j], SUMS)
            added, rest = added + (hi,), rest + (lo,)
    for i in tl.static_range(WIDTH):
        if SUMS == IN_FLOAT64:
            hi, lo = add_product(own[HALF + i], low[HALF + i], wr, wr_lo, doubles[i], SUMS)
        else:
            hi, lo = add_product(own[HALF + i], low[HALF + i], wr_hi, wr_lo, x[i], SUMS)
        added, rest = added + (hi,), rest + (lo,)
    return added, rest


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def _row_sums_kernel(
    factor,
    diag,
    value,
    loc,
    mask,
    sums,
    scalars,
    tickets,
    S: tl.int64,
    R: tl.int64,
    per_factor: tl.int64,
    splits: tl.int64,
    rows_per_split: tl.int64,
    factor_b: tl.int64,
    factor_s: tl.int64,
    factor_r: tl.int64,
    diag_b: tl.int64,
    diag_s: tl.int64,
    value_b: tl.int64,
    value_s: tl.int64,
    loc_b: tl.int64,
    loc_s: tl.int64,
    mask_b: tl.int64,
    mask_s: tl.int64,
    eps_hi,
    eps_lo,
    limit,
    SUMS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    VECTOR: tl.constexpr,
    RANK_MAJOR: tl.constexpr,
    UNIT: tl.constexpr,
    HAS_VALUE: tl.constexpr,
    HAS_LOC: tl.constexpr,
    HAS_MASK: tl.constexpr,
    EXP: tl.constexpr,
):
    """Program (split, b), with a thread for each of ROWS rows. Slots of `sums`: half of G, then u."""
    HALF: tl.constexpr = WIDTH * (WIDTH + 1) // 2
    pid = tl.program_id(0).to(tl.int64)
    split, b = pid % splits, pid // splits
    if split == 0:
        tl.store(tickets + 2 * b, 0)
        tl.store(tickets + 2 * b + 1, 0)
    factor += b // per_factor * factor_b
    diag += b * diag_b
    value += b * value_b
    loc += b * loc_b
    mask += b * mask_b
    zero = tl.zeros([ROWS], tl.float32)
    own, low = (), ()  # sums, or the upper and the lower halves of pairs
    for _ in tl.static_range(HALF + WIDTH):
        own = own + (zero.to(tl.float64) if SUMS == IN_FLOAT64 else zero,)
        low = low + (zero,)
    quad_hi, quad_lo, log_hi, log_lo, rest = zero, zero, zero + 1.0, zero, zero
    exponents = tl.zeros([ROWS], tl.int32)
    odd = tl.zeros([ROWS], tl.int32)
    begin = split * rows_per_split
    end = tl.minimum(begin + rows_per_split, S)
    for start in range(begin, end, ROWS):
        rows = start + tl.arange(0, ROWS).to(tl.int64)
        present, d_hi, d_lo, _slope, r_hi, r_lo = load_scalars(
            diag, value, loc, mask, rows, rows < end, diag_s, value_s, loc_s, mask_s, eps_hi, eps_lo, limit,
            UNIT, HAS_VALUE, HAS_LOC, HAS_MASK, EXP,
        )  # fmt: skip
        x = load_columns(factor, rows, present, factor_s, factor_r, R, WIDTH, VECTOR, RANK_MAJOR)
        w_hi, w_lo = pairs.reciprocal(d_hi, d_lo)
        odd = odd | tl.where(pairs.is_ordinary(d_hi), 0, 1)
        log_hi, log_lo, exponents = pairs.times_mantissa(log_hi, log_lo, exponents, d_hi)
        rest = tl.fma(d_lo, w_hi, rest)
        wr_hi, wr_lo = pairs.product(w_hi, w_lo, r_hi, r_lo)
        square_hi, square_lo = pairs.product(wr_hi, wr_lo, r_hi, r_lo)
        quad_hi, quad_lo = pairs.add(quad_hi, quad_lo, square_hi, square_lo)
        own, low = _add_row(own, low, x, w_hi, w_lo, wr_hi, wr_lo, WIDTH, SUMS)
    log_hi, log_lo, exponents = pairs.renormalised(log_hi, log_lo, exponents)
    for e in tl.static_range(HALF + WIDTH):
        if SUMS == IN_PAIRS:
            total = tl.sum(wide(own[e], low[e]), 0)
        else:
            total = tl.sum(own[e], 0)
        tl.store(sums + pid * (HALF + WIDTH) + e, total)
    store_scalars(scalars + pid * SCALARS, quad_hi, quad_lo, log_hi, log_lo, exponents, rest, odd)
