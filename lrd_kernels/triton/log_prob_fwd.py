"""log_prob_fwd: the Gram pass, the R-sized algebra, and with precision "auto" a second pass in float64 for the items
whose certificate asks for it: a launch whose programs have no rows where it does not."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lrd_kernels.triton.capacitance import capacitance_fwd
from lrd_kernels.triton.gram import launch_gram_fwd

FLOAT32_GROWTH = 8.0  # up to which sums of float32 products are enough
SUM_ERROR = 2.0**-22  # of such a sum, as a share of what orthogonal columns would have
TOLERANCE = 2.5e-7


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
    constant: float,
) -> tuple[Tensor, ...]:
    inputs = (cov_factor, cov_diag, value, loc, mask, eps)
    narrow = cov_factor.dtype != torch.float64 and precision != 1
    if chol_inv is not None and summary is not None:
        _, u, quad, _ = launch_gram_fwd(*inputs, wide=precision != 2, want_gram=False)
        y = u @ chol_inv.mT
        z, M = y @ chol_inv, quad - y.square().sum(-1)
        growth, log_det = summary.unbind(1)
        made = (cov_factor.new_empty(0, dtype=torch.float64), cov_factor.new_empty(0, dtype=torch.float64))
    else:
        sums: tuple[Tensor, ...] = launch_gram_fwd(*inputs, wide=not narrow)
        found = capacitance_fwd(*sums)
        if narrow and precision != 2:
            again = _imprecise(sums, found, cov_factor.shape[1])
            better = launch_gram_fwd(*inputs, wide=True, again=again.to(torch.int32))
            sums = tuple(_choose(again, b, a) for a, b in zip(sums, better, strict=True))
            found = capacitance_fwd(*sums)
        _, inverse, z, M, log_det, growth = found
        made = (inverse, torch.stack([growth, log_det], 1))
    dtype = torch.float64 if cov_factor.dtype == torch.float64 else torch.float32
    bad = growth.isinf()[:, None]
    failed = bad | ~M.isfinite()  # [B, N]
    base = (logdet * log_det + constant)[:, None].masked_fill(bad, math.nan)
    result = base if M.shape[1] == 0 else torch.where(failed, math.nan, base + maha * M.clamp(min=0))
    return result.to(dtype), *made, z.masked_fill(failed[..., None], 0), failed.to(torch.int32)


def _imprecise(sums: tuple[Tensor, ...], found: tuple[Tensor, ...], S: int) -> Tensor:
    """[B]: whose float32 products are not certain to be enough, for L^-1, for M or for the log-density."""
    gram, _, quad, _ = sums
    _, _, z, maha, log_det, growth = found
    weighted = (z.square() * gram.diagonal(dim1=-2, dim2=-1)[:, None]).sum(-1)  # [B, N]
    error = SUM_ERROR * (weighted + 2 * (weighted * quad).sqrt() + quad * 2.0**-29)
    density = 0.5 * (maha + log_det[:, None] + S * math.log(2 * math.pi)).abs()
    tolerable = (error <= TOLERANCE * maha) & (error <= TOLERANCE * density)
    return ~(growth <= FLOAT32_GROWTH) | ~tolerable.all(1)


def _choose(which: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.where(which.reshape(-1, *(1,) * (a.dim() - 1)), a, b)
