"""Gaussians in decimal arithmetic of 150 digits, as NumPy arrays of `Decimal`. Conversion from a tensor is exact."""

from __future__ import annotations

import decimal
import functools
from decimal import Decimal

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray  # of Decimal

# The capacitance of a float32 covariance can have a condition number of 1e120; what remains is far beyond float64.
DIGITS = 200
ZERO, ONE = Decimal(0), Decimal(1)
PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899862803482534211706798")


def precise() -> decimal.Context:
    """Sets the precision of this thread."""
    context = decimal.Context(prec=DIGITS, Emax=999_999, Emin=-999_999, traps=[decimal.DivisionByZero])
    decimal.setcontext(context)
    return context


def exact(tensor: Tensor) -> Array:
    """The numbers of a tensor, without rounding."""
    return array(map(Decimal, tensor.detach().double().flatten().tolist()), tuple(tensor.shape))


def array(numbers: object, shape: tuple[int, ...]) -> Array:
    made = np.empty(shape, dtype=object)
    made.reshape(-1)[:] = list(numbers)  # type: ignore[call-overload]
    return made


def zeros(*shape: int) -> Array:
    return np.full(shape, ZERO, dtype=object)


def eye(n: int) -> Array:
    return diagonal(np.full(n, ONE, dtype=object))


def diagonal(entries: Array) -> Array:
    made = zeros(len(entries), len(entries))
    np.fill_diagonal(made, entries)
    return made


def times(A: Array, B: Array) -> Array:
    """The matrix product, also of nothing to add up."""
    if A.shape[-1] == 0:
        return zeros(*A.shape[:-1], *B.shape[1:])
    return np.asarray(A @ B, dtype=object)


sqrt = np.frompyfunc(lambda x: max(x, ZERO).sqrt(), 1, 1)
log = np.frompyfunc(Decimal.ln, 1, 1)
exp = np.frompyfunc(Decimal.exp, 1, 1)


def total(entries: Array) -> Decimal:
    return sum(entries.reshape(-1).tolist(), ZERO)


def largest(entries: Array) -> Decimal:
    return max((abs(x) for x in entries.reshape(-1).tolist()), default=ZERO)


def cholesky(A: Array) -> Array:
    n = len(A)
    L = zeros(n, n)
    for j in range(n):
        column = A[j:, j] - times(L[j:, :j], L[j, :j])
        L[j:, j] = column / column[0].sqrt()
    return L


def inverse_triangular(L: Array) -> Array:
    """L^-1 of a lower triangular matrix."""
    n = len(L)
    result = eye(n)
    for i in range(n):
        result[i] = (result[i] - times(L[i, :i], result[:i])) / L[i, i]
    return result


class Gaussian:
    """`Sigma = diag(D) + P P^T` for P [S, R] and D [S]."""

    def __init__(self, P: Array, D: Array) -> None:
        self.P, self.D = P, D

    @functools.cached_property
    def weighted(self) -> Array:
        """D^-1 P: [S, R]"""
        return self.P / self.D[:, None]

    @functools.cached_property
    def capacitance(self) -> Array:
        return eye(self.P.shape[1]) + times(self.P.T, self.weighted)

    @functools.cached_property
    def chol(self) -> Array:
        return cholesky(self.capacitance)

    @functools.cached_property
    def chol_inverse(self) -> Array:
        return inverse_triangular(self.chol)

    @functools.cached_property
    def logdet(self) -> Decimal:
        return 2 * total(log(np.diagonal(self.chol))) + total(log(self.D))

    @functools.cached_property
    def covariance(self) -> Array:
        return diagonal(self.D) + times(self.P, self.P.T)

    @functools.cached_property
    def variance(self) -> Array:
        return self.D + row_squares(self.P)

    @functools.cached_property
    def precision(self) -> Array:
        half = times(self.weighted, self.chol_inverse.T)
        return diagonal(1 / self.D) - times(half, half.T)

    @functools.cached_property
    def precision_diag(self) -> Array:
        return 1 / self.D - row_squares(times(self.weighted, self.chol_inverse.T))

    @functools.cached_property
    def precision_factor(self) -> Array:
        """Sigma^-1 P: [S, R]"""
        return times(times(self.weighted, self.chol_inverse.T), self.chol_inverse)

    def fitted(self, r: Array) -> Array:
        """z = P^T Sigma^-1 r: [R]"""
        return times(self.precision_factor.T, r)

    def solve(self, r: Array) -> Array:
        return (r - times(self.P, self.fitted(r))) / self.D


