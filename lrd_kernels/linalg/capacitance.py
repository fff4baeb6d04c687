"""R x R matrices of a covariance in float64, without gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from lrd_kernels import reference
from lrd_kernels._policy import OP_PRECISIONS
from lrd_kernels.linalg import qr
from lrd_kernels.ops import dispatch, registry
from lrd_kernels.ops.views import BatchViews


def gram(
    cov_factor: Tensor,
    cov_diag: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    precision: str = "float64",
    backend: str | None = None,
) -> Tensor:
    """`P^T D^-1 P`, or `P^T P` without a diagonal: [..., R, R]; NaN for items with invalid numbers.

    With "float32", products of float32 and narrower inputs are computed in float32, and their sums are added to float64
    sums after every block of rows.
    """
    if cov_diag is None:
        cov_diag = cov_factor.new_ones(()).expand(cov_factor.shape[:-1])
    dispatch.refuse_tangents("the capacitance matrix", cov_factor, cov_diag)
    chosen = dispatch.choose(backend, cov_factor.device)
    if chosen == "reference":
        return reference.gram(cov_factor, cov_diag, mask=mask)
    views = BatchViews(cov_factor, cov_diag, mask, ())
    inputs = (views.factor(cov_factor), views.gaussians(cov_diag), None, None)
    sums, _, _, log_diag = registry.OPS[chosen].gram_fwd(
        *inputs, None if mask is None else views.gaussians(mask), None, OP_PRECISIONS[precision]
    )
    bad = ~(log_diag.isfinite() & sums.isfinite().all(-1).all(-1))
    return views.from_gaussians(sums.masked_fill(bad[:, None, None], torch.nan))


def eigenvectors(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues in descending order, and eigenvectors [..., R, R]; NaN for a matrix that is not finite."""
    good = gram.isfinite().all(-1).all(-1)[..., None]
    values, vectors = torch.linalg.eigh(torch.where(good[..., None], gram, 0))
    vectors = signed(vectors.flip(-1))
    return torch.where(good, values.flip(-1), torch.nan), torch.where(good[..., None], vectors, torch.nan)


def signed(vectors: Tensor) -> Tensor:
    """Vectors [..., R, K] whose signs are arbitrary, each with its largest entry positive."""
    if vectors.numel() == 0:
        return vectors
    peaks = vectors.gather(-2, vectors.abs().argmax(-2, keepdim=True))
    return vectors * torch.where(peaks < 0, -1.0, 1.0)


def cholesky(gram: Tensor) -> Tensor:
    """The lower Cholesky factor of `I + gram`; NaN if the factorisation fails."""
    good = gram.isfinite().all(-1).all(-1)[..., None, None]
    capacitance = torch.where(good, gram, 0) + torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    chol, info = torch.linalg.cholesky_ex(capacitance)
    return torch.where(good & (info == 0)[..., None, None], chol, torch.nan)


def cholesky_by_qr(cov_factor: Tensor, cov_diag: Tensor, mask: Tensor | None = None) -> Tensor:
    """The same factor by QR, which remains accurate where a Cholesky factorisation fails (condition near 1e15)."""
    views = BatchViews(cov_factor, cov_diag, mask, ())
    own_mask = None if mask is None else views.gaussians(mask)
    rows = qr.Rows(views.factor(cov_factor), views.gaussians(cov_diag).double(), None, own_mask)
    chol = qr.regularised(rows.decomposed(values=False)).lower()
    return views.from_gaussians(chol.masked_fill(~rows.finite()[:, None, None], torch.nan))
