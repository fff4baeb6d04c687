"""Truncation of the low-rank part to fewer columns; the dropped variance is added to the diagonal."""

from __future__ import annotations

import torch
from torch import Tensor

from lrd_kernels import _validate
from lrd_kernels.autograd import truncate as autograd_truncate
from lrd_kernels.linalg.stack import Stack

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
    """The best low-rank part with fewer columns, and a diagonal that compensates for the dropped columns.

        P' = P V_k,    D'_i = D_i + sum_r P_ir^2 - sum_r P'_ir^2

    P is `cov_factor` [..., S, R], D is `cov_diag` [..., S], and `V_k` [R, k] are the leading eigenvectors of `P^T P`.
    The returned columns are orthogonal and sorted by descending norm: the leading left singular vectors of `cov_factor`
    times their singular values. They are computed from the `R x R` Gram matrix in float64 and one pass over the factor,
    in its layout.

    Args:
        rank: number of columns to keep. None keeps all columns and only orthogonalises them.
        energy: alternative to rank: use the smallest rank that keeps this share of `trace(P P^T)` in every batch item.
        fold: whether to add to each diagonal entry the variance that its output loses, so that the variances do not
            change.
        backend: a name from `backends()`, or None for the best one.

    Returns:
        factor [..., S, k], diag [..., S], and the singular values [..., k] of the columns kept, in float64.

    Raises:
        ValueError: if a shape is wrong, if rank is negative, or if energy is not above 0 and at most 1.
        TypeError: if rank is not an int, or for wrong types and dtypes.

    Examples:
        >>> P, D = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.ones(2)
        >>> factor, diag, singular_values = lrd.truncate(P, D, 1)
        >>> factor.abs(), diag, singular_values
        (tensor([[2.],
                [0.]]), tensor([1., 2.]), tensor([2.], dtype=torch.float64))
    """
    _validate.gaussian(cov_factor, cov_diag)
    R = cov_factor.shape[-1]
    if rank is not None and energy is not None:
        raise ValueError(f"rank and energy must not both be given; got rank={rank}, energy={energy}")
    if energy is not None and not 0 < energy <= 1:
        raise ValueError(f"energy must be above 0 and at most 1; got {energy}")
    batch = torch.broadcast_shapes(cov_factor.shape[:-2], cov_diag.shape[:-1])
    diag = cov_diag.expand(*batch, cov_diag.shape[-1])
    columns = Stack.of(diag, cov_factor[None], None)
    kept = R if rank is None else min(_validate.rank(rank), R)
    return autograd_truncate.truncate(columns, diag, kept, energy=energy, fold=fold, backend=backend)
