"""KL divergences of `LowRankMultivariateNormal`, for every pair that torch supports and for diagonal Gaussians.

    KL(p | q) = 1/2 (log det Sq - log det Sp + tr(Sq^-1 Sp) + (mq - mp)^T Sq^-1 (mq - mp) - S)

For a low-rank q, the trace is `sum_i D_i [Sq^-1]_ii` for the diagonal part of p plus a sum of Mahalanobis terms for the
columns of its factor. One pass evaluates these columns as values under q.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributions import Independent, MultivariateNormal, Normal, register_kl
from torch.distributions import LowRankMultivariateNormal as TorchLowRankMultivariateNormal

from lrd_kernels import functional
from lrd_kernels._methods import covariance_of
from lrd_kernels.distribution import LowRankMultivariateNormal
from lrd_kernels.linalg import products
from lrd_kernels.reference import result_dtype


def _check_events(p: torch.distributions.Distribution, q: torch.distributions.Distribution) -> None:
    if p.event_shape != q.event_shape:
        raise ValueError(
            f"KL divergence needs equal event shapes; got {tuple(p.event_shape)} and {tuple(q.event_shape)}"
        )


def _wide(distribution: TorchLowRankMultivariateNormal) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, factor and diagonal in float64. The terms of a small divergence are far larger than their sum."""
    factor, diag = covariance_of(distribution)
    return distribution.loc.double(), factor.double(), diag.double()


def _half(total: Tensor, like: Tensor) -> Tensor:
    return (0.5 * total).to(result_dtype(like.dtype))


def _column_maha(columns: Tensor, factor: Tensor, diag: Tensor) -> Tensor:
    """tr(X^T Sq^-1 X) for X [..., S, C]"""
    dims = max(factor.dim() - 2, diag.dim() - 1, columns.dim() - 2)  # batch dimensions, which the columns come before
    values = columns.reshape((1,) * (dims - columns.dim() + 2) + columns.shape).movedim(-1, 0)
    return functional.mahalanobis(values, factor, diag).sum(0)


@register_kl(LowRankMultivariateNormal, LowRankMultivariateNormal)
@register_kl(LowRankMultivariateNormal, TorchLowRankMultivariateNormal)
@register_kl(TorchLowRankMultivariateNormal, LowRankMultivariateNormal)
def _kl_low_rank_low_rank(p: TorchLowRankMultivariateNormal, q: TorchLowRankMultivariateNormal) -> Tensor:
    _check_events(p, q)
    (p_loc, p_factor, p_diag), (q_loc, q_factor, q_diag) = _wide(p), _wide(q)
    logs = functional.logdet(q_factor, q_diag) - functional.logdet(p_factor, p_diag)
    trace = (p_diag * functional.precision_diag(q_factor, q_diag)).sum(-1) + _column_maha(p_factor, q_factor, q_diag)
    maha = functional.mahalanobis(q_loc - p_loc, q_factor, q_diag)
    return _half(logs + trace + maha - p.event_shape[0], p.loc)


@register_kl(MultivariateNormal, LowRankMultivariateNormal)
def _kl_dense_low_rank(p: MultivariateNormal, q: LowRankMultivariateNormal) -> Tensor:
    _check_events(p, q)
    q_loc, q_factor, q_diag = _wide(q)
    tril = p._unbroadcasted_scale_tril.double()
    logs = functional.logdet(q_factor, q_diag) - 2 * tril.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    maha = functional.mahalanobis(q_loc - p.loc.double(), q_factor, q_diag)
    return _half(logs + _column_maha(tril, q_factor, q_diag) + maha - p.event_shape[0], p.loc)


@register_kl(LowRankMultivariateNormal, MultivariateNormal)
def _kl_low_rank_dense(p: LowRankMultivariateNormal, q: MultivariateNormal) -> Tensor:
    _check_events(p, q)
    p_loc, p_factor, p_diag = _wide(p)
    tril = q._unbroadcasted_scale_tril.double()
    batch = torch.broadcast_shapes(p.batch_shape, q.batch_shape)
    columns = torch.cat(
        [
            p_factor.expand(*batch, *p_factor.shape[-2:]),
            torch.diag_embed(p_diag.sqrt()).expand(*batch, *tril.shape[-2:]),
            (q.loc.double() - p_loc)[..., None].expand(*batch, tril.shape[-1], 1),
        ],
        dim=-1,
    )
    whitened = torch.linalg.solve_triangular(tril.expand(*batch, *tril.shape[-2:]), columns, upper=False)
    logs = 2 * tril.diagonal(dim1=-2, dim2=-1).log().sum(-1) - functional.logdet(p_factor, p_diag)
    return _half(logs + whitened.square().sum((-2, -1)) - p.event_shape[0], p.loc)


@register_kl(LowRankMultivariateNormal, Independent)
def _kl_low_rank_diagonal(p: LowRankMultivariateNormal, q: Independent) -> Tensor:
    _check_diagonal(q)
    _check_events(p, q)
    p_loc, p_factor, p_diag = _wide(p)
    variance = q.base_dist.stddev.double().square()
    logs = variance.log().sum(-1) - functional.logdet(p_factor, p_diag)
    spread = p_diag + products.row_squares(p_factor) + (q.mean - p_loc).square()
    return _half(logs + (spread / variance).sum(-1) - p.event_shape[0], p.loc)


@register_kl(Independent, LowRankMultivariateNormal)
def _kl_diagonal_low_rank(p: Independent, q: LowRankMultivariateNormal) -> Tensor:
    _check_diagonal(p)
    _check_events(p, q)
    q_loc, q_factor, q_diag = _wide(q)
    variance = p.base_dist.stddev.double().square()
    logs = functional.logdet(q_factor, q_diag) - variance.log().sum(-1)
    trace = (variance * functional.precision_diag(q_factor, q_diag)).sum(-1)
    maha = functional.mahalanobis(q_loc - p.mean, q_factor, q_diag)
    return _half(logs + trace + maha - p.event_shape[0], q.loc)


def _check_diagonal(distribution: Independent) -> None:
    if not isinstance(distribution.base_dist, Normal) or len(distribution.event_shape) != 1:
        raise NotImplementedError(
            "KL divergence of a LowRankMultivariateNormal is defined for Independent(Normal(...), 1);"
            f" got {distribution}"
        )