def row_squares(A: Array) -> Array:
    """Sums of squares over the last dimension."""
    return times(A * A, np.full(A.shape[1], ONE, dtype=object))


def jacobi(P: Array) -> tuple[Array, Array]:
    """Singular values in descending order, and the left singular vectors times them, by one-sided Jacobi rotations."""
    A = P.copy()
    n = A.shape[1]
    limit = Decimal(10) ** -60
    for _ in range(60):
        rotated = False
        for i in range(n):
            for j in range(i + 1, n):
                a, b, c = (times(A[:, k], A[:, m]).item() for k, m in ((i, i), (j, j), (i, j)))
                if c == 0 or c * c <= limit * limit * a * b:
                    continue
                rotated = True
                slope = (b - a) / (2 * c)
                t = (ONE if slope >= 0 else -ONE) / (abs(slope) + (1 + slope * slope).sqrt())
                cos = 1 / (1 + t * t).sqrt()
                A[:, i], A[:, j] = cos * A[:, i] - cos * t * A[:, j], cos * t * A[:, i] + cos * A[:, j]
        if not rotated:
            break
    lengths = sqrt(times((A * A).T, np.full(len(A), ONE, dtype=object)))
    order = sorted(range(n), key=lambda k: -lengths[k])
    return lengths[order], A[:, order]


def eigenvalues_below(A: Array, x: Decimal) -> int:
    """How many eigenvalues of a symmetric matrix are below x: the negative pivots of A - x I."""
    A = A - x * eye(len(A))
    count = 0
    for k in range(len(A)):
        pivot = A[k, k] if A[k, k] != 0 else Decimal(10) ** -300
        count += pivot < 0
        rest = A[k + 1 :, k]
        A[k + 1 :, k + 1 :] = A[k + 1 :, k + 1 :] - rest[:, None] * rest[None] / pivot
    return count


def sum_to(full: Array, shape: tuple[int, ...]) -> Array:
    """Sums the dimensions that broadcasting added or widened."""
    full = np.asarray(full, dtype=object)
    while full.ndim > len(shape):
        full = np.asarray(full.sum(0), dtype=object)
    for dim, size in enumerate(shape):
        if size == 1 and full.shape[dim] != 1:
            full = full.sum(dim, keepdims=True)
    return full


def deviation(
    actual: Tensor, truth: Array, scale: Array | Decimal, reach: Array | None = None, terms: int = 1
) -> float:
    """The largest `|actual - truth| / scale`. Rounding below the normal range is free, and a number beyond the range of
    the dtype must be infinite; anything else that is not finite is an infinite error. `reach` is given for sums of
    `terms` numbers that are stored: one that exceeds the range of the dtype excuses the entry."""
    truth = np.asarray(truth, dtype=object)
    if tuple(actual.shape) != truth.shape:
        return float("inf")
    info = torch.finfo(actual.dtype)
    slack = terms * Decimal(info.smallest_normal if actual.dtype != torch.float16 else 2.0**-24)
    most = Decimal(info.max) * (1 - Decimal(info.eps))
    worst = ZERO
    scales = np.broadcast_to(np.asarray(scale, dtype=object), truth.shape).reshape(-1).tolist()
    reaches = truth if reach is None else np.asarray(reach, dtype=object)
    found = actual.detach().double().flatten().tolist()
    for a, t, s, r in zip(found, truth.reshape(-1).tolist(), scales, reaches.reshape(-1).tolist(), strict=True):
        if not np.isfinite(a):
            if reach is not None and r >= most:
                continue
            if abs(t) >= most and a == (float("inf") if t > 0 else -float("inf")):
                continue
            return float("inf")
        error = abs(Decimal(a) - t) - slack
        if error > 0:
            worst = max(worst, error / s if s > 0 else Decimal("inf"))
    return float(worst)
