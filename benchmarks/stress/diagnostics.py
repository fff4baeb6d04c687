"""Bounds, condition numbers, extreme eigenvalues and `diagnose`."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal

import numpy as np
import torch

import lrd_kernels as lrd
from benchmarks.stress import exact, inputs
from benchmarks.stress.inputs import Draw
from benchmarks.stress.items import Error, batch_of, collect, compare, gaussians, or_one, peaks

WIDE = torch.float64  # of all results


def _bounds(P: exact.Array, D: exact.Array) -> tuple[Decimal, Decimal]:
    """Weyl's bounds, from the largest singular value."""
    S, R = P.shape
    values = exact.jacobi(P)[0] ** 2
    norm = max(values.tolist(), default=exact.ZERO)
    diag = sorted(D.tolist())
    if S > R:
        edge = diag[R]
    else:  # the smallest of all bounds on the smallest eigenvalue
        ascending = sorted(values.tolist())[R - S :]
        edge = min(a + b for a, b in zip(ascending, reversed(diag), strict=True))
    return (norm + diag[0]) / edge, (norm + diag[-1]) / diag[0]


def condition_bounds(g: Draw) -> Iterator[Error]:
    x = inputs.covariances(g)
    S = x.cov_diag.shape[-1]
    batch = batch_of((x.cov_factor, 2), (x.cov_diag, 1))
    mask = inputs.masked(g, batch, S)
    if mask is not None:
        batch = tuple(torch.broadcast_shapes(batch, mask.shape[:-1]))
    models = gaussians(x.cov_factor, x.cov_diag, batch)
    kept = np.ones((*batch, S), dtype=bool) if mask is None else np.broadcast_to(mask.numpy(), (*batch, S))
    if mask is not None:
        if bool((mask.sum(-1) <= x.cov_factor.shape[-1]).any()):
            return  # the smallest bound of fewer outputs than columns is looser with a mask
        x = inputs.spoil(x, mask)
    found = lrd.condition_bounds(x.cov_factor, x.cov_diag, mask=mask)
    truths = [_bounds(models[at].P[kept[at]], models[at].D[kept[at]]) for at in np.ndindex(*batch)]
    for side, actual in enumerate(found):
        truth = collect(batch, (pair[side] for pair in truths))
        yield compare("condition_bounds", actual, truth, truth, ("lower", "upper")[side])


def capacitance_condition(g: Draw) -> Iterator[Error]:
    x = inputs.covariances(g)
    batch = batch_of((x.cov_factor, 2), (x.cov_diag, 1))
    found = lrd.capacitance_condition(x.cov_factor, x.cov_diag)
    truths = []
    for model in np.ravel(gaussians(x.cov_factor, x.cov_diag, batch)):
        values = exact.jacobi(model.P / exact.sqrt(model.D)[:, None])[0] ** 2
        truths.append((1 + values[0]) / (1 + values[-1]) if len(values) else exact.ONE)
    truth = collect(batch, iter(truths))
    yield compare("capacitance_condition", found, truth, truth)


def extreme_eigenvalues(g: Draw) -> Iterator[Error]:
    """An eigenvalue lies within the reported residual, and none lies beyond it."""
    x = inputs.covariances(g, S=1 + g.index(12))
    batch = batch_of((x.cov_factor, 2), (x.cov_diag, 1))
    method = "power" if g.chance(8) else "lanczos"
    found = lrd.extreme_eigenvalues(x.cov_factor, x.cov_diag, method=method)
    models = gaussians(x.cov_factor, x.cov_diag, batch)
    for at in np.ndindex(*batch):
        covariance = models[at].covariance
        ends = ((found.smallest, found.smallest_residual), (found.largest, found.largest_residual))
        for end, (values, residuals) in enumerate(ends):
            value, residual = float(values[at]), float(residuals[at])
            what = f"{('smallest', 'largest')[end]}, {method}, {value:.6g} with residual {residual:.1e}"
            if residual >= 1 and not found.converged[at]:  # it says that it does not know
                continue
            if not np.isfinite(value):
                yield Error("extreme_eigenvalues", WIDE, float("inf"), what)
                continue
            margin = abs(Decimal(value)) * (Decimal(residual) + Decimal("1e-6"))
            below, above = (exact.eigenvalues_below(covariance, Decimal(value) + side * margin) for side in (-1, 1))
            near = above > below
            beyond = below > 0 if end == 0 else above < len(covariance)
            wrong = not near or (beyond and bool(found.converged[at]) and residual < 1e-6)
            yield Error("extreme_eigenvalues", WIDE, float("inf") if wrong else 0.0, what)


def diagnose(g: Draw) -> Iterator[Error]:
    x = inputs.covariances(g)
    batch = batch_of((x.cov_factor, 2), (x.cov_diag, 1))
    _S, R = x.cov_factor.shape[-2:]
    found = lrd.diagnose(x.cov_factor, x.cov_diag)
    if not str(found):
        yield Error("diagnose", WIDE, float("inf"), "no text")
    models = gaussians(x.cov_factor, x.cov_diag, batch)
    bounds = [_bounds(m.P, m.D) for m in np.ravel(models)]
    leverage = collect(batch, (max((1 - m.D * m.precision_diag).tolist()) for m in np.ravel(models)))
    spectrum = collect(batch, (exact.jacobi(m.P)[0] ** 2 for m in np.ravel(models)))

    def expanded(tensor: torch.Tensor, events: int = 0) -> torch.Tensor:
        return tensor.expand((*batch, *tensor.shape[tensor.dim() - events :]))

    for side, actual in enumerate((found.condition_lower, found.condition_upper)):
        truth = collect(batch, (pair[side] for pair in bounds))
        yield compare("diagnose", expanded(actual), truth, truth, ("lower", "upper")[side])
    yield compare("diagnose", expanded(found.largest_leverage), leverage, exact.ONE, "leverage")
    if R:
        yield compare("diagnose", expanded(found.spectrum, 1), spectrum, peaks(spectrum, 1), "spectrum")
        whole = spectrum.sum(-1)
        if all(w > 0 for w in np.ravel(whole)):
            shares = spectrum / np.asarray(whole, dtype=object)[..., None]
            entropies = -np.frompyfunc(lambda p: p * p.ln() if p > 0 else p, 1, 1)(shares).sum(-1)
            rank = np.asarray(exact.exp(entropies), dtype=object)
            yield compare("diagnose", expanded(found.effective_rank), rank, or_one(rank), "effective rank")
    ends = (
        found.diag_quantiles[..., [0, -1]],
        torch.stack([x.cov_diag.double().amin(-1), x.cov_diag.double().amax(-1)], -1),
    )
    same = torch.equal(expanded(ends[0], 1), expanded(ends[1], 1)) and not bool(found.bad_entries.any())
    yield Error("diagnose", WIDE, 0.0 if same else float("inf"), "quantiles and bad entries")


CHECKS = (condition_bounds, capacitance_condition, extreme_eigenvalues, diagnose)
