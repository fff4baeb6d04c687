"""capacitance_fwd: the R x R computations in float64, by the CUDA kernel if it is available, else by torch's batched
routines, without synchronising with the host."""

from __future__ import annotations

import torch
from torch import Tensor

from lrd_kernels._policy import BLOCKED_RANK, PIVOT_NUDGE
from lrd_kernels.ops import dispatch


def capacitance_fwd(gram: Tensor, u: Tensor, quad: Tensor, log_diag: Tensor) -> tuple[Tensor, ...]:
    R = gram.shape[-1]
    if R <= BLOCKED_RANK and _serves(gram):
        return torch.ops.lrd_cuda.capacitance_fwd(*(t.contiguous() for t in (gram, u, quad, log_diag)))
    finite = gram.isfinite().all(-1).all(-1)
    safe = torch.where(finite[:, None, None], gram, 0)
    diagonal = safe.diagonal(dim1=-2, dim2=-1)  # [B, R]
    eye = torch.eye(R, dtype=gram.dtype, device=gram.device)
    chol, info = torch.linalg.cholesky_ex(safe + eye)
    # Every exact pivot is at least 1. If rounding made one negative, the largest possible rounding error is added.
    nudge = torch.diag_embed(R * PIVOT_NUDGE * (1 + diagonal))
    nudged = torch.linalg.cholesky_ex(safe + eye + nudge)[0]
    chol = torch.where((info == 0)[:, None, None], chol, nudged)
    chol_inv = torch.linalg.solve_triangular(chol, eye, upper=False).tril()
    y = u @ chol_inv.mT  # [B, N, R]
    logdet = log_diag + 2 * chol.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    growth = (chol_inv.square() @ diagonal[..., None])[..., 0].amax(-1).clamp(min=1) if R else torch.ones_like(logdet)
    good = finite & logdet.isfinite() & growth.isfinite()
    growth = torch.where(good, growth, torch.inf)
    return chol, chol_inv, y @ chol_inv, quad - y.square().sum(-1), logdet, growth


def _serves(gram: Tensor) -> bool:
    """Whether the CUDA kernel is available for this tensor."""
    return gram.is_cuda and dispatch._serves("cuda", "cuda", gram.device.index)
