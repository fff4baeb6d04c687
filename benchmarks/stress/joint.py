"""Joint Gaussians of sampled predictions: `joint`, `JointAccumulator` and `mixture_log_prob`."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import NamedTuple

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
    exceeds,
    gaussians,
    or_one,
    products,
    two_deviations,
)
from lrd_kernels import testing


class Predictions(NamedTuple):
    """T predictions: means [T, ..., S], factors [T, ..., S, R] or None, diagonals [T, ..., S]."""

    means: Tensor
    factors: Tensor | None
    diags: Tensor


def predictions(g: Draw, batch: Sequence[int], T: int) -> Predictions:
    S, R = g.sizes(most=12, columns=3)
    x = inputs.covariances(g, batch=(T, *batch), S=S, R=max(R, 1))
    full = (T, *batch)
    means = x.loc.expand(*full, S).clone()
    if g.chance(3):  # means that differ little, far from 0
        limit = torch.finfo(means.dtype).max / 16
        means = (means.double() + g.power(0, 6) * (1 + g.normal(S))).clamp(-limit, limit).to(means.dtype)
    factors = testing.in_layout(x.cov_factor.expand(*full, S, R or 1).clone(), g.pick(testing.LAYOUTS))
    return Predictions(means, None if R == 0 or g.chance(8) else factors, x.cov_diag.expand(*full, S).clone())


class Moments(NamedTuple):
    """Mean [..., S], its terms, diagonal [..., S], and the aleatoric and epistemic columns [..., S, C]."""

    mean: Array
    terms: Array
    diag: Array
    aleatoric: Array
    epistemic: Array

    def covariance(self, part: str) -> Array:
        columns = {
            "joint": np.concatenate([self.aleatoric, self.epistemic], -1),
            "aleatoric": self.aleatoric,
            "epistemic": self.epistemic,
        }[part]
        square = collect(
            self.mean.shape[:-1], (exact.times(columns[at], columns[at].T) for at in np.ndindex(self.mean.shape[:-1]))
        )
        if part == "epistemic":
            return square
        return square + self.diag[..., :, None] * exact.eye(self.diag.shape[-1])


def moments(p: Predictions) -> Moments:
    """By the law of total covariance, exactly."""
    means, diags = exact.exact(p.means), exact.exact(p.diags)
    T = len(means)
    mean = means.sum(0) / T
    if p.factors is None:
        aleatoric = exact.zeros(*mean.shape, 0)
    else:
        scaled = exact.exact(p.factors) / Decimal(T).sqrt()
        aleatoric = np.concatenate(list(scaled), -1)
    deviations = (means - mean) / Decimal(max(T - 1, 1)).sqrt()
    epistemic = np.moveaxis(deviations, 0, -1) if T > 1 else exact.zeros(*mean.shape, 0)
    return Moments(mean, absolute(means).sum(0) / T, diags.sum(0) / len(diags), aleatoric, epistemic)


def compare_model(
    found: lrd.LowRankMultivariateNormal, right: Moments, part: str, whole: bool, what: str
) -> Iterator[Error]:
    """Compares mean, variances and, if no column was dropped, the whole covariance of a model."""
    dtype = found.loc.dtype
    what = f"{part}, {what}"
    variances = exact.largest(np.diagonal(right.covariance(part), axis1=-2, axis2=-1))
    if not bool(found.cov_factor.isfinite().all() & found.cov_diag.isfinite().all()):
        if whole or not exceeds(variances, found.cov_diag):  # a dropped column may put its variance on the diagonal
            yield Error("joint: covariance", dtype, float("inf"), f"not finite, {what}")
        return
    yield compare("joint: mean", found.loc, right.mean, right.terms, what)
    truth = right.covariance(part)
    variance = np.diagonal(truth, axis1=-2, axis2=-1)
    own = products(found.cov_factor, found.cov_diag)
    if part != "aleatoric":  # differences of means are computed in float64, and rounded as it rounds
        rounding = Decimal("0.1") if dtype == torch.float64 else Decimal("1e-8")
        spread = (exact.sqrt(variance) + rounding * right.terms) ** 2
    else:
        spread = variance
    if whole:
        yield compare_exact("joint: covariance", dtype, own, truth, two_deviations(spread), what)
    else:
        yield compare_exact("joint: variances", dtype, np.diagonal(own, axis1=-2, axis2=-1), variance, spread, what)


def joint(g: Draw) -> Iterator[Error]:
    batch, T = g.pick(((), (), (2,), (1, 2))), g.pick((1, 2, 3, 5))
    p = predictions(g, batch, T)
    given = p
    if T > 1 and g.chance(4):  # one aleatoric part for all
        given = Predictions(p.means, None if p.factors is None else p.factors[:1], p.diags[:1])
        p = Predictions(
            p.means, None if p.factors is None else p.factors[:1].expand_as(p.factors), p.diags[:1].expand_as(p.diags)
        )
    right = moments(p)
    columns = right.aleatoric.shape[-1] + right.epistemic.shape[-1]
    rank = g.pick((None, None, 1 + g.index(max(columns, 1)), columns + 2))
    parts = bool(g.index(2))
    found = lrd.joint(*given, rank=rank, parts=parts)
    whole = rank is None or rank >= columns
    what = f"T {T}, rank {rank}"
    yield from compare_model(found, right, "joint", whole, what)
    if not whole and bool(found.cov_factor.isfinite().all()):
        yield from _kept(found, right, what)
    if parts:
        whole_part = rank is None or rank >= right.aleatoric.shape[-1]
        yield from compare_model(found.aleatoric, right, "aleatoric", whole_part, what)
        whole_part = rank is None or rank >= right.epistemic.shape[-1]
        yield from compare_model(found.epistemic, right, "epistemic", whole_part, what)


def _kept(found: lrd.LowRankMultivariateNormal, right: Moments, what: str) -> Iterator[Error]:
    """The variance that the kept columns explain beside that of the best columns of this number."""
    columns = np.concatenate([right.aleatoric, right.epistemic], -1)
    F = exact.exact(found.cov_factor)
    worst = exact.ZERO
    for at in np.ndindex(columns.shape[:-2]):
        values = exact.jacobi(columns[at])[0]
        best = exact.total(values[: F.shape[-1]] ** 2)
        if best > Decimal(torch.finfo(found.loc.dtype).smallest_normal):
            worst = max(worst, abs(exact.total(F[at] * F[at]) - best) / best)
    yield Error("joint: kept part", found.loc.dtype, float(worst), what)


def accumulator(g: Draw) -> Iterator[Error]:
    """Updates in any order, over several accumulators that are merged, saved and restored on the way."""
    batch, T = g.pick(((), (2,))), 1 + g.index(6)
    p = predictions(g, batch, T)
    right = moments(p)
    rank, oversample = 1 + g.index(8), g.pick((None, 0, 2, 20))
    pieces = [lrd.JointAccumulator(rank, oversample) for _ in range(1 + g.index(3))]
    for t in torch.randperm(T, generator=g.generator).tolist():
        piece = g.pick(pieces)
        piece.update(p.means[t], None if p.factors is None else p.factors[t], p.diags[t])
        if g.chance(4):
            pieces[pieces.index(piece)] = _restored(piece)
    while len(pieces) > 1:
        other = pieces.pop()
        if g.chance(2):
            pieces[0].merge(other)
        else:
            pieces[0] = other.merge(pieces[0])
    found = pieces[0].finalize()
    room = rank + (rank if oversample is None else oversample)
    columns = {"aleatoric": right.aleatoric.shape[-1], "epistemic": right.epistemic.shape[-1]}
    what = f"T {T}, rank {rank} + {room - rank}"
    if pieces[0].count != T:
        yield Error("joint: mean", p.means.dtype, float("inf"), f"count {pieces[0].count}, {what}")
    exactly = all(n <= room for n in columns.values())
    yield from compare_model(found, right, "joint", exactly and sum(columns.values()) <= rank, what)
    for part, n in columns.items():
        yield from compare_model(getattr(found, part), right, part, n <= min(rank, room), what)


def _restored(accumulator: lrd.JointAccumulator) -> lrd.JointAccumulator:
    file = io.BytesIO()
    torch.save(accumulator.state_dict(), file)
    file.seek(0)
    other = lrd.JointAccumulator(1)
    other.load_state_dict(torch.load(file, weights_only=True))
    return other


def mixture_log_prob(g: Draw) -> Iterator[Error]:
    batch, T = g.batch(), g.pick((1, 2, 3))
    S, R = g.sizes(most=12, columns=4)
    x = inputs.covariances(g, batch=(T, *batch), S=S, R=R)
    means = x.loc.expand(T, *batch, S)
    few = g.chance(3)
    factors = x.cov_factor.expand(T, *batch, S, R)[: 1 if few else T]
    diags = x.cov_diag.expand(T, *batch, S)[: 1 if g.chance(4) else T]
    value = x.value.reshape(-1, S)[0].expand(*g.part(batch), S)
    mask = inputs.masked(g, batch, S)
    shape = batch_of((value, 1), (means[0], 1))
    if mask is not None:
        shape = tuple(torch.broadcast_shapes(shape, mask.shape[:-1]))
    actual = lrd.mixture_log_prob(value, means, factors, diags, mask=mask, chunk=1 + g.index(3))
    kept = np.ones((*shape, S), dtype=bool) if mask is None else np.broadcast_to(mask.numpy(), (*shape, S))
    parts = []
    y = broadcast(value, shape, 1)
    for t in range(T):
        models = gaussians(factors[t if len(factors) > 1 else 0], diags[t if len(diags) > 1 else 0], shape)
        parts.append(collect(shape, iter(_log_probs(models, y - broadcast(means[t], shape, 1), kept, shape))))
    log_probs = np.stack(parts)
    top = np.max(log_probs, 0)
    truth = np.asarray(exact.log(exact.exp(log_probs - top).sum(0) / T) + top, dtype=object)
    yield compare("mixture_log_prob", actual, truth, or_one(truth), f"T {T}")


def _log_probs(models: Array, r: Array, kept: Array, shape: Sequence[int]) -> list[Decimal]:
    found = []
    for at in np.ndindex(*shape):
        rows = kept[at]
        model = exact.Gaussian(models[at].P[rows], models[at].D[rows])
        maha = exact.times(r[at][rows], model.solve(r[at][rows])).item()
        found.append(-(maha + model.logdet + int(rows.sum()) * (2 * exact.PI).ln()) / 2)
    return found


CHECKS = (joint, accumulator, mixture_log_prob)
