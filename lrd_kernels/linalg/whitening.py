"""Square roots of a covariance, which map values to independent noise and back, in float64.

With A = D^-1/2 P = U diag(s) V^T, the root `D^1/2 (I + A A^T)^1/2` is applied through V and s alone. Its two parts
cancel in outputs that the low-rank part explains almost completely (leverage close to 1). There are at most R of them.
They are conditioned on the other outputs instead: with z the mean of the latent variables given these, an explained
output is `P_H z` plus noise of covariance `K = D_H + P_H C^-1 P_H^T`, whose root is triangular.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lrd_kernels._policy import ROOT_LEVERAGE
from lrd_kernels.linalg import capacitance, products, qr
from lrd_kernels.linalg.qr_inverse import leverages
from lrd_kernels.ops import dispatch
from lrd_kernels.ops.views import BatchViews


class Explained(NamedTuple):
    """The explained outputs H, up to m. Places that are not used repeat an output, with `used` False."""

    positions: Tensor  # [..., m]
    used: Tensor  # [..., m]
    factor: Tensor  # [..., m, R], zero where not used
    root: Tensor  # lower root of K [..., m, m]


class Root(NamedTuple):
    """A square root of Sigma."""

    factor: Tensor  # P [..., S, R]
    deviation: Tensor  # D^1/2 [..., S]
    vectors: Tensor  # V [..., R, R]
    scale: Tensor  # sqrt(1 + s^2) [..., R]
    explained: Explained | None

    def whiten(self, diff: Tensor) -> Tensor:
        """Independent standard normal numbers from differences to the mean [..., S]."""
        x = self._without(diff / self.deviation)
        along = self._project(x)
        noise = x - self._without(self._lift(along / (self.scale * (self.scale + 1))[..., None, :]) / self.deviation)
        if self.explained is None:
            return noise
        left = self._at(diff) - self._expected(along)
        left = torch.linalg.solve_triangular(self.explained.root, left[..., None], upper=False)[..., 0]
        return self._put(noise, left)

    def unwhiten(self, noise: Tensor) -> Tensor:
        """The inverse of `whiten`."""
        x = self._without(noise)
        along = self._project(x)
        diff = self.deviation * x + self._lift(along / (self.scale + 1)[..., None, :])
        if self.explained is None:
            return diff
        # z needs the whitened outputs times the root: V^T A^T (I + A A^T)^1/2 x = scale V^T A^T x
        expected = self._expected(along * self.scale[..., None, :])
        return self._put(diff, expected + (self.explained.root @ self._at(noise)[..., None])[..., 0])

    def _project(self, x: Tensor) -> Tensor:
        """V^T A^T x: [..., 1, R]"""
        return products.project(self.factor, (x / self.deviation)[..., None, :]) @ self.vectors

    def _lift(self, along: Tensor) -> Tensor:
        """P V c: [..., S]"""
        return products.lift(self.factor, along @ self.vectors.mT)[..., 0, :]

    def _expected(self, along: Tensor) -> Tensor:
        """P_H z, from V^T A^T x: [..., m]"""
        assert self.explained is not None
        z = (along / self.scale.square()[..., None, :]) @ self.vectors.mT
        return (z @ self.explained.factor.mT)[..., 0, :]

    def _without(self, x: Tensor) -> Tensor:
        if self.explained is None:
            return x
        out = torch.zeros(*self.explained.positions.shape[:-1], x.shape[-1], dtype=torch.bool, device=x.device)
        return torch.where(out.scatter(-1, self.explained.positions, self.explained.used), 0, x)

    def _at(self, x: Tensor) -> Tensor:
        """[..., m]; zero where not used"""
        assert self.explained is not None
        index, used, *_ = self.explained
        batch = torch.broadcast_shapes(x.shape[:-1], index.shape[:-1])
        return torch.where(used, x.expand(*batch, -1).gather(-1, index.expand(*batch, -1)), 0)

    def _put(self, x: Tensor, explained: Tensor) -> Tensor:
        """x with its entries in H replaced."""
        assert self.explained is not None
        index, used, *_ = self.explained
        to = torch.where(used, index, x.shape[-1])  # one entry more takes what is not used
        longer = torch.cat([x, torch.zeros_like(x[..., :1])], -1).expand(*explained.shape[:-1], -1)
        return longer.scatter(-1, to.expand_as(explained), explained)[..., :-1]


def root_of(factor: Tensor, diag: Tensor) -> Root:
    """A square root of the covariance: the symmetric one but for explained outputs.

    The Gram matrix is enough if it is small, which is looked at in eager mode on the CPU; else QR is used.
    """
    deviation = diag.double().sqrt()
    if dispatch.may_inspect(factor):
        gram = capacitance.gram(factor, diag)
        if gram.numel() == 0 or not float(gram.diagonal(dim1=-2, dim2=-1).sum(-1).max()) > 1 / (1 - ROOT_LEVERAGE):
            values, vectors = capacitance.eigenvectors(gram)
            return Root(factor, deviation, vectors, (1 + values.clamp(min=0)).sqrt(), None)
    views = BatchViews(factor, diag, None, ())
    rows = qr.Rows(views.factor(factor), views.gaussians(diag).double(), None, None)
    found = leverages(rows).topk(min(rows.R, rows.S), -1)
    used, index = found.values > ROOT_LEVERAGE, found.indices  # [B, m]
    without = torch.zeros_like(rows.root, dtype=torch.bool).scatter(1, index, used)
    _, singular, right = torch.linalg.svd(rows.decomposed(without, values=False).root())
    vectors, scale = right.mT, (1 + singular.square()).sqrt()
    P = torch.where(used[..., None], rows.at(index)[0], 0)
    spread = torch.diag_embed(torch.where(used, rows.root.gather(1, index).reciprocal(), 1))
    upper = torch.linalg.qr(torch.cat([((P @ vectors) / scale[:, None]).mT, spread], 1)).R
    signs = torch.where(upper.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0)[..., None]
    explained = Explained(*(views.from_gaussians(t) for t in (index, used, P, (signs * upper).mT)))
    return Root(factor, deviation, views.from_gaussians(vectors), views.from_gaussians(scale), explained)
