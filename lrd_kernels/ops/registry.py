"""Defines the raw ops of every backend and their fake implementations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lrd_kernels.ops import schemas
from lrd_kernels.ops.views import is_rank_major


class Ops(NamedTuple):
    """The raw ops of one backend, under the names of their schemas."""

    gram_fwd: Any
    capacitance_fwd: Any
    log_prob_fwd: Any
    joint_gram_fwd: Any
    project_fold_fwd: Any
    project_basis_bwd: Any
    project_fold_bwd: Any
    log_prob_bwd: Any


class OpInputs(NamedTuple):
    """The leading arguments of the S-sized ops, in the shapes of `schemas`."""

    cov_factor: Tensor  # [F, S, R]
    cov_diag: Tensor  # [B, S]
    value: Tensor | None  # [B, N, S]
    loc: Tensor | None  # [B, N, S]
    mask: Tensor | None  # [B, S]
    eps: float | None
    precision: int


class Forward(NamedTuple):
    """The outputs of `log_prob_fwd`."""

    result: Tensor  # [B, max(N, 1)]
    chol_inv: Tensor  # L^-1 [B, R, R]
    summary: Tensor  # growth and log det Sigma, [B, 2]
    z: Tensor  # [B, N, R]
    value_info: Tensor  # [B, N]

    @property
    def growth(self) -> Tensor:
        """[B]; infinite for an item whose covariance failed."""
        return self.summary[:, 0]


class Capacitance(NamedTuple):
    """The outputs of `capacitance_fwd`."""

    chol: Tensor  # L [B, R, R]
    chol_inv: Tensor  # L^-1 [B, R, R]
    z: Tensor  # [B, N, R]
    maha: Tensor  # [B, N]
    logdet: Tensor  # [B]
    growth: Tensor  # [B]


def _late(name: str) -> Callable[..., Any]:
    """An op of the Triton backend. The first call imports Triton. Triton launches on the current GPU, so that of the
    tensors is made the current one."""

    def call(*arguments: Any) -> Any:
        from lrd_kernels.ops import triton

        if not arguments[0].is_cuda:
            return triton.OPS[name](*arguments)
        with torch.cuda.device(arguments[0].device):
            return triton.OPS[name](*arguments)

    return call


_FAKES: dict[str, Callable[..., Any]] = {}


def _fake(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The fake implementation of an op, in all namespaces."""

    def keep(function: Callable[..., Any]) -> Callable[..., Any]:
        _FAKES[name] = function
        return function

    return keep


@_fake("gram_fwd")
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


@_fake("capacitance_fwd")
def _capacitance_fwd_fake(gram: Tensor, u: Tensor, quad: Tensor, log_diag: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.new_empty(t.shape) for t in (gram, gram, u, quad, log_diag, log_diag))


@_fake("log_prob_fwd")
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
    per_output: float,
) -> tuple[Tensor, ...]:
    B, R = cov_diag.shape[0], cov_factor.shape[2]
    N = 0 if value is None else value.shape[1]
    new = cov_factor.new_empty
    wide = torch.float64
    return (
        new((B, max(N, 1)), dtype=torch.float32 if mask is None and cov_factor.dtype != wide else wide),
        new((B, R, R) if chol_inv is None else 0, dtype=wide),
        new((B, 2) if summary is None else 0, dtype=wide),
        new((B, N, R), dtype=wide),
        new((B, N), dtype=torch.int32),
    )


@_fake("log_prob_bwd")
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


@_fake("joint_gram_fwd")
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


@_fake("project_fold_fwd")
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


@_fake("project_basis_bwd")
def _project_basis_bwd_fake(
    cov_factors: Tensor,
    vectors: Tensor | None,
    factor_scale: float,
    vector_scale: float,
    centre: bool,
    projected: Tensor,
    grad_factor: Tensor,
    grad_diag: Tensor | None,
) -> Tensor:
    B, T, _, R = cov_factors.shape
    columns = T * R + (0 if vectors is None else vectors.shape[1])
    return cov_factors.new_empty(B, columns, projected.shape[2], dtype=torch.float64)


@_fake("project_fold_bwd")
def _project_fold_bwd_fake(
    cov_factors: Tensor,
    vectors: Tensor | None,
    factor_scale: float,
    vector_scale: float,
    centre: bool,
    basis: Tensor,
    turn: Tensor,
    projected: Tensor,
    grad_factor: Tensor,
    grad_diag: Tensor | None,
    need_factors: bool,
    need_vectors: bool,
) -> tuple[Tensor, Tensor]:
    B, T, S, R = cov_factors.shape
    V = 0 if vectors is None else vectors.shape[1]
    new, first = cov_factors.new_empty, T * B if need_factors else 0
    grad_factors = new(first, R, S).mT if is_rank_major(cov_factors) else new(first, S, R)
    return grad_factors, new(V if need_vectors else 0, B, S)


def _register(libraries: list[torch.library.Library]) -> dict[str, Ops]:
    """Defines the ops of all namespaces. The compiled libraries register the kernels of the CPU and of CUDA."""
    for backend, namespace in schemas.NAMESPACES.items():
        # A fragment: of a whole library, torch holds what an interrupted import left against the next one.
        libraries.append(library := torch.library.Library(namespace, "FRAGMENT"))
        for name, schema in schemas.SCHEMAS.items():
            library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
            for device in ("CPU", "CUDA") if backend == "triton" else ():  # CPU tensors are for Triton's interpreter
                library.impl(name, _late(name), device)
            torch.library.register_fake(f"{namespace}::{name}", _FAKES[name], lib=library)
    return {
        backend: Ops(*(getattr(getattr(torch.ops, namespace), name).default for name in Ops._fields))
        for backend, namespace in schemas.NAMESPACES.items()
    }


_libraries: list[torch.library.Library] = []
try:
    OPS = _register(_libraries)
except BaseException:  # Ctrl-C, or memory that ran out: the next import defines the ops again
    for _library in _libraries:
        _library._destroy()
    raise
