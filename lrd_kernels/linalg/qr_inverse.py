"""Products with the inverse of an ill-conditioned covariance, from QR decompositions, in float64.

`w_i (r_i - p_i . z)` and `w_i (1 - h_i)` cancel where the low-rank part alone explains output i, that is, where its
leverage h_i is close to 1. There are at most R such outputs, the set H. They are left out of the decomposition, whose
triangle is T, and added to it as a block: with Y = P_H T^-1,

    K = D_H + Y Y^T,   (Sigma^-1 r)_H = K^-1 (r_H - P_H z_T),   C^-1 = T^-1 (I - Y^T K^-1 Y) T^-T,

where z_T is the least-squares solution without H. The root of K and that of I - Y^T K^-1 Y are parts of one QR
decomposition of [Y^T; D_H^1/2].
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lrd_kernels._policy import EXPLAINED_LEVERAGE
from lrd_kernels.linalg import double_double, qr
from lrd_kernels.linalg.qr import Rows

DEPENDENT = 1e-8  # a combination of columns that is smaller, relative to its terms, counts as dependent
BASIS_ROUNDING = 1e-12  # combinations that the rounding of an orthonormal basis can add


class Part(NamedTuple):
    """Rows of `Sigma^-1` times something: the product with r, the product with P, and the diagonal."""

    a: Tensor  # Sigma^-1 r [B, n, N]
    W: Tensor  # Sigma^-1 P [B, n, R]
    t: Tensor  # diag(Sigma^-1) [B, n]


class Inverse:
    """The inverse of the covariances of `rows`, and z = P^T Sigma^-1 r [B, R, N].

    Where columns depend on one another, their combinations that cancel are rounding, and C^-1 is largest along them. So
    the columns are rotated first, such that each of these combinations is a column of its own.
    """

    z: Tensor

    def __init__(self, rows: Rows) -> None:
        self._prepare(rows)
        self._basis, cancels = self._independent_basis()  # [B, R, R], or None
        if self._basis is not None:
            self._prepare(rows.with_factors(_rotated(rows, self._basis, cancels)))
            self.z = self._basis @ self.z

    def _prepare(self, rows: Rows) -> None:
        self._rows = rows
        S, R = rows.S, rows.R
        leverage = leverages(rows)
        top = leverage.topk(min(R, S), -1)
        high = top.values > EXPLAINED_LEVERAGE  # [B, m]
        self._high = torch.where(high, top.indices, -1)
        without = torch.zeros_like(leverage, dtype=torch.bool).scatter(1, top.indices, high)
        self._bare = rows.decomposed(without)
        rest = qr.regularised(self._bare)

        # Positions of H that are not used hold an independent output of variance 1.
        P, r = (torch.where(high[..., None], t, 0) for t in rows.at(top.indices))  # [B, m, R], [B, m, N]
        deviation = torch.where(high, rows.root.gather(1, top.indices).reciprocal(), 1)
        Y = rest.forth(P.mT)  # transposed, [B, R, m]
        order = Y.abs().sum(-1, keepdim=True).argsort(1, descending=True)  # long rows first
        stacked = torch.cat([Y.gather(1, order.expand_as(Y)), torch.diag_embed(deviation)], 1)
        columns = qr.column_order(stacked)
        Q, root = torch.linalg.qr(stacked.gather(2, columns[:, None].expand_as(stacked)), mode="complete")
        Q, root = qr.in_place_of(order, Q[:, :R], 1), root[:, : P.shape[1]]
        half = torch.linalg.solve_triangular(root, _eye_like(root), upper=True)
        half = qr.in_place_of(columns[..., None], half, 1)  # K^-1 = half half^T
        z = self._refined(rest, without)
        whitened = half.mT @ (r - P @ z)
        turned = orthogonal_part(Y, half, Q[..., : P.shape[1]])
        onto = rest.back(turned)
        self.z = self._z = z + onto @ whitened
        self._P_high, self._explained = P, Part(half @ whitened, half @ onto.mT, half.square().sum(-1))
        # C^-1 = root_inverse root_inverse^T
        self._root_inverse = rest.back(Q[..., P.shape[1] :])

    def _refined(self, rest: qr.LeastSquares, without: Tensor) -> Tensor:
        """The least-squares solution after one step of refinement, without which that of a tiny P is all rounding."""
        z = rest.solution()
        gradient = -z
        for s, P, r in self._rows.slices():
            w = torch.where(without[:, s], 0, self._rows.root[:, s].square())[..., None]
            gradient = gradient + (w * P).mT @ (r - P @ z)
        return z + rest.back(rest.forth(gradient))

    def _independent_basis(self) -> tuple[Tensor | None, Tensor]:
        """An orthonormal basis of the columns' space that begins with the combinations of columns that all but cancel
        in every row, or None if no item has one; and which columns of the basis [B, R] they are."""
        null = _null_candidates(self._bare.root(), self._P_high)  # [B, R, R]
        cancels = null.new_ones(null.shape[:2], dtype=torch.bool)
        for _, P, _ in self._rows.slices():
            cancels = cancels & ((P @ null).abs() <= DEPENDENT * (P.abs() @ null.abs())).all(1)
        order = (~cancels).to(torch.int8).argsort(stable=True, dim=-1)
        if not bool(cancels.any()):
            return None, cancels
        chosen = torch.where(cancels[:, None], null, 0).gather(-1, order[:, None].expand_as(null))
        return torch.linalg.qr(chosen).Q, cancels.gather(-1, order)

    def parts(self) -> Iterator[tuple[slice, Part]]:
        """All rows, in chunks; masked ones are zero."""
        for s, P, r in self._rows.slices():
            w = self._rows.root[:, s].square()  # [B, n]
            v = P @ self._root_inverse
            a, W = w[..., None] * (r - P @ self._z), w[..., None] * (v @ self._root_inverse.mT)
            part = self._with_explained(s, Part(a, W, w * (1 - w * v.square().sum(-1))))
            yield s, part if self._basis is None else part._replace(W=part.W @ self._basis.mT)

    def _with_explained(self, s: slice, part: Part) -> Part:
        """Replaces the rows of H that lie in a chunk."""
        n = part.t.shape[1]
        inside = (self._high >= s.start) & (self._high < s.start + n)
        to = torch.where(inside, self._high - s.start, n)  # one row more takes those that lie elsewhere

        def replaced(chunk: Tensor, explained: Tensor) -> Tensor:
            index = to.reshape(to.shape + (1,) * (chunk.dim() - 2)).expand_as(explained)
            return torch.cat([chunk, torch.zeros_like(chunk[:, :1])], 1).scatter(1, index, explained)[:, :n]

        return Part(*map(replaced, part, self._explained))


def orthogonal_part(A: Tensor, inverse: Tensor, Q: Tensor) -> Tensor:
    """`A inverse` [B, n, m] for rows A of a matrix with the triangular factor `inverse^-1` and orthogonal factor Q.

    Q, which is the same product, has an absolute rounding error. The product is more accurate in entries whose terms
    are small, and cancels where they are large.
    """
    return torch.where(A.abs() @ inverse.abs() < 1, A @ inverse, Q)


def leverages(rows: Rows) -> Tensor:
    """h_i = |L^-1 p_i|^2 / D_i: [B, S]"""
    found = qr.regularised(rows.decomposed(values=False))

    def part(A: Tensor) -> Tensor:
        return found.forth(A.mT).square().sum(1)

    return torch.cat([part(P * rows.root[:, s, None]) for s, P, _ in rows.slices()], -1)


def _rotated(rows: Rows, basis: Tensor, cancels: Tensor) -> Tensor:
    """P [B, S, R] in a basis with columns [B, R] that cancel in it, computed with twice the digits.

    The rounding of the basis makes them combinations of the others. These are taken off.
    """
    factors = torch.cat([double_double.product(P, basis) for _, P, _ in rows.slices()], 1)
    others = torch.where(cancels[:, None], 0, factors)
    found = rows.with_factors(others, torch.where(cancels[:, None], factors, 0).mT).decomposed()
    combination = qr.regularised(found).solution()  # [B, R, R]
    return factors - others @ torch.where(combination.abs() <= BASIS_ROUNDING, combination, 0)


def _null_candidates(triangle: Tensor, explained: Tensor) -> Tensor:
    """Vectors of unit length, as columns [B, R, R], among which are those of dependent columns: right singular vectors
    of the triangle above the rows of H [B, m, R], with columns, and then the rows of H, scaled to one length."""
    lengths = _or_one(torch.cat([triangle, explained], 1).norm(dim=1))[:, None]
    rest, rows = triangle / lengths, explained / lengths
    rest, rows = rest / _or_one(rest.norm(dim=(1, 2), keepdim=True)), rows / _or_one(rows.norm(dim=2, keepdim=True))
    stacked = torch.cat([rest, rows], 1)
    right = torch.linalg.svd(torch.where(stacked.isfinite(), stacked, 0), full_matrices=False).Vh
    vectors = torch.where(right.mT.abs() > DEPENDENT, right.mT, 0) / lengths.mT  # no rounding of unrelated columns
    return vectors / vectors.norm(dim=1, keepdim=True)


def _or_one(lengths: Tensor) -> Tensor:
    return torch.where(lengths > 0, lengths, 1)


def _eye_like(matrix: Tensor) -> Tensor:
    return torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device).expand_as(matrix)
