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
from lrd_kernels.linalg import qr
from lrd_kernels.linalg.qr import Rows

DEPENDENT = 1e-13  # rounding of a combination of columns that is zero, relative to its terms


class Part(NamedTuple):
    """Rows of `Sigma^-1` times something: the product with r, the product with P, and the diagonal."""

    a: Tensor  # Sigma^-1 r [B, n, N]
    W: Tensor  # Sigma^-1 P [B, n, R]
    t: Tensor  # diag(Sigma^-1) [B, n]


class Inverse:
    """The inverse of the covariances of `rows`, and z = P^T Sigma^-1 r [B, R, N]."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        S, R = rows.S, rows.R
        leverage = leverages(rows)
        top = leverage.topk(min(R, S), -1)
        high = top.values > EXPLAINED_LEVERAGE  # [B, m]
        self.high = torch.where(high, top.indices, -1)
        without = torch.zeros_like(leverage, dtype=torch.bool).scatter(1, top.indices, high)
        bare = rows.decomposed(without)
        rest = qr.regularised(bare)

        # Positions of H that are not used hold an independent output of variance 1.
        P, r = (torch.where(high[..., None], t, 0) for t in rows.at(top.indices))  # [B, m, R], [B, m, N]
        deviation = torch.where(high, rows.root.gather(1, top.indices).reciprocal(), 1)
        Y = torch.linalg.solve_triangular(rest.triangle.mT, P.mT, upper=False)  # transposed, [B, R, m]
        Q, root = torch.linalg.qr(torch.cat([Y, torch.diag_embed(deviation)], 1), mode="complete")
        root = root[:, : P.shape[1]]  # K = root^T root
        half = torch.linalg.solve_triangular(root, _eye_like(root), upper=True)  # K^-1 = half half^T
        z, row_space = self._refined(bare, rest, without)
        a = half @ (half.mT @ (r - P @ z))
        self.z = row_space @ (z + torch.linalg.solve_triangular(rest.triangle, Y @ a, upper=True))
        W = row_space @ torch.linalg.solve_triangular(rest.triangle, Y @ half @ half.mT, upper=True)
        self._explained = Part(a, W.mT, half.square().sum(-1))
        # C^-1 = root_inverse root_inverse^T
        self._root_inverse = torch.linalg.solve_triangular(rest.triangle, Q[:, :R, P.shape[1] :], upper=True)
        self._to_W = self._root_inverse.mT @ row_space

    def _refined(self, bare: qr.LeastSquares, rest: qr.LeastSquares, without: Tensor) -> tuple[Tensor, Tensor]:
        """The least-squares solution after one step of refinement, without which that of a tiny P is all rounding, and
        the projection onto the row space of P [B, R, R]. The rounding of duplicate columns lies outside of it, where
        C^-1 is largest."""
        z = rest.solution()
        null = _null_candidates(bare.triangle)  # [B, R, R]
        gradient, exact = -z, null.new_ones(null.shape[:2], dtype=torch.bool)  # [B, R]
        for s, P, r in self.rows.slices():
            w = torch.where(without[:, s], 0, self.rows.root[:, s].square())[..., None]
            gradient = gradient + (w * P).mT @ (r - P @ z)
            exact = exact & ((P @ null).abs() <= DEPENDENT * (P.abs() @ null.abs())).all(1)
        step = torch.linalg.solve_triangular(rest.triangle.mT, gradient, upper=False)
        z = z + torch.linalg.solve_triangular(rest.triangle, step, upper=True)
        order = (~exact).to(torch.int8).argsort(stable=True, dim=-1)[:, None].expand_as(null)
        exact = exact[:, None].expand_as(null).gather(-1, order)  # null vectors first
        Q = torch.linalg.qr(torch.where(exact, null.gather(-1, order), 0)).Q
        Q = torch.where(exact, Q, 0)
        return z, _eye_like(null) - Q @ Q.mT

    def parts(self) -> Iterator[tuple[slice, Part]]:
        """All rows, in chunks; masked ones are zero."""
        for s, P, r in self.rows.slices():
            w = self.rows.root[:, s].square()  # [B, n]
            v = P @ self._root_inverse
            a, W = w[..., None] * (r - P @ self.z), w[..., None] * (v @ self._to_W)
            yield s, self._with_explained(s, Part(a, W, w * (1 - w * v.square().sum(-1))))

    def _with_explained(self, s: slice, part: Part) -> Part:
        """Replaces the rows of H that lie in a chunk."""
        n = part.t.shape[1]
        inside = (self.high >= s.start) & (self.high < s.start + n)
        to = torch.where(inside, self.high - s.start, n)  # one row more takes those that lie elsewhere

        def replaced(chunk: Tensor, explained: Tensor) -> Tensor:
            index = to.reshape(to.shape + (1,) * (chunk.dim() - 2)).expand_as(explained)
            return torch.cat([chunk, torch.zeros_like(chunk[:, :1])], 1).scatter(1, index, explained)[:, :n]

        return Part(*map(replaced, part, self._explained))


def leverages(rows: Rows) -> Tensor:
    """h_i = |L^-1 p_i|^2 / D_i: [B, S]"""
    lower = qr.regularised(rows.decomposed(values=False)).triangle.mT

    def part(A: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(lower, A.mT, upper=False).square().sum(1)

    return torch.cat([part(P * rows.root[:, s, None]) for s, P, _ in rows.slices()], -1)


def _null_candidates(triangle: Tensor) -> Tensor:
    """Right singular vectors of the triangle with its columns scaled to one length, as columns of unit length
    [B, R, R]: those of dependent columns are among them."""
    lengths = triangle.norm(dim=1)
    lengths = torch.where(lengths > 0, lengths, 1)
    right = torch.linalg.svd(torch.where(triangle.isfinite(), triangle / lengths[:, None], 0)).Vh
    vectors = right.mT / lengths[..., None]
    return vectors / vectors.norm(dim=1, keepdim=True)


def _eye_like(matrix: Tensor) -> Tensor:
    return torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device).expand_as(matrix)
