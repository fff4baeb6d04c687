"""The backward pass on the raw ops: the op itself, or QR if a Cholesky factorisation is not accurate enough."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lrd_kernels import _policy
from lrd_kernels._policy import exp_limit
from lrd_kernels.autograd.forward import Terms, of_factors, rows_of
from lrd_kernels.linalg.dual import Either
from lrd_kernels.linalg.qr_inverse import Inverse
from lrd_kernels.ops import registry
from lrd_kernels.ops.registry import OpInputs
from lrd_kernels.ops.views import is_rank_major


class Saved(NamedTuple):
    """The outputs of the forward op that are saved for the backward op."""

    chol_inv: Tensor  # L^-1 [B, R, R]
    summary: Tensor  # growth and log det Sigma, [B, 2]
    z: Tensor  # [B, N, R]
    value_info: Tensor  # [B, N]

    @property
    def failed(self) -> Tensor:
        """Whether a result [B, max(N, 1)] is invalid."""
        return self.value_info != 0 if self.value_info.shape[1] else self.summary[:, :1].isinf()


class Gradients(NamedTuple):
    """The outputs of the backward op, and z [B, N, R], to more digits where it was computed by QR."""

    factor: Tensor
    diag: Tensor
    loc: Tensor
    z: Tensor


class Wanted(NamedTuple):
    """The last arguments of the backward op: weights of its two terms, and which gradients are needed."""

    maha: float
    logdet: float
    factor: bool
    diag: bool
    loc: bool
    sum_loc: bool


def log_prob_bwd(
    inputs: OpInputs, saved: Saved, grad: Tensor, wanted: Wanted, terms: Terms, redone: Tensor | None = None
) -> Gradients:
    """The backward op, or the same gradients by QR: all of them, or those of the factors `redone`."""
    if terms.outside:
        return _by_qr(inputs, saved.failed, grad, wanted, cholesky=terms.precision == _policy.DUAL)
    factor, diag, loc = registry.OPS[terms.backend].log_prob_bwd(*inputs, *saved, grad, *wanted)
    found = Gradients(factor, diag, loc, saved.z)
    if redone is not None:
        items, chosen = of_factors(inputs, redone)
        parts = _by_qr(chosen, saved.failed[items], grad[items], wanted)
        for output, part, at in zip(found, parts, (redone, items, items, items), strict=True):
            if part.numel():
                output[at] = part
    return found


def _by_qr(inputs: OpInputs, failed: Tensor, grad: Tensor, wanted: Wanted, *, cholesky: bool = False) -> Gradients:
    """The gradients of the op. `failed` [B, max(N, 1)] marks results whose gradients are zero. `cholesky` permits a
    Cholesky factorisation of the covariance if there are more columns than outputs."""
    factor, diag = inputs.cov_factor, inputs.cov_diag
    (F, S, R), B = factor.shape, diag.shape[0]
    rows = rows_of(inputs)
    N = rows.N
    weights = grad.double().masked_fill(failed, 0)
    along_m, along_logdet = (
        (wanted.maha * weights)[:, None, :N],
        wanted.logdet * weights.sum(-1)[:, None],
    )  # [B, 1, N], [B, 1]
    lost_values, lost = failed[:, None, :N], failed.all(-1)[:, None]
    inverse = Either(rows, cholesky=cholesky) if R > S else Inverse(rows)
    z = inverse.z.masked_fill(lost_values, 0)
    grad_factor = factor.new_empty(F, R, S).mT if is_rank_major(factor) else factor.new_empty(F, S, R)
    grad_diag, grad_loc = diag.new_empty(B, S), diag.new_empty(B, 1 if wanted.sum_loc else N, S)
    for s, (a, W, t) in inverse.parts():
        a = a.masked_fill(lost_values, 0)
        pulled = along_m * a  # [B, n, N]
        if wanted.factor:
            part = 2 * ((along_logdet[..., None] * W).masked_fill(lost[..., None], 0) - pulled @ z.mT)
            grad_factor[:, s] = part.reshape(F, B // max(F, 1), *part.shape[1:]).sum(1).to(factor.dtype)
        if wanted.diag:
            part = (along_logdet * t).masked_fill(lost, 0) - (pulled * a).sum(-1)
            if inputs.eps is not None:
                part = part * diag[:, s].double().clamp(max=exp_limit(diag.dtype)).exp()
            grad_diag[:, s] = part if inputs.mask is None else torch.where(inputs.mask[:, s], part, 0)
        if wanted.loc:
            part = -2 * pulled.mT
            grad_loc[:, :, s] = part.sum(1, keepdim=True) if wanted.sum_loc else part
    nothing = factor.new_empty(0)
    return Gradients(
        grad_factor if wanted.factor else nothing,
        grad_diag if wanted.diag else nothing,
        grad_loc if wanted.loc else nothing,
        z.mT,
    )
