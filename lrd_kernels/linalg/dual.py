"""Covariances with more columns than outputs, in float64: Sigma itself is then the smallest matrix.

Its triangular root comes from a Cholesky factorisation where that is accurate, else from a QR decomposition of
[P^T; D^1/2], so that Sigma is not formed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lrd_kernels._policy import DUAL_TRACE, QR_GROWTH
from lrd_kernels.linalg.qr import Rows
from lrd_kernels.linalg.qr_inverse import Inverse, Part, orthogonal_part
from lrd_kernels.ops import dispatch

RESOLVED = 1e-4  # pivots below this share of their column have lost too many digits


class Dual:
    """The inverse of the covariances of `rows`, with the attributes and methods of `qr_inverse.Inverse`."""

    def __init__(self, rows: Rows, *, cholesky: bool = False) -> None:
        """`cholesky` permits a Cholesky factorisation if all items are well-conditioned, which is looked at."""
        self._rows = rows
        every = torch.arange(rows.S, device=rows.root.device).expand(rows.B, -1)
        self._P, self._r = rows.at(every)  # [B, S, R], [B, S, N]
        deviation = torch.where(rows.root == 0, 1, rows.root.reciprocal())  # a masked output is independent
        root = self._root_by_cholesky(deviation) if cholesky and dispatch.may_inspect(rows.root) else None
        if root is not None:
            self.resolved = torch.ones_like(deviation[:, 0], dtype=torch.bool)
            self._half = _inverse(root)  # Sigma^-1 = half half^T
            self._onto = self._half.mT @ self._P  # half^T P [B, S, R]
        else:
            order = self._P.abs().amax(1).argsort(-1, descending=True)[:, None].expand_as(self._P)  # long rows first
            stacked = torch.cat([self._P.gather(2, order).mT, torch.diag_embed(deviation)], 1)
            Q, root = torch.linalg.qr(stacked)
            lengths = stacked.norm(dim=1)
            # [B]; columns that depend on one another, whose small pivots are rounding, are better served by `Inverse`
            self.resolved = (root.diagonal(dim1=-2, dim2=-1).abs() > RESOLVED * lengths).all(-1)
            self._half = _inverse(root)
            turned = torch.empty_like(self._P).scatter(2, order, Q[:, : rows.R].mT)
            self._onto = orthogonal_part(self._P.mT, self._half, turned.mT).mT
        self._logdet = 2 * root.diagonal(dim1=-2, dim2=-1).abs().log().sum(-1)
        self._whitened = self._half.mT @ self._r  # [B, S, N]
        self.z = self._onto.mT @ self._whitened

    def _root_by_cholesky(self, deviation: Tensor) -> Tensor | None:
        """The upper triangular root of Sigma, or None where it might lose digits."""
        scaled = self._P / deviation[..., None]
        if not bool((scaled.square().sum((-2, -1)) <= DUAL_TRACE).all()):
            return None
        correlation = scaled @ scaled.mT
        correlation.diagonal(dim1=-2, dim2=-1).add_(1)
        return torch.linalg.cholesky(correlation).mT * deviation[:, None]

    def factorised(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The results of `qr.factorise`, with no elements in place of L^-1."""
        good = self._rows.finite() & self._logdet.isfinite()
        growth = torch.where(good, QR_GROWTH, torch.inf).to(self._logdet)
        maha = self._whitened.square().sum(1)
        nothing = self._half.new_empty(self._rows.B, 0, 0)
        return nothing, torch.stack([growth, self._logdet], -1), self.z.mT.contiguous(), maha

    def parts(self) -> Iterator[tuple[slice, Part]]:
        """All rows, in one chunk."""
        products = self._half @ self._whitened, self._half @ self._onto
        yield slice(0, self._rows.S), Part(*products, self._half.square().sum(-1))


class Either:
    """`Dual` for the items that it resolves, `Inverse` for the others, which takes longer at high ranks: where numbers
    may not be looked at, ranks above DUAL_RANK use `Dual` alone."""

    def __init__(self, rows: Rows, *, cholesky: bool = False) -> None:
        self._dual = Dual(rows, cholesky=cholesky)
        self._chosen = self._dual.resolved[:, None, None]
        enough = bool(self._chosen.all()) if dispatch.may_inspect(rows.root) else rows.wide
        self._inverse = None if enough else Inverse(rows)
        self.z = self._dual.z
        if self._inverse is not None:
            self.z = torch.where(self._chosen, self.z, self._inverse.z)

    def parts(self) -> Iterator[tuple[slice, Part]]:
        if self._inverse is None:
            yield from self._dual.parts()
            return
        rows, dual = next(self._dual.parts())
        parts = zip(*(part for _, part in self._inverse.parts()), strict=True)
        inverse = Part(*(torch.cat(chunks, 1) for chunks in parts))
        a, W = (torch.where(self._chosen, *both) for both in zip(dual[:2], inverse[:2], strict=True))
        yield rows, Part(a, W, torch.where(self._chosen[..., 0], dual.t, inverse.t))


def _inverse(root: Tensor) -> Tensor:
    """The inverse of an upper triangular matrix."""
    eye = torch.eye(root.shape[-1], dtype=root.dtype, device=root.device).expand_as(root)
    return torch.linalg.solve_triangular(root, eye, upper=True)
