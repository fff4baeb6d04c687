"""The second pass, for the items that the certificate rejects: the sums in float64, or over the residuals r - P z. Also
the only pass of precision "float64". The last program of an item does the R-sized algebra."""

from __future__ import annotations

import triton
import triton.language as tl

from lrd_kernels.ops.triton import pairs
from lrd_kernels.ops.triton.algebra import (
    IN_FLOAT64,
    NOTHING,
    add_scalars,
    add_slots,
    factorise,
    is_last,
    refine,
    settle,
)
from lrd_kernels.ops.triton.common import find_present, load_diag, load_rows, load_tile, operand
from lrd_kernels.ops.triton.pairs import two_sum
from lrd_kernels.ops.triton.row_sums import NOT_SPECIALISED, SCALARS
from lrd_kernels.ops.triton.rows import load_block, load_scalars
from lrd_kernels.ops.triton.tile_sums import store_half

TURNS = tl.constexpr(64)  # blocks of rows whose products are added in float32


@triton.jit(do_not_specialize=["B"])
def _reset_kernel(tickets, B: tl.int64, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    tl.store(tickets + at, tl.zeros([BLOCK], tl.int32), mask=at < 2 * B)


@triton.jit
def _sum_float64(
    factor, diag, value, loc, mask, slot, scalars, begin, end, R, factor_s, factor_r, diag_s, value_s, loc_s, mask_s,
    eps, once,
    BLOCK_S: tl.constexpr, WIDTH: tl.constexpr, HAS_VALUE: tl.constexpr, HAS_LOC: tl.constexpr,
    HAS_MASK: tl.constexpr, EXP: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = WIDTH * (WIDTH + 1) // 2
    TILE: tl.constexpr = 16 if WIDTH < 16 else WIDTH  # the least of a product on tensor cores
    columns = tl.arange(0, TILE).to(tl.int64)
    products = tl.zeros([TILE, TILE], tl.float64)
    projected = tl.zeros([TILE], tl.float64)
    squares = tl.zeros([BLOCK_S], tl.float64)
    logs = tl.zeros([BLOCK_S], tl.float64)
    for start in range(begin, end, BLOCK_S):
        rows = start + tl.arange(0, BLOCK_S).to(tl.int64)
        present = find_present(mask, rows, mask_s, rows < end, HAS_MASK)
        d, w, _ = load_diag(diag, rows, diag_s, present, eps, EXP, LIMIT)
        logs += tl.where((d > 0) & (d < float("inf")), tl.log(d), float("nan"))
        P = load_tile(factor, rows, columns, factor_s, factor_r, present, R).to(tl.float64)
        weighted, Q = operand(P * w[:, None], once, tl.float64), operand(P, once, tl.float64)
        products += tl.dot(tl.trans(weighted), Q, input_precision="ieee", out_dtype=tl.float64)
        if HAS_VALUE:
            r = load_rows(value, rows, value_s, present)
            if HAS_LOC:
                r -= load_rows(loc, rows, loc_s, present)
            projected += tl.sum(P * (w * r)[:, None], 0)
            squares += w * r * r
    store_half(slot, products, WIDTH, TILE)
    tl.store(slot + HALF + tl.arange(0, TILE), projected, mask=tl.arange(0, TILE) < WIDTH)
    tl.store(scalars, tl.sum(squares, 0))
    tl.store(scalars + 1, tl.full([], 1.0, tl.float64))
    tl.store(scalars + 2, tl.full([], 0.0, tl.float64))
    tl.store(scalars + 3, tl.sum(logs, 0))
    tl.store(scalars + 4, tl.full([], 0.0, tl.float64))


@triton.jit
def _sum_residuals(
    factor, diag, value, loc, mask, z, slot, scalars, begin, end, R, factor_s, factor_r, diag_s, value_s, loc_s, mask_s,
    eps_hi, eps_lo, limit,
    BLOCK_S: tl.constexpr, WIDTH: tl.constexpr, VECTOR: tl.constexpr, RANK_MAJOR: tl.constexpr,
    ROW_MAJOR: tl.constexpr, UNIT: tl.constexpr, HAS_LOC: tl.constexpr, HAS_MASK: tl.constexpr, EXP: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = WIDTH * (WIDTH + 1) // 2
    columns = tl.arange(0, WIDTH)
    z_hi, z_lo = pairs.split(tl.load(z + columns, mask=columns < R, other=0.0))
    everywhere = tl.zeros([BLOCK_S, WIDTH], tl.float32)
    z_hi, z_lo = everywhere - z_hi[None, :], everywhere - z_lo[None, :]
    projected = tl.zeros([WIDTH], tl.float64)
    squares = tl.zeros([BLOCK_S], tl.float64)
    for span in range(begin, end, TURNS * BLOCK_S):
        quad_hi = tl.zeros([BLOCK_S], tl.float32)
        quad_lo = quad_hi
        own = everywhere
        for start in range(span, tl.minimum(span + TURNS * BLOCK_S, end), BLOCK_S):
            rows = start + tl.arange(0, BLOCK_S).to(tl.int64)
            present, d_hi, d_lo, _slope, r_hi, r_lo = load_scalars(
                diag, value, loc, mask, rows, rows < end, diag_s, value_s, loc_s, mask_s, eps_hi, eps_lo, limit,
                UNIT, True, HAS_LOC, HAS_MASK, EXP,
            )  # fmt: skip
            P = load_block(factor, rows, present, factor_s, factor_r, R, WIDTH, VECTOR, RANK_MAJOR, ROW_MAJOR)
            along_hi, along_lo = pairs.add_columns(*pairs.scaled(z_hi, z_lo, P))
            r_hi, r_lo = two_sum(*pairs.add(along_hi, along_lo, r_hi, r_lo))  # which has cancelled: r_lo is small again
            w_hi, w_lo = pairs.reciprocal(d_hi, d_lo)
            wr_hi, wr_lo = pairs.product(w_hi, w_lo, r_hi, r_lo)
            square_hi, square_lo = pairs.product(wr_hi, wr_lo, r_hi, r_lo)
            quad_hi, quad_lo = pairs.add(quad_hi, quad_lo, square_hi, square_lo)
            own = tl.fma(P, everywhere + wr_hi[:, None], own)
        projected += tl.sum(own, 0).to(tl.float64)
        squares += pairs.wide(quad_hi, quad_lo)
    tl.store(slot + HALF + columns, projected)
    tl.store(scalars, tl.sum(squares, 0))


@triton.jit(do_not_specialize=[*NOT_SPECIALISED, "once"])
def _again_kernel(
    factor,
    diag,
    value,
    loc,
    mask,
    sums,
    scalars,
    totals,
    tickets,
    again,
    chol_inv,
    summary,
    z,
    value_info,
    result,
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
    once,
    eps_hi,
    eps_lo,
    limit,
    eps: tl.float64,
    of_maha: tl.float64,
    of_logdet: tl.float64,
    constant: tl.float64,
    BLOCK_S: tl.constexpr,
    BLOCK_S64: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    VECTOR: tl.constexpr,
    RANK_MAJOR: tl.constexpr,
    ROW_MAJOR: tl.constexpr,
    UNIT: tl.constexpr,
    HAS_VALUE: tl.constexpr,
    HAS_LOC: tl.constexpr,
    HAS_MASK: tl.constexpr,
    EXP: tl.constexpr,
    LIMIT: tl.constexpr,
    EVERY: tl.constexpr,
):
    """Program (split, b). With EVERY, all items are summed in float64, without a pass before."""
    HALF: tl.constexpr = WIDTH * (WIDTH + 1) // 2
    CHUNK: tl.constexpr = 32
    pid = tl.program_id(0).to(tl.int64)
    split, b = pid % splits, pid // splits
    if EVERY:
        kind = b.to(tl.int32) * 0 + IN_FLOAT64
    else:
        kind = tl.load(again + b)
    if kind == NOTHING:
        return
    factor += b // per_factor * factor_b
    diag += b * diag_b
    value += b * value_b
    loc += b * loc_b
    mask += b * mask_b
    chol_inv += b * R * R
    summary += 2 * b
    z += b * R
    totals += b * (HALF + WIDTH)
    slot, own = sums + pid * (HALF + WIDTH), scalars + pid * SCALARS
    begin = split * rows_per_split
    end = tl.minimum(begin + rows_per_split, S)
    if kind == IN_FLOAT64:
        _sum_float64(
            factor, diag, value, loc, mask, slot, own, begin, end, R, factor_s, factor_r, diag_s, value_s, loc_s,
            mask_s, eps, once, BLOCK_S64, WIDTH, HAS_VALUE, HAS_LOC, HAS_MASK, EXP, LIMIT,
        )  # fmt: skip
    elif HAS_VALUE and not EVERY:
        _sum_residuals(
            factor, diag, value, loc, mask, z, slot, own, begin, end, R, factor_s, factor_r, diag_s, value_s, loc_s,
            mask_s, eps_hi, eps_lo, limit, BLOCK_S, WIDTH, VECTOR, RANK_MAJOR, ROW_MAJOR, UNIT, HAS_LOC, HAS_MASK, EXP,
        )  # fmt: skip
    if is_last(tickets + 2 * b + 1, splits):
        first = tl.where(kind == IN_FLOAT64, 0, HALF)
        for number in range(first, HALF + WIDTH, CHUNK):
            numbers = number + tl.arange(0, CHUNK).to(tl.int64)
            add_slots(sums + b * splits * (HALF + WIDTH), totals, numbers, splits, WIDTH, SLOTS)
        tl.debug_barrier()
        own = scalars + b * splits * SCALARS
        if kind == IN_FLOAT64:
            quad, log_diag, _ = add_scalars(own, splits, SLOTS)
            growth, logdet, M, _ = factorise(totals, quad, log_diag, chol_inv, summary, z, R, WIDTH, HAS_VALUE)
            settle(growth, logdet, M, result + b, value_info + b, of_maha, of_logdet, constant, HAS_VALUE)
        elif HAS_VALUE and not EVERY:
            quads = tl.zeros([SLOTS], tl.float64)
            for at in range(0, splits, SLOTS):
                slots = at + tl.arange(0, SLOTS).to(tl.int64)
                quads += tl.load(own + slots * SCALARS, mask=slots < splits, other=0.0, cache_modifier=".cg")
            M = refine(totals, tl.sum(quads, 0), chol_inv, z, R, WIDTH)
            growth, logdet = tl.load(summary), tl.load(summary + 1)
            settle(growth, logdet, M, result + b, value_info + b, of_maha, of_logdet, constant, HAS_VALUE)
