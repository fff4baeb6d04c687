"""Methods of the distribution that make other Gaussians or statistics of the outputs."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor

import lrd_kernels as lrd
from benchmarks.stress import exact, inputs
from benchmarks.stress.exact import Array
from benchmarks.stress.inputs import Draw
from benchmarks.stress.items import (
    Error,
    absolute,
    batch_of,
    broadcast,
    collect,
    compare,
    compare_exact,
    gaussians,
    peaks,
    products,
    two_deviations,
)
from lrd_kernels import testing

Normal = lrd.LowRankMultivariateNormal


def draw(g: Draw) -> tuple[testing.Inputs, Normal, tuple[int, ...], Array]:
    """Inputs, their distribution, its batch shape and the exact Gaussians [*batch]."""
    x = inputs.covariances(g)
    batch = batch_of((x.loc, 1), (x.cov_factor, 2), (x.cov_diag, 1))
    return x, Normal(x.loc, x.cov_factor, x.cov_diag), batch, gaussians(x.cov_factor, x.cov_diag, batch)


def covariance_of(d: Normal) -> Array:
    """`diag(D) + P P^T` of a distribution's own numbers: [*batch, S, S]."""
    return products(d.cov_factor, d.cov_diag)


def condition(g: Draw) -> Iterator[Error]:
    x, d, _batch, models = draw(g)
    S = x.loc.shape[-1]
    order = torch.randperm(S, generator=g.generator)
    known = order[: g.index(S)] if S > 1 else order[:0]
    rest = torch.tensor([i for i in range(S) if i not in set(known.tolist())], dtype=torch.long)
    index: Tensor | list[int] | slice = known
    if g.chance(3):
        index = known.tolist()
    elif g.chance(3):
        index = torch.zeros(S, dtype=torch.bool).index_fill(0, known, True)
        known = known.sort().values
    value = x.value[..., known]
    full = batch_of((value, 1), (d.loc, 1))
    found = d.condition(index, value)
    models, y, mu = np.broadcast_to(models, full), broadcast(value, full, 1), broadcast(x.loc, full, 1)
    seen, other = known.numpy(), rest.numpy()
    means, covariances = [], []
    for at in np.ndindex(full):
        part = exact.Gaussian(models[at].P[seen], models[at].D[seen])
        P = models[at].P[other]
        means.append(mu[at][other] + exact.times(P, part.fitted(y[at] - mu[at][seen])))
        left = exact.times(P, part.chol_inverse.T)
        covariances.append(exact.diagonal(models[at].D[other]) + exact.times(left, left.T))
    mean, covariance = collect(full, iter(means)), collect(full, iter(covariances))
    what = f"{len(known)} of {S} known"
    if not bool(found.cov_factor.isfinite().all()):
        yield Error("condition", found.loc.dtype, float("inf"), f"factor not finite, {what}")
        return
    scale = peaks(mean, 1) + peaks(mu[..., other], 1)
    yield compare("condition", found.loc.expand(*full, len(rest)), mean, scale, f"mean, {what}")
    own = np.broadcast_to(covariance_of(found), covariance.shape)
    yield compare_exact("condition", found.loc.dtype, own, covariance, peaks(covariance, 2), f"covariance, {what}")


def marginal(g: Draw) -> Iterator[Error]:
    x, d, _, _ = draw(g)
    S = x.loc.shape[-1]
    chosen = torch.randperm(S, generator=g.generator)[: g.index(S + 1)]
    index: object = chosen
    if g.chance(3):
        chosen = chosen.sort().values
        index = torch.zeros(S, dtype=torch.bool).index_fill(0, chosen, True)
    elif g.chance(3):
        chosen, index = torch.arange(S)[1::2], slice(1, None, 2)
    found = d.marginal(index)
    pairs = (
        (found.loc, d.loc[..., chosen]),
        (found.cov_diag, d.cov_diag[..., chosen]),
        (found.cov_factor, d.cov_factor[..., chosen, :]),
    )
    yield Error("marginal", x.loc.dtype, 0.0 if all(torch.equal(a, b) for a, b in pairs) else float("inf"))


