"""Products and solutions with a covariance: solve, matvec, rsample, whiten and unwhiten, and the dense matrices."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

import lrd_kernels as lrd
from benchmarks.stress import exact, inputs
from benchmarks.stress.inputs import Draw
from benchmarks.stress.items import (
    Error,
    absolute,
    batch_of,
    broadcast,
    collect,
    compare,
    compare_exact,
    compare_gradient,
    gaussians,
    or_one,
    peaks,
    products,
    two_deviations,
)


def solve(g: Draw) -> Iterator[Error]:
    x = inputs.covariances(g)
    batch = batch_of((x.value, 1), (x.cov_factor, 2), (x.cov_diag, 1))
    models, rhs = gaussians(x.cov_factor, x.cov_diag, batch), broadcast(x.value, batch, 1)
    truth = collect(batch, (models[at].solve(rhs[at]) for at in np.ndindex(batch)))
    if g.chance(2):
        actual = lrd.solve(x.value, x.cov_factor, x.cov_diag)
        yield compare("solve", actual, truth, peaks(truth, 1))
        return
    # With s = Sigma^-1 grad: d rhs = s, d P = -(s z^T + x z_s^T), d D = -s x
    grad = g.normal(*batch, x.value.shape[-1]).to(x.value.dtype)
    leaves = [t.detach().requires_grad_() for t in (x.value, x.cov_factor, x.cov_diag)]
    actual = lrd.solve(*leaves)
    yield compare("solve", actual, truth, peaks(truth, 1))
    grads = torch.autograd.grad(actual, leaves, grad)
    wide = exact.exact(grad)
    for_rhs = collect(batch, (models[at].solve(wide[at]) for at in np.ndindex(batch)))
    for_factor = collect(
        batch,
        (
            -for_rhs[at][:, None] * models[at].fitted(rhs[at])[None]
            - truth[at][:, None] * models[at].fitted(wide[at])[None]
            for at in np.ndindex(batch)
        ),
    )
    names = ("rhs", "cov_factor", "cov_diag")
    for name, found, full, events in zip(names, grads, (for_rhs, for_factor, -for_rhs * truth), (1, 2, 1), strict=True):
        yield compare_gradient("solve, gradients", found, full, events, name)


def matvec(g: Draw) -> Iterator[Error]:
    x = inputs.covariances(g)
    batch = batch_of((x.value, 1), (x.cov_factor, 2), (x.cov_diag, 1))
    P, D, v = broadcast(x.cov_factor, batch, 2), broadcast(x.cov_diag, batch, 1), broadcast(x.value, batch, 1)

    def product(P: exact.Array, D: exact.Array, v: exact.Array) -> exact.Array:
        return collect(
            batch, (D[at] * v[at] + exact.times(P[at], exact.times(P[at].T, v[at])) for at in np.ndindex(batch))
        )

    actual = lrd.matvec(x.value, x.cov_factor, x.cov_diag)
    yield compare("matvec", actual, product(P, D, v), product(absolute(P), D, absolute(v)))


def rsample(g: Draw) -> Iterator[Error]:
    x = inputs.covariances(g)
    batch = batch_of((x.loc, 1), (x.cov_factor, 2), (x.cov_diag, 1))
    S, R = x.cov_factor.shape[-2:]
    drawn = g.pick(((), (3,), (2, 2)))
    mask = inputs.masked(g, batch, S)
    if mask is not None and mask.dim() - 1 > len(batch):
        mask = None
    noise = tuple(g.normal(*drawn, *batch, size).to(x.loc.dtype) for size in (R, S))
    actual = lrd.rsample(x.loc, x.cov_factor, x.cov_diag, drawn, noise=noise, mask=mask)
    if tuple(actual.shape) != (*drawn, *batch, S):
        yield Error("rsample", actual.dtype, float("inf"), f"shape {tuple(actual.shape)}")
        return
    P, D, mu = broadcast(x.cov_factor, batch, 2), broadcast(x.cov_diag, batch, 1), broadcast(x.loc, batch, 1)
    columns, outputs = map(exact.exact, noise)
    truth, scale = np.empty(actual.shape, dtype=object), np.empty(actual.shape, dtype=object)
    for which in np.ndindex(drawn):
        for at in np.ndindex(batch):
            n, own = columns[which + at], exact.sqrt(D[at]) * outputs[which + at]
            truth[which + at] = mu[at] + exact.times(P[at], n) + own
            scale[which + at] = absolute(mu[at]) + exact.times(absolute(P[at]), absolute(n)) + absolute(own)
    if mask is not None:
        kept = np.broadcast_to(mask.numpy(), truth.shape)
        truth = np.where(kept, truth, np.broadcast_to(mu, truth.shape))
    yield compare("rsample", actual, truth, scale)


def whiten(g: Draw) -> Iterator[Error]:
    """The squared length is the Mahalanobis term, and unwhiten leads back."""
    x = inputs.covariances(g)
    batch_of((x.loc, 1), (x.cov_factor, 2), (x.cov_diag, 1))
    d = lrd.LowRankMultivariateNormal(x.loc, x.cov_factor, x.cov_diag)
    full = batch_of((x.value, 1), (d.loc, 1))
    models = gaussians(x.cov_factor, x.cov_diag, full)
    y = broadcast(x.value, full, 1)
    r = y - broadcast(x.loc, full, 1)
    noise = d.whiten(x.value)
    if tuple(noise.shape) != r.shape:
        yield Error("whiten", noise.dtype, float("inf"), f"shape {tuple(noise.shape)}")
        return
    maha = collect(full, (exact.times(r[at], models[at].solve(r[at])) for at in np.ndindex(full)))
    most = torch.finfo(noise.dtype).max
    if not all(m.sqrt() < exact.Decimal(most) for m in np.ravel(maha)):
        return
    n = exact.exact(noise)
    lengths = collect(full, (exact.times(n[at], n[at]) for at in np.ndindex(full)))
    yield compare_exact("whiten", noise.dtype, lengths, maha, or_one(maha))
    variance = collect(full, (exact.largest(models[at].variance) for at in np.ndindex(full)))
    scale = (
        peaks(y, 1)
        + peaks(broadcast(x.loc, full, 1), 1)
        + np.asarray(exact.sqrt(variance * maha), dtype=object)[..., None]
    )
    yield compare("whiten, unwhiten in turn", d.unwhiten(noise), y, scale)


def unwhiten(g: Draw) -> Iterator[Error]:
    """The images of all unit vectors have the covariance as the sum of their products."""
    x = inputs.covariances(g)
    batch, S = batch_of((x.cov_factor, 2), (x.cov_diag, 1)), x.cov_diag.shape[-1]
    d = lrd.LowRankMultivariateNormal(torch.zeros_like(x.cov_diag), x.cov_factor, x.cov_diag)
    units = torch.eye(S, dtype=x.loc.dtype).reshape(S, *(1,) * len(batch), S).expand(S, *batch, S)
    images = d.unwhiten(units).movedim(0, -1)  # [..., S, S]
    if not bool(images.isfinite().all()):
        yield Error("unwhiten", images.dtype, float("inf"), "not finite")
        return
    models = gaussians(x.cov_factor, x.cov_diag, batch)
    truth = collect(batch, (models[at].covariance for at in np.ndindex(batch)))
    variance = collect(batch, (models[at].variance for at in np.ndindex(batch)))
    yield compare_exact("unwhiten", images.dtype, products(images), truth, two_deviations(variance))


def precision_matrix(g: Draw) -> Iterator[Error]:
    x = inputs.covariances(g)
    batch = batch_of((x.loc, 1), (x.cov_factor, 2), (x.cov_diag, 1))
    actual = lrd.LowRankMultivariateNormal(x.loc, x.cov_factor, x.cov_diag).precision_matrix
    models = gaussians(x.cov_factor, x.cov_diag, batch)
    truth = collect(batch, (models[at].precision for at in np.ndindex(batch)))
    yield compare("precision_matrix", actual, truth, peaks(truth, 2))


def scale_tril(g: Draw) -> Iterator[Error]:
    x = inputs.covariances(g)
    batch = batch_of((x.loc, 1), (x.cov_factor, 2), (x.cov_diag, 1))
    actual = lrd.LowRankMultivariateNormal(x.loc, x.cov_factor, x.cov_diag).scale_tril
    models = gaussians(x.cov_factor, x.cov_diag, batch)
    truth = collect(batch, (models[at].covariance for at in np.ndindex(batch)))
    variance = collect(batch, (models[at].variance for at in np.ndindex(batch)))
    if bool(actual.triu(1).any()):
        yield Error("scale_tril", actual.dtype, float("inf"), "not lower triangular")
    yield compare_exact("scale_tril", actual.dtype, products(actual), truth, two_deviations(variance))


def variance(g: Draw) -> Iterator[Error]:
    """`variance` and `stddev` of the distribution."""
    x = inputs.covariances(g)
    batch = batch_of((x.loc, 1), (x.cov_factor, 2), (x.cov_diag, 1))
    d = lrd.LowRankMultivariateNormal(x.loc, x.cov_factor, x.cov_diag)
    models = gaussians(x.cov_factor, x.cov_diag, batch)
    truth = collect(batch, (models[at].variance for at in np.ndindex(batch)))
    yield compare("variance", d.variance, truth, truth)
    yield compare("variance", d.stddev, exact.sqrt(truth), exact.sqrt(truth), "stddev")


CHECKS = (solve, matvec, rsample, whiten, unwhiten, precision_matrix, scale_tril, variance)
