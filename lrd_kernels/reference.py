"""The reference implementation in plain torch, twice differentiable. It defines the correct results.

Everything is computed in `dtype` (default: float64), regardless of the dtype of the inputs. Results have the dtype
`result_dtype(input dtype)`. A batch item with an invalid number gives NaN and zero gradients; others are unaffected.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lrd_kernels._policy import LOG_2PI, exp_limit


def result_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scalar results such as log-probabilities, which half precision cannot represent."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def is_wide(cov_factor: Tensor) -> bool:
    """Whether there are more columns than outputs.

    The S x S matrix `D^-1/2 Sigma D^-1/2` is then smaller than the capacitance matrix, and more accurate: eigenvalues
    of 1 of the capacitance matrix would be lost in the rounding errors of the large ones.
    """
    return cov_factor.shape[-1] > cov_factor.shape[-2]


def positive_diag(raw: Tensor, eps: float, limit: float) -> Tensor:
    """The diagonal `eps + exp(raw)`, with constant value and gradient above the limit. The gradient is not zero, so
    optimisation can bring back an entry above the limit."""
    below = raw.clamp(max=limit).exp()
    above = math.exp(limit) * (1 + (raw - raw.detach()))
    return eps + torch.where(raw > limit, above, below)


def terms(
    value: Tensor | None,
    loc: Tensor | None,
    cov_factor: Tensor,
    cov_diag: Tensor,
    *,
    mask: Tensor | None = None,
    eps: float | None = None,
    maha: float,
    logdet: float,
    constant: float | Tensor = 0.0,
    dtype: torch.dtype = torch.float64,
    qr: bool = False,
) -> Tensor:
    """`maha * M + logdet * log det Sigma + constant`. All other scalar functions here are special cases.

    `M` is the Mahalanobis term of `value - loc`. It is omitted if `value` is None; `loc` may be None. If `eps` is
    given, the diagonal is `positive_diag(cov_diag, eps)`. `qr` factorises the capacitance matrix without forming it.
    """
    P, D, good = _prepare(cov_factor, cov_diag, mask, eps, dtype)
    scaled, wide = P / D.sqrt()[..., None], is_wide(cov_factor)
    # Cholesky factor of D^-1/2 Sigma D^-1/2 if it is the smaller matrix, else of the capacitance matrix
    chol = qr_tril(scaled.mT if wide else scaled) if wide or qr else _capacitance_tril(P, D)
    result = logdet * (2 * chol.diagonal(dim1=-2, dim2=-1).log().sum(-1) + D.log().sum(-1)) + constant
    if value is not None:
        diff = value.to(dtype) if loc is None else value.to(dtype) - loc.to(dtype)
        r, good_diff = _prepare_vector(diff, mask)
        if wide:
            # An inverse and a product, so that the triangular matrix is not copied for every value that shares it.
            eye = torch.eye(chol.shape[-1], dtype=dtype, device=chol.device)
            inverse = torch.linalg.solve_triangular(chol, eye, upper=False)
            M = torch.einsum("...st,...t->...s", inverse, r / D.sqrt()).square().sum(-1)
        else:
            z = _capacitance_solve(chol, _project(P, r / D))
            # |D^-1/2 (r - P z)|^2 + |z|^2 equals r^T D^-1 r - u^T z, but without cancellation
            M = ((r - _lift(P, z)).square() / D).sum(-1) + z.square().sum(-1)
        result = result + maha * M
        good = good & good_diff
    return torch.where(good, result, math.nan).to(result_dtype(cov_factor.dtype))


def log_prob(
    value: Tensor,
    loc: Tensor,
    cov_factor: Tensor,
    cov_diag: Tensor,
    *,
    mask: Tensor | None = None,
    eps: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Log-density of `value` [..., S] under N(loc, diag(cov_diag) + cov_factor cov_factor^T)."""
    constant = -0.5 * LOG_2PI * _count(cov_diag, mask, dtype)
    return terms(
        *(value, loc, cov_factor, cov_diag), mask=mask, eps=eps, maha=-0.5, logdet=-0.5, constant=constant, dtype=dtype
    )


