"""Precision "qr": the capacitance matrix is not formed, which avoids squaring the condition number.

With A = D^-1/2 P and b = D^-1/2 r, the triangular factor of a QR decomposition of [A; I] is L^T. z is the least-squares
solution for the right-hand side [b; 0], and the Mahalanobis term is the squared norm of its residual. Rows are
processed in chunks; each chunk is stacked below the triangular factor of the previous ones. All is in
float64, on any device.

Rows may differ by many orders of magnitude, and each has to keep its own digits. Householder QR does so if long rows
come first and columns are pivoted (Cox and Higham, "Stability of Householder QR factorization for weighted least
squares problems", 1998). The longest rows decide about the order of the columns.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lrd_kernels._policy import DUAL_RANK, QR_GROWTH

CHUNK_ELEMENTS = 2**21  # elements of A held at a time
PIVOT_ELEMENTS = 2**16  # elements of the longest rows, from which the order of the columns is found


class Rows:
    """The rows of A [B, S, R] and b [B, S, N] of a batch of Gaussians, read in float64 when they are needed.

    Takes a factor [F, S, R], which each serves B / F consecutive Gaussians, diag [B, S] in float64, diff [B, N, S] or
    None, and mask [B, S] or None. Masked rows are zero.
    """

    def __init__(self, factor: Tensor, diag: Tensor, diff: Tensor | None, mask: Tensor | None) -> None:
        self.B, self.S = diag.shape
        self.R = factor.shape[-1]
        self.diff = diag.new_zeros(self.B, 0, self.S) if diff is None else diff
        self.N = self.diff.shape[1]
        root = diag.rsqrt()
        self.root = root if mask is None else torch.where(mask, root, 0)  # D^-1/2 [B, S]
        self.mask = mask
        self._spread = factor[:, None].expand(-1, self.B // max(factor.shape[0], 1), -1, -1)  # [F, K, S, R]

    def with_factors(self, factors: Tensor, diff: Tensor | None = None) -> Rows:
        """The same rows with other factors [B, S, R], one for every Gaussian, and with other values [B, N, S]."""
        other = copy.copy(self)
        other._spread = factors[:, None]
        if diff is not None:
            other.diff, other.N = diff, diff.shape[1]
        return other

    def at(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """P [B, n, R] and r [B, n, N] at rows [B, n]."""
        index = rows.reshape(*self._spread.shape[:2], -1, 1).expand(-1, -1, -1, self.R)
        P = self._spread.gather(2, index).reshape(self.B, rows.shape[1], self.R).double()
        return self._selected(P, self.diff.double().gather(2, rows[:, None].expand(-1, self.N, -1)).mT, rows)

    def slices(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Chunks of consecutive rows, with P and r."""
        for begin in range(0, max(self.S, 1), self._chunk):
            rows = slice(begin, min(begin + self._chunk, self.S))
            P = self._spread[:, :, rows].reshape(self.B, rows.stop - rows.start, self.R).double()
            yield rows, *self._selected(P, self.diff[:, :, rows].double().mT, rows)

    def longest_first(self, without: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Chunks of A and b by descending norm; rows where `without` [B, S] is True are zero.

        Householder QR would lose digits of small rows if a large row came after them.
        """
        root = self.root if without is None else torch.where(without, 0, self.root)
        largest = self._spread.abs().amax(-1) if self.R else self._spread.new_zeros(self._spread.shape[:-1])
        lengths = torch.where(root > 0, largest.reshape(self.B, self.S).double() * root, 0)
        order = lengths.argsort(-1, descending=True)
        for begin in range(0, self.S, self._chunk):
            rows = order[:, begin : begin + self._chunk]
            scale = root.gather(1, rows)[..., None]
            P, r = self.at(rows)
            yield torch.where(scale == 0, 0, P * scale), torch.where(scale == 0, 0, r * scale)

    @property
    def wide(self) -> bool:
        """Whether the S x S covariance is the smaller matrix, by enough to prefer it."""
        return max(self.S, DUAL_RANK) < self.R

    def decomposed(self, without: Tensor | None = None, *, values: bool = True) -> LeastSquares:
        """The QR decomposition of A, with or without right-hand sides."""
        N = self.N if values else 0
        chunks = ((A, b[..., :N]) for A, b in self.longest_first(without))
        return decomposed(chunks, self.B, self.R, N, self.root)

    def finite(self) -> Tensor:
        """Whether all numbers of a covariance are finite, and the diagonal positive: [B]"""
        root = self.root if self.mask is None else torch.where(self.mask, self.root, 1)
        good = (root.isfinite() & (root > 0)).all(-1)
        for _, P, _ in self.slices():
            good = good & P.isfinite().all(-1).all(-1)
        return good

    @property
    def _chunk(self) -> int:
        return max(CHUNK_ELEMENTS // max(self.B * (self.R + self.N), 1), self.R, 1)

    def _selected(self, P: Tensor, r: Tensor, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Zeros instead of masked rows, which may be arbitrary."""
        if self.mask is None:
            return P, r
        mask = (self.mask[:, rows] if isinstance(rows, slice) else self.mask.gather(1, rows))[..., None]
        return torch.where(mask, P, 0), torch.where(mask, r, 0)


class LeastSquares(NamedTuple):
    """A QR decomposition of rows A, with their columns in another order, and right-hand sides b."""

    order: Tensor  # [B, R]
    triangle: Tensor  # T [B, R, R], with A[:, order] = Q T
    fitted: Tensor  # Q^T b [B, R, N]
    left: Tensor  # squared norms of what is left of b [B, N]

    def root(self) -> Tensor:
        """T with its columns as they are in A: A^T A = root^T root"""
        return in_place_of(self.order[:, None], self.triangle, 2)

    def forth(self, x: Tensor) -> Tensor:
        """root^-T x for x [B, R, n]"""
        permuted = x.gather(1, self.order[..., None].expand_as(x))
        return torch.linalg.solve_triangular(self.triangle.mT, permuted, upper=False)

    def back(self, x: Tensor) -> Tensor:
        """root^-1 x for x [B, R, n]"""
        return in_place_of(self.order[..., None], torch.linalg.solve_triangular(self.triangle, x, upper=True), 1)

    def solution(self) -> Tensor:
        """z [B, R, N]"""
        return self.back(self.fitted)

    def lower(self) -> Tensor:
        """The lower triangular root of A^T A [B, R, R] whose diagonal is positive."""
        upper = torch.linalg.qr(self.root()).R
        return (torch.where(upper.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0)[..., None] * upper).mT


def in_place_of(order: Tensor, x: Tensor, dim: int) -> Tensor:
    """The inverse of `x = result.gather(dim, order)`, for an order that broadcasts to x."""
    return torch.empty_like(x).scatter(dim, order.expand_as(x), x)


def column_order(A: Tensor) -> Tensor:
    """The order [B, R] in which QR with column pivoting takes the columns of A [B, n, R]. Long rows come first."""
    B, n, R = A.shape
    A, order = A.clone(), torch.arange(R, device=A.device).expand(B, R)
    for k in range(min(n, R) - 1):
        at = k + A[:, k:, k:].norm(dim=1).argmax(-1, keepdim=True)
        others = torch.arange(R, device=A.device).expand(B, R)
        swap = others.scatter(1, at, k).slice_scatter(at, 1, k, k + 1)
        A, order = A.gather(2, swap[:, None].expand_as(A)), order.gather(1, swap)
        v, rest = A[:, k:, k, None].clone(), A[:, k:, k + 1 :]
        v[:, 0] += torch.copysign(v.norm(dim=1), v[:, 0])  # of the reflection
        length = v.norm(dim=1, keepdim=True)
        v = torch.where(length > 0, v / length, 0)
        A = torch.cat([A[..., : k + 1], torch.cat([A[:, :k, k + 1 :], rest - 2 * v * (v.mT @ rest)], 1)], 2)
    return order


def decomposed(chunks: Iterable[tuple[Tensor, Tensor]], B: int, R: int, N: int, like: Tensor) -> LeastSquares:
    """Decomposes stacked chunks of rows A [B, n, R] and b [B, n, N]."""
    order = torch.arange(R, device=like.device).expand(B, R)
    found = LeastSquares(order, like.new_zeros(B, 0, R), like.new_zeros(B, 0, N), like.new_zeros(B, N))
    for first, (A, b) in enumerate(chunks):
        if first == 0:
            found = found._replace(order=column_order(A[:, : max(PIVOT_ELEMENTS // max(R, 1), 4 * R)]))
        found = _stacked(found, A, b)
    missing = R - found.triangle.shape[1]
    return _stacked(found, like.new_zeros(B, missing, R), like.new_zeros(B, missing, N)) if missing else found


def regularised(found: LeastSquares) -> LeastSquares:
    """Adds the rows [I] below A, and makes the diagonal of the triangle positive."""
    eye = torch.eye(found.triangle.shape[-1], dtype=found.left.dtype, device=found.left.device)
    order, triangle, fitted, left = _stacked(found, eye.expand_as(found.triangle), torch.zeros_like(found.fitted))
    signs = torch.where(triangle.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0)[..., None]
    return LeastSquares(order, signs * triangle, signs * fitted, left)


def _stacked(found: LeastSquares, A: Tensor, b: Tensor) -> LeastSquares:
    """Adds rows A [B, n, R] and b [B, n, N] below.

    The longest row stays on top: zeros above it would make it the target of the reflections, and lose its digits.
    """
    (B, _, R), N = A.shape, b.shape[2]
    missing = max(R - found.triangle.shape[1] - A.shape[1], 0)  # fewer rows than columns: zeros below
    permuted = A.gather(2, found.order[:, None].expand_as(A))
    reflectors, scales = torch.geqrf(torch.cat([found.triangle, permuted, A.new_zeros(B, missing, R)], 1))
    turned = torch.cat([found.fitted, b, b.new_zeros(B, missing, N)], 1)
    if N and R:
        turned = torch.ormqr(reflectors, scales, turned, transpose=True)
    left = found.left + turned[:, R:].square().sum(1)
    return LeastSquares(found.order, reflectors[:, :R].triu(), turned[:, :R], left)


def factorise(rows: Rows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Factorises the covariances and solves for the values, with the conventions of the raw ops.

    Returns L^-1 [B, R, R], the summary [B, 2], z [B, N, R] and M [B, N]. Items with invalid numbers are NaN and have an
    infinite growth.
    """
    found = regularised(rows.decomposed())
    upper = found.triangle
    logs = -2 * rows.root.log()
    logs = logs if rows.mask is None else torch.where(rows.mask, logs, 0)
    logdet = 2 * upper.diagonal(dim1=-2, dim2=-1).log().sum(-1) + logs.sum(-1)
    good = rows.finite() & logdet.isfinite()
    eye = torch.eye(rows.R, dtype=upper.dtype, device=upper.device).expand_as(upper)
    upper = torch.where(good[:, None, None], upper, eye)
    found = found._replace(triangle=upper)
    z = found.solution().mT
    chol_inv = torch.linalg.solve_triangular(found.lower(), eye, upper=False)
    growth = torch.where(good, QR_GROWTH, torch.inf)
    return chol_inv.contiguous(), torch.stack([growth.to(logdet), logdet], -1), z.contiguous(), found.left
