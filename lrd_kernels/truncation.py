"""Fewer columns: truncation of the low-rank part, with what it drops folded into the diagonal."""

from __future__ import annotations

import torch
from torch import Tensor

from lrd_kernels import _validate
from lrd_kernels.autograd.truncate import Truncate

__all__ = ["truncate"]


def truncate(
    cov_factor: Tensor,
    cov_diag: Tensor,
    rank: int | None = None,
    *,
    energy: float | None = None,
    fold: bool = True,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The best low-rank part of fewer columns, and a diagonal that makes up for it.

    The columns returned are orthogonal, longest first: the leading left singular vectors of `cov_factor` times their
    singular values. They come from the `R x R` Gram matrix in float64 and one pass over the factor, in its layout.

    Args:
        rank: how many columns to keep. None keeps all, and only turns them to be orthogonal.
        energy: instead of a rank: the smallest rank that keeps this share of `trace(P P^T)`, for every item of a batch.
        fold: adds to each diagonal entry the variance that its output loses, so that the variances stay what they were.

    Returns:
        factor [..., S, k], diag [..., S], and the k singular values [...] of the columns kept, in float64.
    """
    _validate.gaussian(cov_factor, cov_diag)
    R = cov_factor.shape[-1]
    if rank is not None and energy is not None:
        raise ValueError(f"rank or energy, not both; got rank={rank}, energy={energy}")
    if rank is not None and (not isinstance(rank, int) or isinstance(rank, bool)):
        raise TypeError(f"rank must be an int or None; got {type(rank).__name__}")
    if rank is not None and rank < 0:
        raise ValueError(f"rank must not be negative; got {rank}")
    if energy is not None and not 0 < energy <= 1:
        raise ValueError(f"energy must be above 0 and at most 1; got {energy}")
    shape = torch.broadcast_shapes(cov_factor.shape[:-2], cov_diag.shape[:-1])
    factor, diag = cov_factor.expand(*shape, *cov_factor.shape[-2:]), cov_diag.expand(*shape, cov_diag.shape[-1])
    return Truncate.apply(factor, diag, R if rank is None else min(rank, R), energy, fold, backend)
