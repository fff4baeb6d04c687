"""Precision "qr": the capacitance matrix is not formed, which avoids squaring the condition number.

With A = D^-1/2 P and b = D^-1/2 r, the triangular factor of a QR decomposition of [A; I] is L^T. z is the least-squares
solution for the right-hand side [b; 0], and the Mahalanobis term is the squared norm of its residual. Rows are
processed in chunks; each chunk is stacked below the triangular factor of the previous ones. All is in
float64, on any device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lrd_kernels._policy import QR_GROWTH

CHUNK_ELEMENTS = 2**21  # elements of A held at a time


def factorise(
    factor: Tensor, diag: Tensor, diff: Tensor | None, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Factorises factor [F, S, R] and diag [B, S], and solves for diff [B, N, S], with the conventions of the raw ops.

    N may be 0. Returns L^-1 [B, R, R], the summary [B, 2], z [B, N, R] and M [B, N]. Items with invalid numbers are NaN
    and have an infinite growth.
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
    triangle, fitted, left = diag.new_zeros(B, 0, R), diag.new_zeros(B, 0, N), diag.new_zeros(B, N)

    def stack(A: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The triangular factor, Q^T b and the squared residual, after adding rows A [B, n, R] and b [B, n, N].

        The longest row stays on top: zeros above it would make it the target of the reflections, and lose its digits.
        """
        missing = max(R - triangle.shape[1] - A.shape[1], 0)  # fewer rows than columns: zeros below
        reflectors, scales = torch.geqrf(torch.cat([triangle, A, A.new_zeros(B, missing, R)], 1))
        turned = torch.cat([fitted, b, b.new_zeros(B, missing, N)], 1)
        if N and R:
            turned = torch.ormqr(reflectors, scales, turned, transpose=True)
        return reflectors[:, :R].triu(), turned[:, :R], left + turned[:, R:].square().sum(1)

    # Rows of large norm first: Householder QR would lose digits of small rows if a large row came later.
    largest = spread.abs().amax(-1) if R else spread.new_zeros(spread.shape[:-1])
    lengths = torch.where(root > 0, largest.reshape(B, S).double() * root, 0)
    order = lengths.argsort(-1, descending=True)
    chunk = max(CHUNK_ELEMENTS // max(B * (R + N), 1), R, 1)
    for begin in range(0, S, chunk):
        rows = order[:, begin : begin + chunk]  # [B, n]
        index = rows.reshape(*spread.shape[:2], -1, 1).expand(-1, -1, -1, R)
        scale = root.gather(1, rows)[..., None]
        A = spread.gather(2, index).reshape(B, rows.shape[1], R).double() * scale
        b = diff.double().gather(2, rows[:, None].expand(-1, N, -1)).mT * scale
        if mask is not None:  # masked entries may be arbitrary
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
