"""`truncate` in all its forms, and the modes: singular values, directions, and variances that are kept."""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import Decimal

import numpy as np
import torch

import lrd_kernels as lrd
from benchmarks.stress import exact, inputs
from benchmarks.stress.exact import Array
from benchmarks.stress.inputs import Draw
from benchmarks.stress.items import Error, batch_of, broadcast, collect, compare, compare_exact, exceeds

SMALLEST = Decimal("1e-6")  # of the largest singular value: smaller ones are compared with this share of it


def factors(g: Draw):
    """Random inputs; every other case has singular values over many orders of magnitude."""
    x = inputs.covariances(g)
    S, R = x.cov_factor.shape[-2:]
    if R > 1 and g.chance(3):
        values = 10 ** (-6 * torch.rand(R, generator=g.generator).double()).sort(descending=True).values
        scale = g.pick((1.0, 1.0, 1e4, 1e20, 1e-20, 1e-25))
        rotation = torch.linalg.qr(g.normal(R, R))[0]
        rows = torch.linalg.qr(g.normal(max(S, R), R))[0][:S]
        wide = ((rows * values) @ rotation * scale).to(x.cov_factor.dtype)
        if bool(wide.isfinite().all()):
            x.cov_factor.copy_(wide.expand_as(x.cov_factor))
            g.family = f"singular values over 1e6, times {scale:g}"
    return x


def truncate(g: Draw) -> Iterator[Error]:
    x = factors(g)
    R = x.cov_factor.shape[-1]
    batch = batch_of((x.cov_factor, 2), (x.cov_diag, 1))
    fold = not g.chance(4)
    energy = None
    rank = g.pick((None, None, g.index(R + 2), g.index(R + 2)))
    if rank is None and g.chance(3):
        energy = g.pick((0.5, 0.9, 0.999, 1.0))
    kept, diag, singular = lrd.truncate(x.cov_factor, x.cov_diag, rank, energy=energy, fold=fold)
    dtype, k = kept.dtype, kept.shape[-1]
    P, D = broadcast(x.cov_factor, batch, 2), broadcast(x.cov_diag, batch, 1)
    values = _singular_values(P, batch)
    what = f"rank {rank}, energy {energy}, fold {fold}"
    if energy is None and k != (R if rank is None else min(rank, R)):
        yield Error("truncate: singular values", dtype, float("inf"), f"{k} columns, {what}")
        return
    if energy is not None:
        yield Error(
            "truncate: singular values", dtype, _energy_error(values, k, Decimal(energy)), f"{k} columns, {what}"
        )
    if not bool(kept.isfinite().all() & diag.isfinite().all() & singular.isfinite().all()):
        variance = exact.largest(D + _row_squares(P, batch))
        if not (fold and exceeds(variance, diag) and bool(kept.isfinite().all() & singular.isfinite().all())):
            yield Error("truncate: singular values", dtype, float("inf"), f"not finite, {what}")
        return
    if k:
        scale = np.maximum(values[..., :k], SMALLEST * values[..., :1])
        yield compare("truncate: singular values", singular, values[..., :k], scale, what)
        yield from _columns(exact.exact(kept), P, values, batch, dtype, what)
    if not fold:
        same = torch.equal(diag, x.cov_diag.expand_as(diag))
        yield Error("truncate: diagonal without fold", dtype, 0.0 if same else float("inf"), what)
        return
    own = exact.exact(diag) + _row_squares(exact.exact(kept), batch)
    variance = D + _row_squares(P, batch)
    yield compare_exact("truncate: variances", dtype, own, variance, variance, what)
    if not bool((diag > 0).all()):
        yield Error("truncate: variances", dtype, float("inf"), f"a diagonal entry is {float(diag.min()):.3g}, {what}")


