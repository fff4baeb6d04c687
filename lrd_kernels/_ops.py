"""Defines the raw ops and their fake implementations. The compiled library registers the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from lrd_kernels import _load, _schemas

__all__ = [
    "capacitance_fwd",
    "gram_fwd",
    "is_rank_major",
    "joint_gram_fwd",
    "log_prob_bwd",
    "log_prob_fwd",
    "project_fold_fwd",
]

_library = torch.library.Library(_schemas.NAMESPACE, "DEF")
for _name, _schema in _schemas.SCHEMAS.items():
    _library.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))

gram_fwd = torch.ops.lrd.gram_fwd.default
capacitance_fwd = torch.ops.lrd.capacitance_fwd.default
log_prob_fwd = torch.ops.lrd.log_prob_fwd.default
log_prob_bwd = torch.ops.lrd.log_prob_bwd.default
joint_gram_fwd = torch.ops.lrd.joint_gram_fwd.default
project_fold_fwd = torch.ops.lrd.project_fold_fwd.default

cpu_error = _load.cpu_error


def is_rank_major(cov_factor: Tensor) -> bool:
    """Whether S, not R, is the contiguous dimension; the gradient of the factor is laid out the same way."""
    return cov_factor.stride(-1) != 1 and cov_factor.stride(-2) == 1


@torch.library.register_fake("lrd::gram_fwd", lib=_library)
def _gram_fwd_fake(
    cov_factor: Tensor,
    cov_diag: Tensor,
    value: Tensor | None,
    loc: Tensor | None,
    mask: Tensor | None,
    eps: float | None,
    precision: int,
) -> tuple[Tensor, ...]:
    B, R = cov_diag.shape[0], cov_factor.shape[2]
    N = 0 if value is None else value.shape[1]
    shapes = ((B, R, R), (B, N, R), (B, N), (B,))
    return tuple(cov_factor.new_empty(shape, dtype=torch.float64) for shape in shapes)


@torch.library.register_fake("lrd::capacitance_fwd", lib=_library)
def _capacitance_fwd_fake(gram: Tensor, u: Tensor, quad: Tensor, log_diag: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.new_empty(t.shape) for t in (gram, gram, u, quad, log_diag, log_diag))


@torch.library.register_fake("lrd::log_prob_fwd", lib=_library)
def _log_prob_fwd_fake(
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
    B, R = cov_diag.shape[0], cov_factor.shape[2]
    N = 0 if value is None else value.shape[1]
    new = cov_factor.new_empty
    wide = torch.float64
    return (
        new((B, max(N, 1)), dtype=wide if cov_factor.dtype == wide else torch.float32),
        new((B, R, R) if chol_inv is None else 0, dtype=wide),
        new((B, 2) if summary is None else 0, dtype=wide),
        new((B, N, R), dtype=wide),
        new((B, N), dtype=torch.int32),
    )


@torch.library.register_fake("lrd::log_prob_bwd", lib=_library)
def _log_prob_bwd_fake(
    cov_factor: Tensor,
    cov_diag: Tensor,
    value: Tensor | None,
    loc: Tensor | None,
    mask: Tensor | None,
    eps: float | None,
    precision: int,
    chol_inv: Tensor,
    summary: Tensor,
    z: Tensor,
    value_info: Tensor,
    grad: Tensor,
    maha: float,
    logdet: float,
    need_factor: bool,
    need_diag: bool,
    need_loc: bool,
    sum_loc: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    F, S, R = cov_factor.shape
    B, N = z.shape[:2]
    new = cov_factor.new_empty
    if not need_factor:
        grad_factor = new(0)
    elif is_rank_major(cov_factor):
        grad_factor = new(F, R, S).mT
    else:
        grad_factor = new(F, S, R)
    return grad_factor, new(B, S) if need_diag else new(0), new(B, 1 if sum_loc else N, S) if need_loc else new(0)


@torch.library.register_fake("lrd::joint_gram_fwd", lib=_library)
def _joint_gram_fwd_fake(
    cov_factors: Tensor,
    vectors: Tensor | None,
    factor_scale: float,
    vector_scale: float,
    centre: bool,
    precision: int,
) -> Tensor:
    B, T, _, R = cov_factors.shape
    K = T * R + (0 if vectors is None else vectors.shape[1])
    return cov_factors.new_empty(B, K, K, dtype=torch.float64)


@torch.library.register_fake("lrd::project_fold_fwd", lib=_library)
def _project_fold_fwd_fake(
    cov_factors: Tensor,
    vectors: Tensor | None,
    factor_scale: float,
    vector_scale: float,
    centre: bool,
    cov_diag: Tensor,
    basis: Tensor,
    fold: bool,
    rank_major: bool,
) -> tuple[Tensor, Tensor]:
    B, _, S, _ = cov_factors.shape
    K = basis.shape[2]
    new = cov_factors.new_empty
    return new(B, K, S).mT if rank_major else new(B, S, K), new(B, S)