def mahalanobis(
    diff: Tensor,
    cov_factor: Tensor,
    cov_diag: Tensor,
    *,
    mask: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """The squared distance `diff^T Sigma^-1 diff`."""
    return terms(diff, None, cov_factor, cov_diag, mask=mask, maha=1.0, logdet=0.0, dtype=dtype)


def logdet(
    cov_factor: Tensor, cov_diag: Tensor, *, mask: Tensor | None = None, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Log-determinant of Sigma."""
    return terms(None, None, cov_factor, cov_diag, mask=mask, maha=0.0, logdet=1.0, dtype=dtype)


def entropy(
    cov_factor: Tensor, cov_diag: Tensor, *, mask: Tensor | None = None, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Differential entropy in nats."""
    constant = 0.5 * (1 + LOG_2PI) * _count(cov_diag, mask, dtype)
    return terms(*(None, None, cov_factor, cov_diag), mask=mask, maha=0.0, logdet=0.5, constant=constant, dtype=dtype)


def gram(
    cov_factor: Tensor, cov_diag: Tensor, *, mask: Tensor | None = None, dtype: torch.dtype = torch.float64
) -> Tensor:
    """`P^T D^-1 P`."""
    P, D, good = _prepare(cov_factor, cov_diag, mask, None, dtype)
    return torch.where(good[..., None, None], P.mT @ (P / D[..., None]), math.nan)


def project_fold(
    cov_factor: Tensor, cov_diag: Tensor, basis: Tensor, fold: bool, *, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """`P V` for an orthonormal basis V [..., R, K], and the diagonal; `fold` adds the dropped variance."""
    P, D = cov_factor.to(dtype), cov_diag.to(dtype)
    projected = (P @ basis.to(dtype)).to(cov_factor.dtype)
    if fold:
        D = D + (P.square().sum(-1) - projected.to(dtype).square().sum(-1)).clamp(min=0)
    return projected, D.to(cov_diag.dtype)


def project_basis_bwd(X: Tensor, projected: Tensor, grad_factor: Tensor, grad_diag: Tensor | None) -> Tensor:
    """The gradient of `project_fold` for the basis, in float64: [..., R, K]. grad_diag is None if nothing is folded."""
    return X.double().mT @ _pull(projected, grad_factor, grad_diag)


def project_fold_bwd(
    X: Tensor, basis: Tensor, turn: Tensor, projected: Tensor, grad_factor: Tensor, grad_diag: Tensor | None
) -> Tensor:
    """The gradient of `project_fold` for the factor X [..., S, R], in float64.

    `basis turn^T + turn basis^T` is the gradient for the Gram matrix of X, from which the basis comes.
    """
    P = X.double()
    part = (_pull(projected, grad_factor, grad_diag) + P @ turn) @ basis.mT + (P @ basis) @ turn.mT
    return part if grad_diag is None else part + 2 * grad_diag[..., None].double() * P


def _pull(projected: Tensor, grad_factor: Tensor, grad_diag: Tensor | None) -> Tensor:
    """The gradient for `X basis`, from those for what is projected and for the diagonal."""
    pull = grad_factor.double()
    return pull if grad_diag is None else pull - 2 * grad_diag[..., None].double() * projected.double()


def capacitance_cholesky(
    cov_factor: Tensor, cov_diag: Tensor, *, mask: Tensor | None = None, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Lower Cholesky factor of `I + P^T D^-1 P` and, per batch item, 1 if it has invalid numbers, else 0."""
    P, D, good = _prepare(cov_factor, cov_diag, mask, None, dtype)
    chol = torch.where(good[..., None, None], _capacitance_tril(P, D), math.nan)
    return chol.to(result_dtype(cov_factor.dtype)), (~good).to(torch.int32)


def solve(rhs: Tensor, cov_factor: Tensor, cov_diag: Tensor, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """`Sigma^-1 rhs` for vectors rhs [..., S]."""
    P, D, good = _prepare(cov_factor, cov_diag, None, None, dtype)
    r, good_rhs = _prepare_vector(rhs.to(dtype), None)
    z = _capacitance_solve(_capacitance_tril(P, D), _project(P, r / D))
    return torch.where((good & good_rhs)[..., None], (r - _lift(P, z)) / D, math.nan).to(cov_factor.dtype)


def matvec(vec: Tensor, cov_factor: Tensor, cov_diag: Tensor, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """`Sigma vec` for vectors vec [..., S]."""
    v, P, D = vec.to(dtype), cov_factor.to(dtype), cov_diag.to(dtype)
    return (D * v + _lift(P, _project(P, v))).to(cov_factor.dtype)


def precision_diag(cov_factor: Tensor, cov_diag: Tensor, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """Diagonal of Sigma^-1."""
    P, D, good = _prepare(cov_factor, cov_diag, None, None, dtype)
    v = torch.linalg.solve_triangular(_capacitance_tril(P, D), P.mT, upper=False)
    diag = (1 - v.square().sum(-2) / D) / D
    return torch.where(good[..., None], diag, math.nan).to(cov_factor.dtype)


def _prepare(
    cov_factor: Tensor, cov_diag: Tensor, mask: Tensor | None, eps: float | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Factor and diagonal in `dtype`, with masked entries and invalid items replaced by valid numbers.

    They are replaced by selection, not multiplication, because 0 * NaN is NaN. The third result marks valid items.
    """
    P, D = cov_factor.to(dtype), cov_diag.to(dtype)
    if mask is not None:
        P = torch.where(mask[..., None], P, 0)
        D = torch.where(mask, D, 0 if eps is not None else 1)
    if eps is not None:
        D = positive_diag(D, eps, exp_limit(cov_diag.dtype))
        D = D if mask is None else torch.where(mask, D, 1)
    good = P.isfinite().all(-1).all(-1) & (D.isfinite() & (D > 0)).all(-1)
    return torch.where(good[..., None, None], P, 0), torch.where(good[..., None], D, 1), good


def _prepare_vector(vector: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The same for a difference or a right-hand side."""
    vector = vector if mask is None else torch.where(mask, vector, 0)
    good = vector.isfinite().all(-1)
    return torch.where(good[..., None], vector, 0), good


def _capacitance_tril(P: Tensor, D: Tensor) -> Tensor:
    eye = torch.eye(P.shape[-1], dtype=P.dtype, device=P.device)
    return torch.linalg.cholesky(eye + P.mT @ (P / D[..., None]))


def qr_tril(scaled: Tensor) -> Tensor:
    """Cholesky factor of I + scaled^T scaled, from the triangle of a QR decomposition of [I; scaled]."""
    columns = scaled.shape[-1]
    eye = torch.eye(columns, dtype=scaled.dtype, device=scaled.device).expand(*scaled.shape[:-2], columns, columns)
    triangle = torch.linalg.qr(torch.cat([eye, scaled], -2)).R
    signs = torch.where(triangle.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(scaled.dtype)
    return (signs[..., None] * triangle).mT


def _capacitance_solve(chol: Tensor, u: Tensor) -> Tensor:
    return torch.cholesky_solve(u[..., None], chol)[..., 0]


def _project(P: Tensor, v: Tensor) -> Tensor:
    return (P.mT @ v[..., None])[..., 0]


def _lift(P: Tensor, z: Tensor) -> Tensor:
    return (P @ z[..., None])[..., 0]


def _count(cov_diag: Tensor, mask: Tensor | None, dtype: torch.dtype) -> Tensor | int:
    return cov_diag.shape[-1] if mask is None else mask.sum(-1).to(dtype)