def modes(g: Draw) -> Iterator[Error]:
    x = factors(g)
    R = x.cov_factor.shape[-1]
    d = lrd.LowRankMultivariateNormal(torch.zeros_like(x.cov_diag), x.cov_factor, x.cov_diag)
    batch = batch_of((x.cov_factor, 2), (x.cov_diag, 1))
    found = d.modes(g.pick((None, g.index(R + 1))))
    k = found.vectors.shape[-1]
    if not k:
        return
    P = broadcast(x.cov_factor, batch, 2)
    values = _singular_values(P, batch)
    scale = np.maximum(values[..., :k], SMALLEST * values[..., :1])
    yield compare("truncate: singular values", found.singular_values, values[..., :k], scale, "modes")
    if not bool(found.vectors.isfinite().all()):
        yield Error("modes", found.vectors.dtype, float("inf"), "not finite")
        return
    V = exact.exact(found.vectors)
    gram = collect(batch, (exact.times(V[at].T, V[at]) for at in np.ndindex(batch)))
    # A direction is defined where its singular value is not rounding; zero columns have none.
    wanted = np.where(values[..., :k] > SMALLEST * values[..., :1], exact.ONE, exact.ZERO)
    truth = collect(batch, (exact.diagonal(wanted[at]) for at in np.ndindex(batch)))
    both = wanted[..., :, None] * wanted[..., None, :]
    yield compare_exact("modes", found.vectors.dtype, gram * both, truth, exact.ONE)


def _singular_values(P: Array, batch: tuple[int, ...]) -> Array:
    """[*batch, R] in descending order."""
    return collect(batch, (exact.jacobi(P[at])[0] for at in np.ndindex(batch)))


def _row_squares(F: Array, batch: tuple[int, ...]) -> Array:
    return collect(batch, (exact.row_squares(F[at]) for at in np.ndindex(batch)))


def _energy_error(values: Array, k: int, energy: Decimal) -> float:
    """0 if k is the smallest rank with this share of the energy in every item, to within 1e-9; infinity otherwise."""
    squares = values * values
    margin = Decimal("1e-9")
    enough = fewer = True
    for item in squares.reshape(math.prod(squares.shape[:-1]), squares.shape[-1]):
        whole = exact.total(item)
        enough &= exact.total(item[:k]) >= (energy - margin) * whole
        fewer &= exact.total(item[: max(k - 1, 0)]) >= (energy + margin) * whole
    return 0.0 if enough and (not fewer or k <= 1) else float("inf")


def _columns(
    F: Array, P: Array, values: Array, batch: tuple[int, ...], dtype: torch.dtype, what: str
) -> Iterator[Error]:
    """Lengths, orthogonality and directions of the columns F [*batch, S, k]."""
    gram = collect(batch, (exact.times(F[at].T, F[at]) for at in np.ndindex(batch)))
    k = F.shape[-1]
    lengths = exact.sqrt(np.diagonal(gram, axis1=-2, axis2=-1))
    # Entries below the normal range of the dtype are rounded to a fixed step.
    tiny = Decimal(torch.finfo(dtype).smallest_normal) * Decimal(F.shape[-2]).sqrt()
    scale = np.maximum(values[..., :k], SMALLEST * values[..., :1]) + tiny
    yield compare_exact("truncate: lengths of columns", dtype, lengths, values[..., :k], scale, what)
    both = scale[..., :, None] * scale[..., None, :]
    off = gram * (1 - exact.eye(k))
    yield compare_exact("truncate: orthogonality", dtype, off, off * 0, both, what)
    # P P^T f = s^2 f for a left singular vector f
    worst = exact.ZERO
    for at in np.ndindex(batch):
        for column in range(k):
            f, s = F[at][:, column], values[at][column]
            rest = exact.times(P[at], exact.times(P[at].T, f)) - s * s * f
            bound = (values[at][0] + tiny) ** 2 * scale[at][column]
            if bound > 0:
                worst = max(worst, exact.largest(rest) / bound)
    yield Error("truncate: directions", dtype, float(worst), what)


CHECKS = (truncate, modes)
