"""log_prob_fwd: the Gram pass and the R x R computations.

With precision "auto", the certificate can require further passes: a pass in float64 for items whose capacitance matrix
float32 products do not give accurately enough, and a pass over the residuals r - P z for items whose values lie so far
along P that M cancels. The programs of other items process no rows in these launches.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lrd_kernels._policy import FLOAT32, FLOAT32_GROWTH, FLOAT32_SUM_ERROR, LOG_2PI, QUAD_ERROR, TOLERANCE
from lrd_kernels.ops.triton import configs
from lrd_kernels.ops.triton.capacitance import capacitance_fwd
from lrd_kernels.ops.triton.gram import launch_gram_fwd, one_tile
from lrd_kernels.ops.triton.launches import launch_log_prob_fwd, serves


def log_prob_fwd(
    cov_factor: Tensor,
    cov_diag: Tensor,
    value: Tensor | None,
    loc: Tensor | None,
    mask: Tensor | None,
    eps: float | None,
    precision: int,
    chol_inv: Tensor | None,
    summary: Tensor | None,
    maha: float,
    logdet: float,
    per_output: float,
) -> tuple[Tensor, ...]:
    inputs = (cov_factor, cov_diag, value, loc, mask, eps)
    if chol_inv is None and serves(cov_factor, cov_diag, value):
        return launch_log_prob_fwd(*inputs, precision, maha, logdet, per_output)
    compute = configs.compute_type(cov_factor.dtype, precision)
    if chol_inv is not None and summary is not None:
        compute = compute if precision == FLOAT32 else "float64"
        _, u, quad, _ = launch_gram_fwd(*inputs, compute=compute, want_gram=False)
        y = u @ chol_inv.mT
        z, M = y @ chol_inv, quad - y.square().sum(-1)
        growth, log_det = summary.unbind(1)
        made = (cov_factor.new_empty(0, dtype=torch.float64), cov_factor.new_empty(0, dtype=torch.float64))
    else:
        sums: tuple[Tensor, ...] = launch_gram_fwd(*inputs, compute=compute)
        found = capacitance_fwd(*sums)
        if compute == "float32":  # "auto"
            imprecise, cancels = _judge(sums, found, cov_factor.shape[1])
            residuals = value is not None and one_tile(cov_factor)
            if not residuals:
                imprecise = imprecise | cancels
            better = launch_gram_fwd(*inputs, compute="float64", again=imprecise.to(torch.int32))
            sums = tuple(_choose(imprecise, b, a) for a, b in zip(sums, better, strict=True))
            found = capacitance_fwd(*sums)
            if residuals:
                found = _score_residuals(inputs, found, cancels & ~imprecise)
        _, inverse, z, M, log_det, growth = found
        made = (inverse, torch.stack([growth, log_det], 1))
    dtype = torch.float32 if mask is None and cov_factor.dtype != torch.float64 else torch.float64
    bad = growth.isinf()[:, None]
    failed = bad | ~M.isfinite()  # [B, N]
    base = (logdet * log_det + per_output * cov_diag.shape[1])[:, None].masked_fill(bad, math.nan)
    result = base if M.shape[1] == 0 else torch.where(failed, math.nan, base + maha * M.clamp(min=0))
    return result.to(dtype), *made, z.masked_fill(failed[..., None], 0), failed.to(torch.int32)


def _judge(sums: tuple[Tensor, ...], found: tuple[Tensor, ...], S: int) -> tuple[Tensor, Tensor]:
    """[B] each: items whose float32 products may be too inaccurate for L^-1, and whose M or log-density cancels."""
    gram, _, quad, _ = sums
    _, _, z, maha, log_det, growth = found
    weighted = (z.square() * gram.diagonal(dim1=-2, dim2=-1)[:, None]).sum(-1)  # [B, N]
    error = FLOAT32_SUM_ERROR * (weighted + 2 * (weighted * quad).sqrt() + quad * QUAD_ERROR)
    density = 0.5 * (maha + log_det[:, None] + S * LOG_2PI).abs()
    tolerable = (error <= TOLERANCE * maha) & (error <= TOLERANCE * density)
    return ~(growth <= FLOAT32_GROWTH), ~tolerable.all(1)


def _score_residuals(inputs: tuple[Any, ...], found: tuple[Tensor, ...], which: Tensor) -> tuple[Tensor, ...]:
    """Refines z and M from the residuals, for the selected items [B]. z minimises |sqrt(w) (r - P z)|^2 + |z|^2, so the
    step from a z close to the minimum is small, and the correction of M is quadratic in it."""
    chol, inverse, z, M, log_det, growth = found
    again, shift = which.to(torch.int32), z.contiguous()
    _, u, quad, _ = launch_gram_fwd(*inputs, compute="float32", want_gram=False, again=again, shift=shift)
    y = (u - z) @ inverse.mT
    better_M = quad + z.square().sum(-1) - y.square().sum(-1)
    return chol, inverse, _choose(which, z + y @ inverse, z), _choose(which, better_M, M), log_det, growth


def _choose(which: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.where(which.reshape(-1, *(1,) * (a.dim() - 1)), a, b)
