"""A factor in the basis of its right singular vectors, in float64: for factors that the kernels do not serve.

The kernels take the basis from the Gram matrix, which squares the singular values, and add the variance that is dropped
as a difference of squares in the precision of the factor. Here the basis comes from a QR decomposition, and what is
dropped is the squared norm of a residual.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lrd_kernels.linalg import capacitance, products, qr
from lrd_kernels.ops.views import is_rank_major


def singular_basis(factor: Tensor) -> tuple[Tensor, Tensor]:
    """The singular values of a factor [..., S, R] in descending order [..., R], and its right singular vectors as
    columns [..., R, R]. NaN if a number is not finite."""
    shape, R = factor.shape[:-2], factor.shape[-1]
    flat = factor.reshape(math.prod(shape), *factor.shape[-2:])
    largest = flat.abs().amax((-2, -1)).double() if flat.numel() else flat.new_ones(len(flat), dtype=torch.float64)
    good = largest.isfinite()
    unit = torch.where(good & (largest > 0), largest, 1)[:, None, None]
    blocks = (torch.where(good[:, None, None], P.double() / unit, 0) for P in flat.split(products.chunk_rows(flat), -2))
    triangle = qr.decomposed(((P, P[..., :0]) for P in blocks), len(flat), R, 0, unit).root()
    _, singular, right = torch.linalg.svd(triangle)
    singular = torch.where(good[:, None], singular * unit[..., 0], torch.nan)
    vectors = torch.where(good[:, None, None], capacitance.signed(right.mT), torch.nan)
    return singular.reshape(*shape, R), vectors.reshape(*shape, R, R)


def project_fold(factor: Tensor, diag: Tensor, basis: Tensor, fold: bool) -> tuple[Tensor, Tensor]:
    """`P Q` for an orthonormal basis Q [..., R, K], in the layout of the factor, and the diagonal; `fold` adds the
    variance that is dropped."""
    K = basis.shape[-1]
    shape = (K, factor.shape[-2]) if is_rank_major(factor) else (factor.shape[-2], K)
    projected = factor.new_empty(*factor.shape[:-2], *shape)
    projected = projected.mT if is_rank_major(factor) else projected
    folded = diag.to(torch.float64, copy=True) if fold else diag.clone()
    for rows in products.row_chunks(factor):
        P = factor[..., rows, :].double()
        Y = P @ basis
        projected[..., rows, :] = Y.to(factor.dtype)
        if fold:
            folded[..., rows] += (P - Y @ basis.mT).square().sum(-1)
    return projected, folded.to(diag.dtype)
