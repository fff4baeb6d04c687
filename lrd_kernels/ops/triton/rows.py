"""What the kernels in float32 load of a row: its scalars as pairs, and its columns as a tuple of vectors [rows]."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from lrd_kernels._policy import exp_limit
from lrd_kernels.ops.triton import common, pairs
from lrd_kernels.ops.triton.common import find_present
from lrd_kernels.ops.triton.pairs import two_sum


@triton.jit
def along(rows, stride, UNIT: tl.constexpr):
    """Offsets of rows; UNIT tells the compiler that the stride is 1."""
    return rows if UNIT else rows * stride


@triton.jit
def load_scalars(
    diag, value, loc, mask, rows, inside, diag_s, value_s, loc_s, mask_s, eps_hi, eps_lo, limit,
    UNIT: tl.constexpr, HAS_VALUE: tl.constexpr, HAS_LOC: tl.constexpr, HAS_MASK: tl.constexpr, EXP: tl.constexpr,
):  # fmt: skip
    """Which rows are present, D as a pair, its derivative by the stored number, and value - loc as a pair. D is 1 and
    the others are 0 in absent rows."""
    present = find_present(mask, along(rows, 0, True) if UNIT else rows, 1 if UNIT else mask_s, inside, HAS_MASK)
    raw = tl.load(diag + along(rows, diag_s, UNIT), mask=present, other=1.0).to(tl.float32)
    if EXP:
        hi, lo = pairs.exponential(tl.where((raw > limit) & (raw < float("inf")), limit, raw))
        slope = tl.where(present, hi, 0.0)
        hi, rest = two_sum(hi * 0.0 + eps_hi, hi)
        lo = rest + (eps_lo + lo)
        d_hi, d_lo = tl.where(present, hi, 1.0), tl.where(present, lo, 0.0)
    else:
        d_hi, d_lo = raw, raw * 0.0
        slope = tl.where(present, 1.0, 0.0)
    r_hi = tl.zeros(rows.shape, tl.float32)
    r_lo = r_hi
    if HAS_VALUE:
        r_hi = tl.load(value + along(rows, value_s, UNIT), mask=present, other=0.0).to(tl.float32)
        if HAS_LOC:
            r_hi, r_lo = two_sum(r_hi, -tl.load(loc + along(rows, loc_s, UNIT), mask=present, other=0.0).to(tl.float32))
    return present, d_hi, d_lo, slope, r_hi, r_lo


@triton.jit
def _load_four(row, present, BYTES: tl.constexpr):
    """Four columns next to one another, of rows at aligned addresses: one load, and all four in one thread."""
    addresses = tl.multiple_of(row, BYTES)[:, None] + tl.arange(0, 4)[None, :]
    four = tl.load(addresses, mask=present[:, None], other=0.0).to(tl.float32)
    even, odd = tl.split(four.reshape(four.shape[0], 2, 2))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def load_columns(
    factor, rows, present, factor_s, factor_r, R,
    WIDTH: tl.constexpr, VECTOR: tl.constexpr, RANK_MAJOR: tl.constexpr,
):  # fmt: skip
    """Columns in float32, WIDTH of them; 0 from R on. With VECTOR there are WIDTH, contiguous in aligned rows."""
    x = ()
    if VECTOR:
        for k in tl.static_range(WIDTH // 4):
            four = factor + 4 * k + rows * factor_s
            x = x + _load_four(four, present, 4 * factor.dtype.element_ty.primitive_bitwidth // 8)
    else:
        for k in tl.static_range(WIDTH):
            own = factor + k * factor_r + along(rows, factor_s, RANK_MAJOR)
            x = x + (tl.load(own, mask=present & (k < R), other=0.0).to(tl.float32),)
    return x


@triton.jit
def load_block(
    factor, rows, present, factor_s, factor_r, R,
    WIDTH: tl.constexpr, VECTOR: tl.constexpr, RANK_MAJOR: tl.constexpr, ROW_MAJOR: tl.constexpr,
):  # fmt: skip
    """The same columns as a tile [rows, WIDTH]."""
    columns = tl.arange(0, WIDTH).to(tl.int64)
    if VECTOR:
        addresses = tl.multiple_of(factor + rows * factor_s, 4 * factor.dtype.element_ty.primitive_bitwidth // 8)
        mask = present[:, None]
    else:
        addresses = factor + along(rows, factor_s, RANK_MAJOR)
        mask = present[:, None] & (columns < R)[None, :]
    addresses = addresses[:, None] + along(columns, factor_r, ROW_MAJOR)[None, :]
    return tl.load(addresses, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_block(
    factor, rows, inside, factor_s, factor_r, R, block,
    WIDTH: tl.constexpr, VECTOR: tl.constexpr, RANK_MAJOR: tl.constexpr, ROW_MAJOR: tl.constexpr,
):  # fmt: skip
    """The reverse."""
    columns = tl.arange(0, WIDTH).to(tl.int64)
    if VECTOR:
        addresses = tl.multiple_of(factor + rows * factor_s, 4 * factor.dtype.element_ty.primitive_bitwidth // 8)
        mask = inside[:, None]
    else:
        addresses = factor + along(rows, factor_s, RANK_MAJOR)
        mask = inside[:, None] & (columns < R)[None, :]
    addresses = addresses[:, None] + along(columns, factor_r, ROW_MAJOR)[None, :]
    tl.store(addresses, block.to(factor.dtype.element_ty), mask=mask)


@triton.jit
def store_columns(
    factor, rows, inside, factor_s, factor_r, R, x,
    WIDTH: tl.constexpr, VECTOR: tl.constexpr, RANK_MAJOR: tl.constexpr,
):  # fmt: skip
    """The reverse."""
    if VECTOR:
        BYTES: tl.constexpr = 4 * factor.dtype.element_ty.primitive_bitwidth // 8  # of four
        for k in tl.static_range(WIDTH // 4):
            even = tl.join(x[4 * k], x[4 * k + 2])
            odd = tl.join(x[4 * k + 1], x[4 * k + 3])
            four = tl.join(even, odd).reshape(even.shape[0], 4)
            own = tl.multiple_of(factor + 4 * k + rows * factor_s, BYTES)[:, None] + tl.arange(0, 4)[None, :]
            tl.store(own, four.to(factor.dtype.element_ty), mask=inside[:, None])
    else:
        for k in tl.static_range(WIDTH):
            own = factor + k * factor_r + along(rows, factor_s, RANK_MAJOR)
            tl.store(own, x[k].to(factor.dtype.element_ty), mask=inside & (k < R))


ROW_RANK = 16  # up to which a row has a thread
MOST_RANK = 64  # of the kernels for one value in the forward pass
GRADS_RANK = 32  # and in the backward pass: above, products in float32 leave no registers for pairs on all GPUs


def ends(tensor: Tensor | None) -> tuple[int, int]:
    """Strides of the first and the last dimension."""
    return (0, 0) if tensor is None else (tensor.stride(0), tensor.stride(-1))


def width(R: int) -> int:
    """The number of columns of the kernel that serves a rank."""
    return 4 if R <= 4 else triton.next_power_of_2(R)


def is_unit(*vectors: Tensor | None) -> bool:
    """Whether the last dimension of all vectors is contiguous."""
    return all(v is None or v.stride(-1) == 1 for v in vectors)


def is_vector(matrix: Tensor, columns: int) -> bool:
    """Whether the rows of a matrix [B, S, R] have this many columns, four of which can be moved at a time."""
    four = 4 * matrix.element_size()
    return (
        matrix.shape[2] == columns
        and matrix.stride(2) == 1
        and matrix.data_ptr() % four == 0
        and all(stride % 4 == 0 for stride in matrix.stride()[:2])
    )


def narrow_diag(eps: float | None, dtype: Any) -> tuple[float, float, float]:
    """eps as a pair of float32 numbers, and the limit of the exponential."""
    return (0.0, 0.0, 0.0) if eps is None else (*common.as_pair(eps), exp_limit(dtype))
