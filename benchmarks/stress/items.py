"""Errors, and the batch items of a call in exact arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.stress import exact
from benchmarks.stress.exact import Array, Gaussian


class Error(NamedTuple):
    """The error of one result, relative to what its budget says. Without a budget nothing but 0 is right."""

    budget: str
    dtype: torch.dtype
    error: float
    what: str = ""


def batch_of(*tensors_and_events: tuple[Tensor, int]) -> tuple[int, ...]:
    """The broadcast batch shape of tensors with so many event dimensions."""
    return tuple(torch.broadcast_shapes(*(t.shape[: t.dim() - events] for t, events in tensors_and_events)))


def broadcast(tensor: Tensor, batch: Sequence[int], events: int) -> Array:
    """[*batch, event]: the exact numbers, expanded."""
    numbers = exact.exact(tensor)
    return np.broadcast_to(numbers, (*batch, *numbers.shape[numbers.ndim - events :]))


def gaussians(factor: Tensor, diag: Tensor, batch: Sequence[int]) -> Array:
    """Exact Gaussians [*batch]. Items that share factor and diagonal share the Gaussian."""
    own = batch_of((factor, 2), (diag, 1))
    P, D = broadcast(factor, own, 2), broadcast(diag, own, 1)
    made = np.empty(own, dtype=object)
    for at in np.ndindex(own):
        made[at] = Gaussian(P[at], D[at])
    return np.broadcast_to(made, tuple(batch))


def collect(batch: Sequence[int], items: Iterator[Array | Decimal]) -> Array:
    """Stacks the results of all items: [*batch, ...]."""
    found = [np.asarray(item, dtype=object) for item in items]
    made = np.empty((len(found), *found[0].shape), dtype=object)
    for at, item in enumerate(found):
        made[at] = item if item.ndim else item.item()
    return made.reshape((*batch, *found[0].shape))


def peaks(entries: Array, events: int) -> Array:
    """The largest absolute entry of every item, with the event dimensions kept as 1."""
    batch = entries.shape[: entries.ndim - events]
    flat = entries.reshape((*batch, -1)) if entries.size else exact.zeros(*batch, 1)
    made = np.empty(batch, dtype=object)
    for at in np.ndindex(batch):
        made[at] = exact.largest(flat[at])
    return made.reshape((*batch, *(1,) * events))


def or_one(entries: Array) -> Array:
    """max(|x|, 1)"""
    return np.frompyfunc(lambda x: max(abs(x), exact.ONE), 1, 1)(entries)


absolute = np.frompyfunc(abs, 1, 1)


def two_deviations(variance: Array) -> Array:
    """`sqrt(V_i V_j)` [..., S, S] of variances [..., S]."""
    roots = exact.sqrt(variance)
    return roots[..., :, None] * roots[..., None, :]


def products(factor: Tensor, diag: Tensor | None = None) -> Array:
    """`F F^T` or `diag(D) + F F^T` of tensors with the same batch dimensions: [..., S, S], exact."""
    F = exact.exact(factor)
    batch = F.shape[:-2]
    D = None if diag is None else np.broadcast_to(exact.exact(diag), F.shape[:-1])
    return collect(
        batch,
        (exact.times(F[at], F[at].T) + (0 if D is None else exact.diagonal(D[at])) for at in np.ndindex(batch)),
    )


def compare(
    budget: str,
    actual: Tensor,
    truth: Array,
    scale: Array | Decimal,
    what: str = "",
    reach: Array | None = None,
    terms: int = 1,
) -> Error:
    return Error(budget, actual.dtype, exact.deviation(actual, truth, scale, reach, terms), what)


def compare_gradient(budget: str, actual: Tensor, truth: Array, events: int, what: str) -> Error:
    """Compares a gradient with the truth [*batch, event], summed to its shape, relative to the largest entry of each of
    its own batch items, before the summation may cancel."""
    own, reach = (exact.sum_to(full, tuple(actual.shape)) for full in (truth, absolute(truth)))
    terms = truth.size // max(own.size, 1)
    return compare(budget, actual, own, peaks(reach, events), f"gradient for {what}", reach, terms)


def exceeds(number: Decimal, like: Tensor) -> bool:
    """Whether a number may round to infinity in a tensor's dtype, or its sums with others that are not larger."""
    return number >= Decimal(torch.finfo(like.dtype).max) / 2


def compare_exact(
    budget: str, dtype: torch.dtype, found: Array, truth: Array, scale: Array | Decimal, what: str = ""
) -> Error:
    """The error of something computed exactly from a result of this dtype."""
    slack = Decimal(torch.finfo(dtype).smallest_normal if dtype != torch.float16 else 2.0**-24)
    found, truth = np.asarray(found, dtype=object), np.asarray(truth, dtype=object)
    scales = np.broadcast_to(np.asarray(scale, dtype=object), truth.shape).reshape(-1).tolist()
    worst = exact.ZERO
    for a, t, s in zip(found.reshape(-1).tolist(), truth.reshape(-1).tolist(), scales, strict=True):
        if not a.is_finite():  # the result was infinite or NaN
            return Error(budget, dtype, float("inf"), what)
        error = abs(a - t) - slack
        if error > 0:
            worst = max(worst, error / s if s > 0 else Decimal("inf"))
    return Error(budget, dtype, float(worst), what)
