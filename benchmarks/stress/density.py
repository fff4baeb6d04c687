"""The log-density family with its gradients, `positive_diag` and `capacitance_cholesky`."""

from __future__ import annotations

import decimal
import math
from collections.abc import Iterator
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
    batch_of,
    broadcast,
    collect,
    compare,
    compare_exact,
    compare_gradient,
    or_one,
)
from lrd_kernels import testing
from lrd_kernels._policy import exp_limit

GRADIENTS = "gradients of these five"
HALF = Decimal("0.5")
LONG_PRECISION = 800
LOG_2PI = (2 * exact.PI).ln()


class Terms(NamedTuple):
    """Weights of the Mahalanobis term, the log-determinant and the number of outputs."""

    maha: Decimal
    logdet: Decimal
    per_output: Decimal


TERMS = {
    "log_prob": Terms(-HALF, -HALF, -HALF * LOG_2PI),
    "mahalanobis": Terms(exact.ONE, exact.ZERO, exact.ZERO),
    "logdet": Terms(exact.ZERO, exact.ONE, exact.ZERO),
    "entropy": Terms(exact.ZERO, HALF, HALF * (1 + LOG_2PI)),
    "nll_loss": Terms(HALF, HALF, HALF * LOG_2PI),
}


class Truth(NamedTuple):
    """Results [*batch], and gradients by difference, factor and diagonal [*batch, event]."""

    result: Array
    diff: Array
    factor: Array
    diag: Array


def truth_of(terms: Terms, diff: Array, P: Array, D: Array, mask: Array) -> Truth:
    """All arguments are [*batch, event]; the mask is bool."""
    batch = D.shape[:-1]
    parts: list[list] = [[], [], [], []]
    for at in np.ndindex(batch):
        kept = mask[at]
        r, rows = diff[at][kept], P[at][kept]
        g = exact.Gaussian(rows, D[at][kept])
        x, z = g.solve(r), g.fitted(r)
        parts[0].append(terms.maha * exact.times(r, x) + terms.logdet * g.logdet + terms.per_output * len(r))
        full = (exact.zeros(*diff[at].shape), exact.zeros(*P[at].shape), exact.zeros(*D[at].shape))
        full[0][kept] = 2 * terms.maha * x
        full[1][kept] = -2 * terms.maha * x[:, None] * z[None] + 2 * terms.logdet * g.precision_factor
        full[2][kept] = -terms.maha * x * x + terms.logdet * g.precision_diag
        for part, item in zip(parts[1:], full, strict=True):
            part.append(item)
    return Truth(*(collect(batch, part) for part in parts))


def weights_of(g: Draw, batch: tuple[int, ...]) -> Tensor:
    """Random weights of the batch items."""
    return torch.tensor([g.pick((1.0, 0.5, 2.0, -1.0)) for _ in range(math.prod(batch))]).reshape(batch)


def log_prob(g: Draw) -> Iterator[Error]:
    yield from _scalar(g, "log_prob")


def mahalanobis(g: Draw) -> Iterator[Error]:
    yield from _scalar(g, "mahalanobis")


def logdet(g: Draw) -> Iterator[Error]:
    yield from _scalar(g, "logdet")


def entropy(g: Draw) -> Iterator[Error]:
    yield from _scalar(g, "entropy")


def _scalar(g: Draw, name: str) -> Iterator[Error]:
    x = inputs.covariances(g)
    used = [x.cov_factor, x.cov_diag]
    if name == "log_prob":
        used = list(x)
    elif name == "mahalanobis":
        used = [x.value, *used]
    batch = batch_of(*((t, 2 if t is x.cov_factor else 1) for t in used))
    mask = inputs.masked(g, batch, x.cov_diag.shape[-1])
    numbers = _numbers(name, x, batch, mask)
    if mask is not None and g.chance(2):
        x = inputs.spoil(x, mask)
        used = list(x)[4 - len(used) :] if name != "mahalanobis" else [x.value, *x[2:]]
    options = {"precision": "qr"} if g.chance(8) else {}
    if (
        hasattr(lrd.LowRankMultivariateNormal, name)
        and mask is None
        and name in ("log_prob", "entropy")
        and g.chance(4)
    ):
        call = _by_distribution(name)
        options = {}
    else:
        call = lambda *a: getattr(lrd, name)(*a, mask=mask, **options)  # noqa: E731
    weights = weights_of(g, batch)
    result, *grads = testing.value_and_grads(call, used, weights)
    truth = truth_of(TERMS[name], *numbers)
    yield compare(name, result, truth.result, or_one(truth.result))
    scale = exact.exact(weights)
    for tensor, found in zip(used, grads, strict=True):
        if tensor is x.cov_factor:
            yield compare_gradient(GRADIENTS, found, truth.factor * scale[..., None, None], 2, "cov_factor")
        elif tensor is x.cov_diag:
            yield compare_gradient(GRADIENTS, found, truth.diag * scale[..., None], 1, "cov_diag")
        else:
            sign = -1 if tensor is x.loc else 1
            yield compare_gradient(
                GRADIENTS, found, sign * truth.diff * scale[..., None], 1, "loc" if sign < 0 else "value"
            )


def _by_distribution(name: str):
    if name == "entropy":
        return lambda P, D: lrd.LowRankMultivariateNormal(torch.zeros_like(D), P, D).entropy()
    return lambda y, mu, P, D: lrd.LowRankMultivariateNormal(mu, P, D).log_prob(y)