def aggregate(g: Draw) -> Iterator[Error]:
    x, d, batch, models = draw(g)
    S = x.loc.shape[-1]
    if g.chance(2):
        labels = torch.randint(-1, 4, (S,), generator=g.generator)
        reduction = g.pick(("sum", "mean"))
        found = d.aggregate(labels, reduction=reduction)
        K = max(int(labels.max()) + 1, 0)
        weights = (labels == torch.arange(K)[:, None]).double()
        w = exact.exact(weights)
        if reduction == "mean":
            w = w / exact.exact(weights.sum(-1, keepdim=True).clamp(min=1))
    else:
        given = (g.normal(1 + g.index(3), S) * g.power(-3, 3)).to(x.loc.dtype)
        found = d.aggregate(given)
        w = exact.exact(given)
    mu = broadcast(x.loc, batch, 1)
    mean = collect(batch, (exact.times(w, mu[at]) for at in np.ndindex(batch)))
    sizes = collect(batch, (exact.times(absolute(w), absolute(mu[at])) for at in np.ndindex(batch)))
    covariance = collect(batch, (exact.times(exact.times(w, m.covariance), w.T) for m in np.ravel(models)))
    yield compare("aggregate", found.mean, mean, sizes, "mean")
    # w P is a sum that can cancel: its terms set the scale
    terms = collect(
        batch,
        (
            exact.times(w * w, m.D) + exact.row_squares(exact.times(absolute(w), absolute(m.P)))
            for m in np.ravel(models)
        ),
    )
    scale = two_deviations(np.diagonal(covariance, axis1=-2, axis2=-1) + terms / 10**6)
    yield compare("aggregate", found.covariance, covariance, scale, "covariance")


def correlation(g: Draw) -> Iterator[Error]:
    x, d, batch, models = draw(g)
    S = x.loc.shape[-1]
    one = g.index(S)
    truth = collect(batch, (m.covariance[one] / exact.sqrt(m.variance[one] * m.variance) for m in np.ravel(models)))
    yield compare("correlation", d.correlation(one - S if g.chance(4) else one), truth, exact.ONE)


def quantile(g: Draw) -> Iterator[Error]:
    x, d, batch, models = draw(g)
    q = g.pick((0.5, 0.025, 0.975, 0.9))
    z = Decimal(NormalDist().inv_cdf(q))
    spread = collect(batch, (exact.sqrt(m.variance) for m in np.ravel(models)))
    mu = broadcast(x.loc, batch, 1)
    yield compare("quantile", d.quantile(q), mu + z * spread, absolute(mu) + (abs(z) + 1) * spread, f"q = {q}")


def to(g: Draw) -> Iterator[Error]:
    x, d, _, _ = draw(g)
    dtype = g.pick(testing.DTYPES)
    if not all(bool(t.to(dtype).isfinite().all()) for t in x[1:]) or not bool((x.cov_diag.to(dtype) > 0).all()):
        return
    found = d.to(dtype)
    pairs = zip((found.loc, found.cov_factor, found.cov_diag), (d.loc, d.cov_factor, d.cov_diag), strict=True)
    same = all(a.dtype == dtype and torch.equal(a, b.to(dtype)) for a, b in pairs)
    yield Error("to", dtype, 0.0 if same else float("inf"))


def from_samples(g: Draw) -> Iterator[Error]:
    dtype, batch = g.dtype(), g.batch()
    N, S = 2 + g.index(6), 1 + g.index(12)
    offset, spread = g.pick((0.0, 0.0, g.power(0, 6))), g.power(-3, 3)
    limit = torch.finfo(dtype).max / 16
    spread = min(spread, limit**0.5 / 4)  # variances must fit the dtype
    samples = (offset + spread * g.normal(N, *batch, S)).clamp(-limit, limit).to(dtype)
    floor = torch.tensor(g.power(-3, 3) * spread).to(dtype).item()
    rank = g.pick((None, None, 1 + g.index(N)))
    found = Normal.from_samples(samples, floor, rank)
    numbers = exact.exact(samples)
    mean = numbers.sum(0) / N
    deviations = (numbers - mean) / Decimal(N - 1).sqrt()
    columns = np.moveaxis(deviations, 0, -1)  # [..., S, N]
    peak = np.abs(numbers).max(0)
    yield compare("from_samples", found.loc, mean, peak, "mean")
    model = collect(
        batch,
        (
            exact.diagonal(np.full(S, Decimal(floor), dtype=object)) + exact.times(columns[at], columns[at].T)
            for at in np.ndindex(batch)
        ),
    )
    variances = np.diagonal(model, axis1=-2, axis2=-1)
    own = covariance_of(found)
    if rank is None:
        yield compare_exact(
            "from_samples", dtype, own, model, two_deviations(variances), f"covariance, offset {offset:.3g}"
        )
    else:
        diagonal = np.diagonal(own, axis1=-2, axis2=-1)
        yield compare_exact("from_samples", dtype, diagonal, variances, variances, f"variances, offset {offset:.3g}")


CHECKS = (condition, marginal, aggregate, correlation, quantile, to, from_samples)
