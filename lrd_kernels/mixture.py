"""The mixture of T predictions, which the joint Gaussian approximates."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lrd_kernels import _validate, functional

__all__ = ["mixture_log_prob"]


def mixture_log_prob(
    value: Tensor,
    means: Tensor,
    cov_factors: Tensor,
    cov_diags: Tensor,
    *,
    mask: Tensor | None = None,
    chunk: int = 64,
) -> Tensor:
    """Log-density of `value` [..., S] under the mixture of T Gaussians with equal weights: shape [...].

        log p(y) = log (1/T sum_t N(y; mu_t, diag(D_t) + P_t P_t^T))

    `means` are [T, ..., S], `cov_factors` [T, ..., S, R] and `cov_diags` [T, ..., S]. This is the exact second-order
    predictive distribution; `joint` matches its first two moments. Outputs where `mask` [..., S] is False count for
    nothing. The Gaussians are processed `chunk` at a time. Raises the errors of `log_prob`.

    Examples:
        >>> means, factors, diags = torch.zeros(16, 3), torch.ones(16, 3, 1), torch.ones(16, 3)
        >>> lrd.mixture_log_prob(torch.zeros(3), means, factors, diags)
        tensor(-3.4500)
    """
    for name, tensor in (("value", value), ("means", means), ("cov_factors", cov_factors), ("cov_diags", cov_diags)):
        _validate.floating(name, tensor)
    if means.dim() < 2 or means.shape[0] < 1:
        raise ValueError(f"means must have shape [T, ..., S] with T of at least 1; got {tuple(means.shape)}")
    T = means.shape[0]
    for name, tensor in (("cov_factors", cov_factors), ("cov_diags", cov_diags)):
        count = tensor.shape[0] if tensor.dim() else 0
        if count not in (1, T):
            raise ValueError(f"{name} must have the {T} Gaussians of means, or one; got {count}")
    _validate.positive("chunk", chunk)
    extra = max(value.dim() - (means.dim() - 1), 0)
    parts = []
    for begin in range(0, T, chunk):
        some = (t[begin : begin + chunk] if t.shape[0] == T else t for t in (means, cov_factors, cov_diags))
        loc, factor, diag = (t.reshape(t.shape[0], *(1,) * extra, *t.shape[1:]) for t in some)
        parts.append(functional.log_prob(value, loc, factor, diag, mask=mask))
    return torch.cat(parts).logsumexp(0) - math.log(T)
