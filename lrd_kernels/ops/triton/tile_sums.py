"""The Gram pass of ranks 17 to 64, with one value at most: float32 products of blocks of rows, which are added in
float64 after every 128 rows."""

from __future__ import annotations

import triton
import triton.language as tl

from lrd_kernels import _policy
from lrd_kernels.ops.triton import pairs
from lrd_kernels.ops.triton.row_sums import NOT_SPECIALISED, SCALARS, store_scalars
from lrd_kernels.ops.triton.rows import load_block, load_scalars

FLUSH_ROWS = tl.constexpr(_policy.FLUSH_ROWS)


@triton.jit
def store_half(slot, products, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """The lower half of a matrix by rows: of its first WIDTH columns."""
    i = tl.arange(0, TILE)[:, None]
    j = tl.arange(0, TILE)[None, :]
    tl.store(slot + i * (i + 1) // 2 + j, products, mask=(j <= i) & (i < WIDTH))


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def _tile_sums_kernel(
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
    PRECISION: tl.constexpr,
    BLOCK_S: tl.constexpr,
    WIDTH: tl.constexpr,
    VECTOR: tl.constexpr,
    RANK_MAJOR: tl.constexpr,
    ROW_MAJOR: tl.constexpr,
    UNIT: tl.constexpr,
    HAS_VALUE: tl.constexpr,
    HAS_LOC: tl.constexpr,
    HAS_MASK: tl.constexpr,
    EXP: tl.constexpr,
):
    """Program (split, b). Slots of `sums` are float64: half of G, then u."""
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
    zero = tl.zeros([BLOCK_S], tl.float32)
    quad_hi, quad_lo, log_hi, log_lo, rest = zero, zero, zero + 1.0, zero, zero
    exponents = tl.zeros([BLOCK_S], tl.int32)
    odd = tl.zeros([BLOCK_S], tl.int32)
    products = tl.zeros([WIDTH, WIDTH], tl.float64)
    projected = tl.zeros([WIDTH], tl.float64)
    begin = split * rows_per_split
    end = tl.minimum(begin + rows_per_split, S)
    for span in range(begin, end, FLUSH_ROWS):
        own = tl.zeros([WIDTH, WIDTH], tl.float32)
        own_u = tl.zeros([BLOCK_S, WIDTH], tl.float32)
        for start in range(span, tl.minimum(span + FLUSH_ROWS, end), BLOCK_S):
            rows = start + tl.arange(0, BLOCK_S).to(tl.int64)
            present, d_hi, d_lo, _slope, r_hi, r_lo = load_scalars(
                diag, value, loc, mask, rows, rows < end, diag_s, value_s, loc_s, mask_s, eps_hi, eps_lo, limit,
                UNIT, HAS_VALUE, HAS_LOC, HAS_MASK, EXP,
            )  # fmt: skip
            P = load_block(factor, rows, present, factor_s, factor_r, R, WIDTH, VECTOR, RANK_MAJOR, ROW_MAJOR)
            w_hi, w_lo = pairs.reciprocal(d_hi, d_lo)
            odd = odd | tl.where(pairs.is_ordinary(d_hi), 0, 1)
            log_hi, log_lo, exponents = pairs.times_mantissa(log_hi, log_lo, exponents, d_hi)
            rest = tl.fma(d_lo, w_hi, rest)
            own = tl.dot(tl.trans(P * w_hi[:, None]), P, own, input_precision=PRECISION)
            if HAS_VALUE:
                wr_hi, wr_lo = pairs.product(w_hi, w_lo, r_hi, r_lo)
                square_hi, square_lo = pairs.product(wr_hi, wr_lo, r_hi, r_lo)
                quad_hi, quad_lo = pairs.add(quad_hi, quad_lo, square_hi, square_lo)
                own_u = tl.fma(P, wr_hi[:, None] + tl.zeros([BLOCK_S, WIDTH], tl.float32), own_u)
        products += own.to(tl.float64)
        projected += tl.sum(own_u, 0).to(tl.float64)
        log_hi, log_lo, exponents = pairs.renormalised(log_hi, log_lo, exponents)
    slot = sums + pid * (HALF + WIDTH)
    store_half(slot, products, WIDTH, WIDTH)
    tl.store(slot + HALF + tl.arange(0, WIDTH), projected)
    store_scalars(scalars + pid * SCALARS, quad_hi, quad_lo, log_hi, log_lo, exponents, rest, odd)
