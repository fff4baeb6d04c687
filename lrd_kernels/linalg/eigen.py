"""Eigenvalues of one covariance from matrix-vector products, in float64. A large factor is converted in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch import Tensor

from lrd_kernels.linalg import capacitance, products, whitening

CHUNK_ELEMENTS = 2**26  # elements of the factor held in float64 at a time, half a GB
BASIS_ELEMENTS = 2**27  # largest size of a Lanczos basis, 1 GB
BASIS = 32  # vectors of the basis; a quarter of them is kept at a restart

ROUNDING = 2.0**-50  # of products with an inverse, relative to the largest entry of D^-1

Apply = Callable[[Tensor], Tensor]
Accuracy = Callable[[float, float], float]  # accuracy of (eigenvalue, residual)


class Covariance:
    """`diag(D) + P P^T` for P [S, R] in any dtype and D [S] in float64."""

    def __init__(self, P: Tensor, D: Tensor) -> None:
        small = P.numel() <= CHUNK_ELEMENTS
        self.P, self.D = P.double() if small else P, D

    def _chunks(self) -> Iterator[tuple[slice, Tensor]]:
        for rows in products.row_chunks(self.P, CHUNK_ELEMENTS):
            yield rows, self.P[rows].double()

    def _project(self, v: Tensor) -> Tensor:
        """P^T v"""
        total = v.new_zeros(self.P.shape[1])
        for rows, part in self._chunks():
            total += v[rows] @ part
        return total

    def _lift(self, z: Tensor) -> Tensor:
        """P z"""
        return torch.cat([part @ z for _, part in self._chunks()])

    def times(self, v: Tensor) -> Tensor:
        return self.D * v + self._lift(self._project(v))

    def inverse(self, shift: float) -> tuple[Apply, float]:
        """Multiplication by `(Sigma - shift I)^-1`, for a shift below the smallest diagonal entry, and its error for
        unit vectors."""
        D = self.D - shift
        chol = capacitance.cholesky_by_qr(self.P, D)

        def apply(v: Tensor) -> Tensor:
            weighted = v / D
            z = torch.cholesky_solve(self._project(weighted)[:, None], chol)[:, 0]
            return weighted - self._lift(z) / D

        return apply, ROUNDING / float(D.min())

    def inverse_by_root(self) -> Apply:
        """Multiplication by `Sigma^-1 = W^T W`, where W whitens: slower, but accurate for tiny eigenvalues."""
        root = whitening.root_of(self.P, self.D)

        def apply(v: Tensor) -> Tensor:
            noise, transposed = torch.func.vjp(root.whiten, v)[:2]
            return cast(Tensor, transposed(noise)[0])

        return apply

    def smallest_within(self) -> tuple[float, float]:
        """Bounds on the smallest eigenvalue. The lower bound is the smallest entry of D; the upper bound is the smaller
        of the (R+1)-th smallest entry of D and the smallest variance."""
        S, R = self.P.shape
        variance = self.D + torch.cat([part.square().sum(1) for _, part in self._chunks()])
        high = float(variance.min())
        if S > R:
            high = min(high, float(self.D.kthvalue(R + 1).values))
        return float(self.D.min()), high


def power(apply: Apply, v: Tensor, accuracy: Accuracy, tol: float, max_iter: int) -> tuple[float, float, int]:
    """The largest eigenvalue by power iteration, until the residual is below the tolerance.

    Returns the eigenvalue, the accuracy reached and the number of products.
    """
    count = 0
    while True:
        v = v / v.norm()
        image = apply(v)
        count += 1
        value = float(v @ image)
        reached = accuracy(value, float((image - value * v).norm()))
        if reached <= tol or count >= max_iter:
            return value, reached, count
        v = image


def lanczos(apply: Apply, v: Tensor, accuracy: Accuracy, tol: float, max_iter: int) -> tuple[float, float, int]:
    """The same as `power`, by the Lanczos method with full orthogonalisation and thick restarts."""
    S = v.numel()
    size = min(max(min(BASIS, BASIS_ELEMENTS // S), 6), S)
    basis = v.new_empty(size + 1, S)
    projected = v.new_zeros(size, size)  # the operator projected onto the basis
    basis[0] = v / v.norm()
    known = count = 0
    while True:
        image = apply(basis[known])
        count += 1
        known += 1
        used = basis[:known]
        along = v.new_zeros(known)
        for _ in range(2):  # one pass is not enough in finite precision
            part = used @ image
            image -= part @ used
            along += part
        projected[:known, known - 1] = projected[known - 1, :known] = along
        rest = float(image.norm())
        values, vectors = torch.linalg.eigh(projected[:known, :known])
        value = float(values[-1])
        reached = accuracy(value, rest * abs(float(vectors[-1, -1])))
        if reached <= tol or count >= max_iter or known == S or rest <= 1e-14 * abs(value):
            return value, reached, count
        if known == size:  # restart from the leading quarter
            kept = size // 4
            basis[:kept] = vectors[:, -kept:].mT @ used
            projected.zero_()
            projected[:kept, :kept] = values[-kept:].diag()
            known = kept
        basis[known] = image / rest