def _numbers(name: str, x: testing.Inputs, batch: tuple[int, ...], mask: Tensor | None) -> tuple[Array, ...]:
    """Difference, factor, diagonal and mask: [*batch, event]."""
    P, D = broadcast(x.cov_factor, batch, 2), broadcast(x.cov_diag, batch, 1)
    diff = exact.zeros(*D.shape)
    if name in ("log_prob", "nll_loss"):
        diff = broadcast(x.value, batch, 1) - broadcast(x.loc, batch, 1)
    elif name == "mahalanobis":
        diff = broadcast(x.value, batch, 1)
    kept = np.ones(D.shape, dtype=bool) if mask is None else np.broadcast_to(mask.numpy(), D.shape)
    return diff, P, D, kept


def nll_loss(g: Draw) -> Iterator[Error]:
    x = inputs.covariances(g)
    dtype = x.cov_diag.dtype
    eps = 0.0 if g.chance(8) else g.power(-12, 0)
    raw = x.cov_diag.double().log().clamp(-200, 100).to(dtype)
    used = (x.loc, raw, x.cov_factor, x.value)
    batch = batch_of((x.loc, 1), (raw, 1), (x.cov_factor, 2), (x.value, 1))
    mask = inputs.masked(g, batch, raw.shape[-1])
    limit = Decimal(exp_limit(dtype))
    powers = exact.exp(np.frompyfunc(lambda r: min(r, limit), 1, 1)(exact.exact(raw)))
    powers = np.broadcast_to(powers, (*batch, raw.shape[-1]))
    diff, P, _, kept = _numbers("nll_loss", x, batch, mask)
    inputs.note_size(g, x.cov_factor, eps + raw.double().exp())
    truth = truth_of(TERMS["nll_loss"], diff, P, powers + Decimal(eps), kept)
    weights = weights_of(g, batch)
    outputs = np.vectorize(lambda n: Decimal(int(n)), otypes=[object])(kept.sum(-1))
    result, *grads = testing.value_and_grads(
        lambda *a: lrd.nll_loss(*a, eps=eps, mask=mask, reduction="none"), used, weights
    )
    right = truth.result / outputs
    yield compare("nll_loss", result, right, or_one(right))
    scale = np.asarray(exact.exact(weights) / outputs, dtype=object)
    yield compare_gradient(GRADIENTS, grads[0], -truth.diff * scale[..., None], 1, "mean")
    yield compare_gradient(GRADIENTS, grads[1], truth.diag * powers * scale[..., None], 1, f"raw_diag (eps {eps:.3g})")
    yield compare_gradient(GRADIENTS, grads[2], truth.factor * scale[..., None, None], 2, "cov_factor")
    yield compare_gradient(GRADIENTS, grads[3], truth.diff * scale[..., None], 1, "target")


def positive_diag(g: Draw) -> Iterator[Error]:
    dtype = g.dtype()
    raw = (g.normal(3, 1 + g.index(16)) * g.power(-3, 2.5)).to(dtype)
    eps = g.pick((0.0, g.power(-12, 0)))
    softplus = g.chance(3)
    result, grad = testing.value_and_grads(
        lambda r: lrd.positive_diag(r, eps, transform="softplus" if softplus else "exp"), (raw,)
    )
    numbers = exact.exact(raw)
    if softplus:
        with decimal.localcontext() as context:
            context.prec = LONG_PRECISION  # 1 + exp(-1000) has 434 zeros
            positive = exact.log(1 + exact.exp(numbers))
        slope = 1 / (1 + exact.exp(-numbers))
    else:
        limit = Decimal(exp_limit(dtype))
        slope = positive = exact.exp(np.frompyfunc(lambda r: min(r, limit), 1, 1)(numbers))
    truth = positive + Decimal(eps)
    yield compare("positive_diag", result, truth, truth, f"softplus: {softplus}")
    yield compare("positive_diag", grad, slope, slope, f"gradient, softplus: {softplus}")


def capacitance_cholesky(g: Draw) -> Iterator[Error]:
    x = inputs.covariances(g)
    batch = batch_of((x.cov_factor, 2), (x.cov_diag, 1))
    mask = inputs.masked(g, batch, x.cov_diag.shape[-1])
    if mask is not None:
        batch = tuple(torch.broadcast_shapes(batch, mask.shape[:-1]))
    _, P, D, kept = _numbers("logdet", x, batch, mask)
    C = collect(batch, (exact.Gaussian(P[at][kept[at]], D[at][kept[at]]).capacitance for at in np.ndindex(batch)))
    if mask is not None:
        x = inputs.spoil(x, mask)
    chol, info = lrd.capacitance_cholesky(x.cov_factor, x.cov_diag, mask=mask)
    yield Error("", chol.dtype, float(info.any()), "info")
    if tuple(chol.shape) != C.shape:
        yield Error("capacitance_cholesky", chol.dtype, float("inf"), f"shape {tuple(chol.shape)}")
    elif C.shape[-1] and exact.largest(C) < Decimal(torch.finfo(chol.dtype).max) ** 2 / 4:
        L = exact.exact(chol)
        square = collect(batch, (exact.times(L[at], L[at].T) for at in np.ndindex(batch)))
        lengths = exact.sqrt(np.diagonal(C, axis1=-2, axis2=-1))
        scale = lengths[..., :, None] * lengths[..., None, :]
        yield compare_exact("capacitance_cholesky", chol.dtype, square, C, scale)


CHECKS = (log_prob, mahalanobis, logdet, entropy, nll_loss, positive_diag, capacitance_cholesky)
