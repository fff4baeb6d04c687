"""Fewer columns: truncation of the low-rank part, with what it drops folded into the diagonal."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from lrd_kernels import _capacitance, _ops, _products, _validate
from lrd_kernels._stack import Stack

__all__ = ["truncate"]


def truncate(
    cov_factor: Tensor,
    cov_diag: Tensor,
    rank: int | None = None,
    *,
    energy: float | None = None,
    fold: bool = True,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The best low-rank part of fewer columns, and a diagonal that makes up for it.

    The columns returned are orthogonal, longest first: the leading left singular vectors of `cov_factor` times their
    singular values. They come from the `R x R` Gram matrix in float64 and one pass over the factor, in its layout.

    Args:
        rank: how many columns to keep. None keeps all, and only turns them to be orthogonal.
        energy: instead of a rank: the smallest rank that keeps this share of `trace(P P^T)`, for every item of a batch.
        fold: adds to each diagonal entry the variance that its output loses, so that the variances stay what they were.

    Returns:
        factor [..., S, k], diag [..., S], and the k singular values [...] of the columns kept, in float64.
    """
    _validate.gaussian(cov_factor, cov_diag)
    R = cov_factor.shape[-1]
    if rank is not None and energy is not None:
        raise ValueError(f"rank or energy, not both; got rank={rank}, energy={energy}")
    if rank is not None and (not isinstance(rank, int) or isinstance(rank, bool)):
        raise TypeError(f"rank must be an int or None; got {type(rank).__name__}")
    if rank is not None and rank < 0:
        raise ValueError(f"rank must not be negative; got {rank}")
    if energy is not None and not 0 < energy <= 1:
        raise ValueError(f"energy must be above 0 and at most 1; got {energy}")
    shape = torch.broadcast_shapes(cov_factor.shape[:-2], cov_diag.shape[:-1])
    factor, diag = cov_factor.expand(*shape, *cov_factor.shape[-2:]), cov_diag.expand(*shape, cov_diag.shape[-1])
    kept = R if rank is None else min(rank, R)
    if energy is not None:
        values = _capacitance.eigenvectors(_capacitance.gram(factor.detach(), backend=backend))[0].clamp(min=0)
        shares = values.cumsum(-1) / values.sum(-1, keepdim=True)
        enough = (shares < energy * (1 - 1e-12)).sum(-1) + 1  # [...]
        kept = min(int(enough.max()), R) if enough.numel() else 0
    return Truncate.apply(factor, diag, kept, fold, backend)


class Truncate(Function):
    """(factor, diag, kept, fold, backend) -> (factor, diag, singular values)."""

    @staticmethod
    def forward(
        ctx: Any, factor: Tensor, diag: Tensor, kept: int, fold: bool, backend: str | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        # A slightly other basis loses next to nothing where columns are dropped; where all stay, every digit counts.
        precision = "float32" if kept < factor.shape[-1] and kept > 0 else "float64"
        values, vectors = _capacitance.eigenvectors(_capacitance.gram(factor, precision=precision, backend=backend))
        singular = values[..., :kept].clamp(min=0).sqrt()
        stack = Stack.of(diag, factor[None], None)
        rank_major = _ops.is_rank_major(factor)
        projected, folded = stack.project_fold(diag, vectors[..., :kept], fold, rank_major=rank_major, backend=backend)
        ctx.save_for_backward(factor, values, vectors, projected)
        ctx.fold, ctx.kept = fold, kept
        return projected, folded, singular

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_factor: Tensor, grad_diag: Tensor, grad_singular: Tensor) -> tuple[Tensor | None, ...]:
        factor, values, vectors, projected = ctx.saved_tensors
        need_factor, need_diag = ctx.needs_input_grad[:2]
        if not need_factor:
            return (None, grad_diag if need_diag else None, None, None, None)
        basis = vectors[..., : ctx.kept]
        chunks = list(_products.row_chunks(factor))

        def pulls(rows: slice) -> tuple[Tensor, Tensor]:
            """What reaches the projected rows, and the rows themselves, in float64."""
            pull = grad_factor[..., rows, :].double()
            if ctx.fold:
                pull = pull - 2 * grad_diag[..., rows, None].double() * projected[..., rows, :].double()
            return pull, factor[..., rows, :].double()

        # First pass: the gradient for the basis, through the eigenvectors to the Gram matrix.
        grad_basis = torch.zeros_like(basis)
        for rows in chunks:
            pull, P = pulls(rows)
            grad_basis += P.mT @ pull
        turned = torch.zeros_like(vectors)
        turned[..., : ctx.kept] = vectors.mT @ grad_basis
        inner = turned * _inverse_gaps(values)
        singular = values[..., : ctx.kept].clamp(min=0).sqrt()
        along = torch.where(singular > 0, grad_singular / (2 * singular), 0)
        inner.diagonal(dim1=-2, dim2=-1)[..., : ctx.kept] += along
        grad_gram = vectors @ (inner + inner.mT) @ vectors.mT

        # Second pass: the gradient for the factor, in its layout.
        result = torch.empty_like(factor) if _is_dense(factor) else factor.new_empty(factor.shape)
        for rows in chunks:
            pull, P = pulls(rows)
            part = pull @ basis.mT + P @ grad_gram
            if ctx.fold:
                part = part + 2 * grad_diag[..., rows, None].double() * P
            result[..., rows, :] = part.to(result.dtype)
        return (result, grad_diag if need_diag else None, None, None, None)


def _is_dense(tensor: Tensor) -> bool:
    """Whether no two entries share memory."""
    return all(stride != 0 or size == 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _inverse_gaps(values: Tensor) -> Tensor:
    """1 / (lambda_j - lambda_i), and 0 on the diagonal. What depends on the covariance alone does not ask for the gap
    of equal eigenvalues; where it is asked for it stays finite, and falls to 0 within rounding."""
    gaps = values[..., None, :] - values[..., :, None]
    least = 1e-12 * values[..., :1, None]
    return torch.where(gaps == 0, 0, gaps / (gaps.square() + least.square()))
