"""The backward pass of ranks up to 16, with one value at most. Every row has a thread, in whose registers v = L^-1 p
and then q = L^-T v take the place of p. No number of a row is in float64."""

from __future__ import annotations

import triton
import triton.language as tl

from lrd_kernels import _policy
from lrd_kernels.ops.triton import pairs
from lrd_kernels.ops.triton.rows import load_columns, load_scalars, store_columns

FLOAT32_GROWTH = tl.constexpr(_policy.FLOAT32_GROWTH)
HIGH_LEVERAGE = tl.constexpr(_policy.HIGH_LEVERAGE)
NOT_SPECIALISED = ["S", "R", "blocks", "rows_per_block", "factor_b", "factor_s", "factor_r", "out_b", "out_s", "out_r"]
NOT_SPECIALISED += [f"{vector}_{of}" for vector in ("diag", "value", "loc", "mask") for of in "bs"] + ["grad_b"]


@triton.jit
def load_weights(summary, value_info, grad, maha, logdet, HAS_VALUE: tl.constexpr):
    """Of an item: its growth, whether it has not failed, and the weights of M and of log det Sigma in the gradient."""
    growth = tl.load(summary)
    good = growth < float("inf")
    if HAS_VALUE:
        good = good & (tl.load(value_info) == 0)
    weight = tl.where(good, tl.load(grad).to(tl.float64), 0.0)
    of_maha = (weight * maha).to(tl.float32)
    of_logdet = (weight * logdet).to(tl.float32)
    return growth, good, of_maha, of_logdet


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def _row_grads_kernel(
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
    scratch,
    grad_factor,
    grad_diag,
    grad_loc,
    S: tl.int64,
    R: tl.int64,
    blocks: tl.int64,
    rows_per_block: tl.int64,
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
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    VECTOR: tl.constexpr,
    RANK_MAJOR: tl.constexpr,
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
    """Program (block of rows, b), with a thread for each of ROWS rows. Sets `flags` [B, blocks] where float32 does not
    serve: diagonal entries beyond the range of pairs, and with CERTIFIED also high leverage and uncertain items. Above
    rank 8, L^-1 in float32 is read from `scratch` [programs, WIDTH, WIDTH], which the first-level cache holds."""
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
    IN_REGISTERS: tl.constexpr = WIDTH <= 8
    if NEED_LOGDET and not IN_REGISTERS:
        inverse = scratch + pid * WIDTH * WIDTH
        line, column = tl.arange(0, WIDTH)[:, None], tl.arange(0, WIDTH)[None, :]
        own_inverse = tl.load(chol_inv + line * R + column, mask=(column <= line) & (line < R), other=0.0)
        tl.store(inverse + line * WIDTH + column, own_inverse.to(tl.float32))
        tl.debug_barrier()
    z_hi, z_lo, lower = (), (), ()
    for i in tl.static_range(WIDTH):
        if HAS_VALUE:
            hi, lo = pairs.split(tl.load(z + i, mask=i < R, other=0.0))
            z_hi, z_lo = z_hi + (hi,), z_lo + (lo,)
        if NEED_LOGDET and IN_REGISTERS:
            for j in tl.static_range(i + 1):
                lower = lower + (tl.load(chol_inv + i * R + j, mask=i < R, other=0.0).to(tl.float32),)
    imprecise = tl.zeros([ROWS], tl.int32)
    if CERTIFIED and NEED_LOGDET:
        imprecise += tl.where(growth <= FLOAT32_GROWTH, 0, 1)
    begin = block * rows_per_block
    end = tl.minimum(begin + rows_per_block, S)
    readable = tl.where(good, end, 0)  # the gradients of items that failed are zero
    for start in range(begin, end, ROWS):
        rows = start + tl.arange(0, ROWS).to(tl.int64)
        inside = rows < end
        present, d_hi, d_lo, slope, r_hi, r_lo = load_scalars(
            diag, value, loc, mask, rows, rows < readable, diag_s, value_s, loc_s, mask_s, eps_hi, eps_lo, limit,
            UNIT, HAS_VALUE, HAS_LOC, HAS_MASK, EXP,
        )  # fmt: skip
        x = load_columns(factor, rows, present, factor_s, factor_r, R, WIDTH, VECTOR, RANK_MAJOR)
        imprecise = imprecise | tl.where(pairs.is_ordinary(d_hi), 0, 1)
        w, _w_lo = pairs.reciprocal(d_hi, d_lo)
        of_diag = tl.zeros([ROWS], tl.float32)
        coefficient = of_diag
        if HAS_VALUE:
            for k in tl.static_range(WIDTH):  # r - p . z
                r_hi, r_lo = pairs.add(r_hi, r_lo, *pairs.scaled(z_hi[k], z_lo[k], -x[k]))
            a = w * (r_hi + r_lo)
            coefficient = 2.0 * of_maha * a
            of_diag = -of_maha * a * a
        if NEED_LOGDET:
            v, norm = (), of_diag * 0.0
            for m in tl.static_range(WIDTH):
                own = tl.zeros([ROWS], tl.float32)
                for j in tl.static_range(m + 1):
                    if IN_REGISTERS:
                        own = tl.fma(x[j], lower[m * (m + 1) // 2 + j], own)
                    else:
                        own = tl.fma(x[j], tl.load(inverse + m * WIDTH + j), own)
                v = v + (own,)
                norm = tl.fma(own, own, norm)
            if not IN_REGISTERS:
                tl.debug_barrier()  # loads what is needed of L^-1 again: registers cannot hold it
            leverage = w * norm
            if CERTIFIED:
                imprecise = imprecise | tl.where(leverage <= HIGH_LEVERAGE, 0, 1)
            of_diag += of_logdet * w * (1.0 - leverage)
        if NEED_FACTOR:
            pull = 2.0 * of_logdet * w
            made = ()
            for k in tl.static_range(WIDTH):
                own = tl.zeros([ROWS], tl.float32)
                if NEED_LOGDET:
                    for m in tl.static_range(k, WIDTH):
                        if IN_REGISTERS:
                            own = tl.fma(v[m], lower[m * (m + 1) // 2 + k], own)
                        else:
                            own = tl.fma(v[m], tl.load(inverse + m * WIDTH + k), own)
                    own = pull * own
                if HAS_VALUE:
                    own = tl.fma(-coefficient, z_hi[k], own)
                made = made + (tl.where(present, own, 0.0),)
            store_columns(grad_factor + b * out_b, rows, inside, out_s, out_r, R, made, WIDTH, VECTOR, RANK_MAJOR)
        at = b * S + rows
        if NEED_DIAG:
            of_diag = tl.where(present, of_diag * slope, 0.0)
            tl.store(grad_diag + at, of_diag.to(grad_diag.dtype.element_ty), mask=inside)
        if NEED_LOC:
            of_loc = tl.where(present, -coefficient, 0.0)
            tl.store(grad_loc + at, of_loc.to(grad_loc.dtype.element_ty), mask=inside)
    tl.store(flags + pid, tl.max(imprecise, 0))
