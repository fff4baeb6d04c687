"""Precision "qr": the capacitance is never formed, and so the square of a condition number never met.

With A = D^-1/2 P and b = D^-1/2 r, the triangle of a QR decomposition of [A; I] is L^T, the Mahalanobis term is what is
left of b after a least-squares fit by it, and z the solution. Rows are taken in chunks, each stacked below the triangle
of those before it; in float64, on any device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lrd_kernels._policy import QR_GROWTH

CHUNK_ELEMENTS = 2**21  # of A that are held at a time


def factorise(
    factor: Tensor, diag: Tensor, diff: Tensor | None, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """From factor [F, S, R], diag [B, S] and diff [B, N, S], of which N may be 0, in the terms of the raw ops.

    Returns L^-1 [B, R, R], the summary [B, 2], z [B, N, R] and M [B, N]. Items with bad numbers come out as NaN, with
    an infinite growth.
    """
    B, S = diag.shape
    R = factor.shape[-1]
    diag = diag.double()
    root = diag.rsqrt()
    if mask is not None:
        root = torch.where(mask, root, 0)
    spread = factor[:, None].expand(-1, B // max(factor.shape[0], 1), -1, -1)  # [F, K, S, R]
    diff = diag.new_zeros(B, 0, S) if diff is None else diff
    N = diff.shape[1]
    triangle, fitted, left = diag.new_zeros(B, R, R), diag.new_zeros(B, R, N), diag.new_zeros(B, N)

    def stack(A: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The triangle, Q^T b and the square of what is left, after rows A [B, n, R] and b [B, n, N]."""
        reflectors, scales = torch.geqrf(torch.cat([triangle, A], 1))
        turned = torch.cat([fitted, b], 1)
        if N and R:
            turned = torch.ormqr(reflectors, scales, turned, transpose=True)
        return reflectors[:, :R].triu(), turned[:, :R], left + turned[:, R:].square().sum(1)

    # Long rows first: Householder's method would round the short ones to the size of a long one that comes later.
    largest = spread.abs().amax(-1) if R else spread.new_zeros(spread.shape[:-1])
    lengths = torch.where(root > 0, largest.reshape(B, S).double() * root, 0)
    order = lengths.argsort(-1, descending=True)
    chunk = max(CHUNK_ELEMENTS // max(B * (R + N), 1), R, 1)
    for begin in range(0, S, chunk):
        rows = order[:, begin : begin + chunk]  # [B, n]
        index = rows.reshape(*spread.shape[:2], -1, 1).expand(-1, -1, -1, R)
        scale = root.gather(1, rows)[..., None]
        A = spread.gather(2, index).reshape(B, -1, R).double() * scale
        b = diff.double().gather(2, rows[:, None].expand(-1, N, -1)).mT * scale
        if mask is not None:  # what is masked may hold anything
            A, b = (torch.where(scale > 0, t, 0) for t in (A, b))
        triangle, fitted, left = stack(A, b)
    eye = torch.eye(R, dtype=diag.dtype, device=diag.device).expand(B, R, R)
    triangle, fitted, left = stack(eye, diag.new_zeros(B, R, N))

    signs = torch.where(triangle.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0)[..., None]
    upper = signs * triangle
    logs = diag.log() if mask is None else torch.where(mask, diag.log(), 0)
    logdet = 2 * upper.diagonal(dim1=-2, dim2=-1).log().sum(-1) + logs.sum(-1)
    good = logdet.isfinite() & upper.isfinite().all(-1).all(-1)
    upper = torch.where(good[:, None, None], upper, eye)
    z = torch.linalg.solve_triangular(upper, signs * fitted, upper=True).mT
    chol_inv = torch.linalg.solve_triangular(upper, eye, upper=True).mT
    growth = torch.where(good, QR_GROWTH, torch.inf)
    return chol_inv.contiguous(), torch.stack([growth.to(logdet), logdet], -1), z.contiguous(), left
