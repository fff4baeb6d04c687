"""What the kernels share: rows of a Gaussian, in float64 where they are vectors of S entries."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def load_rows(vector, rows, stride, present):
    """Entries of a vector in float64, 0 where they are not present."""
    return tl.load(vector + rows * stride, mask=present, other=0.0).to(tl.float64)


@triton.jit
def load_tile(matrix, rows, columns, row_stride, column_stride, present, column_count):
    """A tile [rows, columns] of a matrix, 0 where a row is not present or a column does not exist."""
    inside = present[:, None] & (columns < column_count)[None, :]
    return tl.load(matrix + rows[:, None] * row_stride + columns[None, :] * column_stride, mask=inside, other=0.0)


@triton.jit
def load_diag(diag, rows, stride, present, eps, EXP: tl.constexpr, LIMIT: tl.constexpr):
    """D, 1 / D, and the derivative of D for the stored number, all in float64; 1, 0 and 0 where not present."""
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
    """Products in their own right, by a loop that runs once. Fused into the sums of a reduction, each thread would
    round its own product last: threads that hold the same sum would differ in its last bit, and race to write it."""
    kept = tl.zeros(products.shape, products.dtype)
    for _ in range(once):
        kept += products
    return kept


@triton.jit
def times(tile, vector, once, COMPUTE: tl.constexpr):
    """tile * vector in float64, the vector in float64 as well. Of a float32 tile by two products that are exact, fused
    or not: the vector's leading 24 bits, and the next ones."""
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
    """A tile as an operand of a product. In float64 a loop that runs once hides from the compiler that the numbers come
    from narrower ones (a half type, a mask): it would lay them out for those, which its float64 product cannot do."""
    if COMPUTE == tl.float64:
        tile = rounded(tile, once)
    return tile


@triton.jit
def narrowed(numbers, pointer):
    """Numbers in the type that a pointer has, by way of float32 where that is a half type."""
    if pointer.dtype.element_ty == tl.bfloat16 or pointer.dtype.element_ty == tl.float16:
        return numbers.to(tl.float32).to(pointer.dtype.element_ty)
    else:
        return numbers.to(pointer.dtype.element_ty)


@triton.jit
def find_present(mask, rows, stride, inside, HAS_MASK: tl.constexpr):
    """Which rows exist: those inside that are not masked."""
    if HAS_MASK:
        present = inside & (tl.load(mask + rows * stride, mask=inside, other=0) != 0)
    else:
        present = inside
    return present


def pointer(tensor: Tensor | None, stand_in: Tensor) -> Tensor:
    """A tensor to pass where a kernel wants a pointer that it will not use."""
    return stand_in if tensor is None else tensor


def strides(tensor: Tensor | None, dims: int) -> tuple[int, ...]:
    return (0,) * dims if tensor is None else tensor.stride()


def as_bytes(mask: Tensor | None) -> Tensor | None:
    """A bool mask as the kernels read it."""
    return None if mask is None else mask.view(torch.uint8)


def add_slots(gram: Tensor) -> Tensor:
    """[B, splits, K, K], of which the tiles above the diagonal hold anything -> their sums, symmetric, [B, K, K]."""
    lower = gram.sum(1).tril()
    return lower + lower.tril(-1).mT
