"""The backward pass of ranks 17 to 32, with one value at most, in float32 products of blocks of rows. The scalars of a
row are float32 or pairs."""

from __future__ import annotations

import triton
import triton.language as tl

from lrd_kernels.ops.triton import pairs
from lrd_kernels.ops.triton.row_grads import FLOAT32_GROWTH, HIGH_LEVERAGE, NOT_SPECIALISED, load_weights
from lrd_kernels.ops.triton.rows import load_block, load_scalars, store_block


@triton.jit(do_not_specialize=[name for name in NOT_SPECIALISED if name != "rows_per_block"])
def _tile_grads_kernel(
    factor,
    diag,
    value,
    loc,
    mask,
    chol_inv,
    summary,
    z,
    value_info,
    grad,
    flags,
    grad_factor,
    grad_diag,
    grad_loc,
    S: tl.int64,
    R: tl.int64,
    blocks: tl.int64,
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
    grad_b: tl.int64,
    out_b: tl.int64,
    out_s: tl.int64,
    out_r: tl.int64,
    eps_hi,
    eps_lo,
    limit,
    maha: tl.float64,
    logdet: tl.float64,
    PRECISION: tl.constexpr,
    BLOCK_S: tl.constexpr,
    WIDTH: tl.constexpr,
    VECTOR: tl.constexpr,
    RANK_MAJOR: tl.constexpr,
    ROW_MAJOR: tl.constexpr,
    UNIT: tl.constexpr,
    NEED_FACTOR: tl.constexpr,
    NEED_DIAG: tl.constexpr,
    NEED_LOC: tl.constexpr,
    NEED_LOGDET: tl.constexpr,
    CERTIFIED: tl.constexpr,
    HAS_VALUE: tl.constexpr,
    HAS_LOC: tl.constexpr,
    HAS_MASK: tl.constexpr,
    EXP: tl.constexpr,
):
    """Program (block of rows, b). Sets `flags` [B, blocks] as the kernel of small ranks does."""
    pid = tl.program_id(0).to(tl.int64)
    block, b = pid % blocks, pid // blocks
    factor += b * factor_b
    diag += b * diag_b
    value += b * value_b
    loc += b * loc_b
    mask += b * mask_b
    chol_inv += b * R * R
    z += b * R
    growth, good, of_maha, of_logdet = load_weights(
        summary + 2 * b, value_info + b, grad + b * grad_b, maha, logdet, HAS_VALUE
    )
    columns = tl.arange(0, WIDTH)
    everywhere = tl.zeros([BLOCK_S, WIDTH], tl.float32)
    rows = block * BLOCK_S + tl.arange(0, BLOCK_S).to(tl.int64)
    inside = rows < S
    readable = tl.where(good, S, 0)  # the gradients of items that failed are zero
    present, d_hi, d_lo, slope, r_hi, r_lo = load_scalars(
        diag, value, loc, mask, rows, rows < readable, diag_s, value_s, loc_s, mask_s, eps_hi, eps_lo, limit,
        UNIT, HAS_VALUE, HAS_LOC, HAS_MASK, EXP,
    )  # fmt: skip
    P = load_block(factor, rows, present, factor_s, factor_r, R, WIDTH, VECTOR, RANK_MAJOR, ROW_MAJOR)
    imprecise = tl.where(pairs.is_ordinary(d_hi), 0, 1)
    w, _w_lo = pairs.reciprocal(d_hi, d_lo)
    of_diag = tl.zeros([BLOCK_S], tl.float32)
    coefficient = of_diag
    made = everywhere
    if HAS_VALUE:
        z_hi, z_lo = pairs.split(tl.load(z + columns, mask=columns < R, other=0.0))
        minus_hi, minus_lo = everywhere - z_hi[None, :], everywhere - z_lo[None, :]
        along_hi, along_lo = pairs.add_columns(*pairs.scaled(minus_hi, minus_lo, P))
        r_hi, r_lo = pairs.add(along_hi, along_lo, r_hi, r_lo)  # r - p . z
        a = w * (r_hi + r_lo)
        coefficient = 2.0 * of_maha * a
        of_diag = -of_maha * a * a
    if NEED_LOGDET:
        at = columns[:, None] * R + columns[None, :]
        there = (columns < R)[:, None] & (columns[None, :] <= columns[:, None])
        inverse = tl.load(chol_inv + at, mask=there, other=0.0).to(tl.float32)
        V = tl.dot(P, tl.trans(inverse), input_precision=PRECISION)
        leverage = w * tl.sum(V * V, 1)
        if CERTIFIED:
            imprecise = imprecise | tl.where((leverage <= HIGH_LEVERAGE) & (growth <= FLOAT32_GROWTH), 0, 1)
        of_diag += of_logdet * w * (1.0 - leverage)
        if NEED_FACTOR:
            made = tl.dot(V, inverse, input_precision=PRECISION) * (2.0 * of_logdet * w)[:, None]
    if NEED_FACTOR:
        if HAS_VALUE:
            made = tl.fma(everywhere - coefficient[:, None], everywhere + z_hi[None, :], made)
        made = tl.where(present[:, None], made, 0.0)
        to = grad_factor + b * out_b
        store_block(to, rows, inside, out_s, out_r, R, made, WIDTH, VECTOR, RANK_MAJOR, ROW_MAJOR)
    where = b * S + rows
    if NEED_DIAG:
        of_diag = tl.where(present, of_diag * slope, 0.0)
        tl.store(grad_diag + where, of_diag.to(grad_diag.dtype.element_ty), mask=inside)
    if NEED_LOC:
        of_loc = tl.where(present, -coefficient, 0.0)
        tl.store(grad_loc + where, of_loc.to(grad_loc.dtype.element_ty), mask=inside)
    tl.store(flags + pid, tl.max(imprecise, 0))
