"""Helpers of the kernels that load and store rows; vectors of S entries are converted to float64."""

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def load_rows(vector, rows, stride, present):
    """Entries of a vector in float64; 0 for absent rows."""
    return tl.load(vector + rows * stride, mask=present, other=0.0).to(tl.float64)


@triton.jit
def load_tile(matrix, rows, columns, row_stride, column_stride, present, column_count):
    """A tile [rows, columns] of a matrix; 0 for absent rows and columns out of range."""
    inside = present[:, None] & (columns < column_count)[None, :]
    return tl.load(matrix + rows[:, None] * row_stride + columns[None, :] * column_stride, mask=inside, other=0.0)


@triton.jit
def load_diag(diag, rows, stride, present, eps, EXP: tl.constexpr, LIMIT: tl.constexpr):
    """D, 1 / D, and the derivative of D by the stored number, all in float64; 1, 0 and 0 for absent rows."""
    raw = load_rows(diag, rows, stride, present)
    if EXP:
        slope = tl.exp(tl.where((raw > LIMIT) & (raw < float("inf")), LIMIT, raw))
        d = eps + slope
    else:
        d = raw
        slope = raw * 0.0 + 1.0
    d = tl.where(present, d, 1.0)
    return d, tl.where(present, 1.0 / d, 0.0), tl.where(present, slope, 0.0)


@triton.jit
def rounded(products, once):
    """Rounds products before they are summed, by a loop that runs once. If they were fused into the sums of a
    reduction, threads that hold the same sum would round it differently in the last bit, and race to write it."""
    kept = tl.zeros(products.shape, products.dtype)
    for _ in range(once):
        kept += products
    return kept


@triton.jit
def times(tile, vector, once, COMPUTE: tl.constexpr):
    """tile * vector in float64, for a float64 vector. A float32 tile is multiplied by the vector's leading 24 bits and
    by the remaining bits; both products are exact, whether fused or not."""
    if COMPUTE == tl.float64:
        return rounded(tile * vector, once)
    else:
        leading = vector.to(tl.float32)
        rest = (vector - leading.to(tl.float64)).to(tl.float32)
        wide = tile.to(tl.float64)
        return wide * leading.to(tl.float64) + wide * rest.to(tl.float64)


@triton.jit
def square(tile, once, COMPUTE: tl.constexpr):
    """tile^2 in float64: exact for a float32 tile."""
    wide = tile.to(tl.float64)
    if COMPUTE == tl.float64:
        return rounded(wide * wide, once)
    else:
        return wide * wide


@triton.jit
def operand(tile, once, COMPUTE: tl.constexpr):
    """A tile as an operand of a product. In float64, a loop that runs once hides from the compiler that the numbers
    come from a narrower type (half precision, a mask), for which it would choose a layout that its float64 product
    does not support."""
    if COMPUTE == tl.float64:
        tile = rounded(tile, once)
    return tile


@triton.jit
def narrowed(numbers, pointer):
    """Converts numbers to the type of a pointer, through float32 for half-precision types."""
    if pointer.dtype.element_ty == tl.bfloat16 or pointer.dtype.element_ty == tl.float16:
        return numbers.to(tl.float32).to(pointer.dtype.element_ty)
    else:
        return numbers.to(pointer.dtype.element_ty)


@triton.jit
def find_present(mask, rows, stride, inside, HAS_MASK: tl.constexpr):
    """Which rows are present: those in range and not masked."""
    if HAS_MASK:
        present = inside & (tl.load(mask + rows * stride, mask=inside, other=0) != 0)
    else:
        present = inside
    return present


def as_pair(x: float) -> tuple[float, float]:
    """A number as a sum of two float32 numbers."""
    hi = struct.unpack("f", struct.pack("f", x))[0]
    return hi, x - hi


MOST_PROGRAMS = 2**31 - 1  # of one launch


def grid(programs: int) -> tuple[int]:
    """The grid of a launch."""
    if programs > MOST_PROGRAMS:
        raise RuntimeError(f"a Triton launch has at most {MOST_PROGRAMS} programs, and this needs {programs}")
    return (programs,)


def pointer(tensor: Tensor | None, stand_in: Tensor) -> Tensor:
    """A tensor to pass for a pointer that the kernel does not use."""
    return stand_in if tensor is None else tensor


def strides(tensor: Tensor | None, dims: int) -> tuple[int, ...]:
    return (0,) * dims if tensor is None else tensor.stride()


def as_bytes(mask: Tensor | None) -> Tensor | None:
    """A bool mask in the form that the kernels read."""
    return None if mask is None else mask.view(torch.uint8)


def add_slots(gram: Tensor) -> Tensor:
    """Sums [B, splits, K, K] -> symmetric [B, K, K]. Tiles above the diagonal are uninitialised and ignored."""
    lower = gram.sum(1).tril()
    return lower + lower.tril(-1).mT
