"""KL divergences of every pair of Gaussians, some of them nearly equal."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Independent, MultivariateNormal, Normal, kl_divergence
from torch.distributions import LowRankMultivariateNormal as TorchLowRank

import lrd_kernels as lrd
from benchmarks.stress import exact, inputs
from benchmarks.stress.exact import Array
from benchmarks.stress.inputs import Draw
from benchmarks.stress.items import Error, broadcast, collect, compare

KINDS = ("low rank", "low rank", "torch's", "dense", "diagonal")


class Model:
    """A Gaussian as a distribution of some kind, and exactly."""

    def __init__(self, kind: str, loc: Tensor, factor: Tensor, diag: Tensor) -> None:
        self.kind, self.loc, self.factor, self.diag = kind, loc, factor, diag
        if kind == "diagonal":
            self.scale = diag.sqrt()
            self.distribution = Independent(Normal(loc, self.scale), 1)
        elif kind == "dense":
            # any lower triangle with a positive diagonal is the root of a covariance
            S, R = factor.shape[-2:]
            square = torch.zeros(*factor.shape[:-1], S, dtype=factor.dtype)
            square[..., : min(S, R)] = factor[..., : min(S, R)] / 4
            self.tril = torch.tril(square, -1) + torch.diag_embed(diag.sqrt())
            self.distribution = MultivariateNormal(loc, scale_tril=self.tril)
        else:
            owner = TorchLowRank if kind == "torch's" else lrd.LowRankMultivariateNormal
            self.distribution = owner(loc, factor, diag)

    @property
    def batch(self) -> tuple[int, ...]:
        return tuple(self.distribution.batch_shape)

    def items(self, batch: tuple[int, ...]) -> list[tuple[Array, Decimal, Array]]:
        """Covariance, log-determinant and precision of every batch item."""
        found = []
        if self.kind == "dense":
            tril = broadcast(self.tril, batch, 2)
            for at in np.ndindex(*batch):
                inverse = exact.inverse_triangular(tril[at])
                logdet = 2 * exact.total(exact.log(np.diagonal(tril[at])))
                found.append((exact.times(tril[at], tril[at].T), logdet, exact.times(inverse.T, inverse)))
            return found
        if self.kind == "diagonal":
            P, D = exact.zeros(*batch, self.loc.shape[-1], 0), broadcast(self.scale, batch, 1) ** 2
        else:
            P, D = broadcast(self.factor, batch, 2), broadcast(self.diag, batch, 1)
        models = (exact.Gaussian(P[at], D[at]) for at in np.ndindex(*batch))
        return [(m.covariance, m.logdet, m.precision) for m in models]


def kl(g: Draw) -> Iterator[Error]:
    dtype = g.dtype(half=False)
    kinds = g.pick(KINDS), g.pick(KINDS)
    if not any(kind == "low rank" for kind in kinds):
        kinds = ("low rank", kinds[1]) if g.chance(2) else (kinds[0], "low rank")
    if kinds == ("low rank", "low rank") and g.chance(4):
        dtype = g.pick(inputs.HALF)
    S = 1 + g.index(10)
    batch = g.batch()
    plain = any(kind in ("torch's", "dense") for kind in kinds)
    x = inputs.covariances(g, dtype=dtype, batch=g.part(batch), S=S)
    if plain:
        x = x._replace(
            cov_factor=g.normal(*g.part(batch), S, 1 + g.index(4)).to(dtype),
            cov_diag=(0.05 + torch.rand(S, generator=g.generator)).to(dtype),
        )
    p = Model(kinds[0], x.loc, x.cov_factor, x.cov_diag)
    near = kinds[0] == kinds[1] and g.chance(3)
    if near:
        change = 1 + g.power(-5, -2) * g.normal(S)
        q = Model(kinds[1], x.loc, x.cov_factor, (x.cov_diag.double() * change.abs()).to(dtype))
    else:
        number, g.number = g.number, g.index(1000)
        y = inputs.covariances(g, dtype=dtype, batch=g.part(batch), S=S)
        g.number = number
        if plain:
            y = y._replace(
                cov_factor=g.normal(*g.part(batch), S, 1 + g.index(4)).to(dtype),
                cov_diag=(0.05 + torch.rand(S, generator=g.generator)).to(dtype),
            )
        q = Model(kinds[1], y.loc, y.cov_factor, y.cov_diag)
    full = tuple(torch.broadcast_shapes(p.batch, q.batch))
    actual = kl_divergence(p.distribution, q.distribution)
    truths, scales = [], []
    r = broadcast(q.loc, full, 1) - broadcast(p.loc, full, 1)
    pairs = zip(np.ndindex(*full), p.items(full), q.items(full), strict=True)
    for at, (cov, logdet_p, _), (_, logdet_q, precision) in pairs:
        trace = exact.total(precision * cov)
        maha = exact.times(r[at], exact.times(precision, r[at])).item()
        truth = (logdet_q - logdet_p + trace + maha - S) / 2
        truths.append(truth)
        scales.append(abs(truth) + (abs(logdet_q) + abs(logdet_p) + trace + maha + S) / 2000)
    truth, scale = collect(full, iter(truths)), collect(full, iter(scales))
    what = f"{kinds[0]} and {kinds[1]}, batches {p.batch} and {q.batch}{', near' if near else ''}"
    yield compare("kl_divergence", actual, truth, scale, what)


CHECKS = (kl,)
