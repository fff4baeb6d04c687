"""Differentiable truncation of the low-rank part, with the dropped variance added to the diagonal."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from lrd_kernels import _policy
from lrd_kernels.linalg import capacitance, products, rotation
from lrd_kernels.linalg.stack import Stack
from lrd_kernels.ops import dispatch
from lrd_kernels.ops.views import is_rank_major


class Truncate(Function):
    """(factor, diag, kept, energy, fold, backend) -> (factor, diag, singular values). If energy is given, it
    determines how many columns are kept."""

    @staticmethod
    def forward(
        ctx: Any, factor: Tensor, diag: Tensor, kept: int, energy: float | None, fold: bool, backend: str | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        columns = Stack.of(diag, factor[None], None)
        looking = dispatch.may_inspect(factor)
        values, vectors = capacitance.eigenvectors(columns.gram(backend=backend))
        singular = values.clamp(min=0).sqrt()
        if looking and not _resolved(singular, kept, _policy.GRAM_RANGE[factor.dtype == torch.float64]):
            singular, vectors = rotation.singular_basis(factor)
            values = singular.square()
        if energy is not None:
            kept = _enough(values.clamp(min=0), energy)
        fold = fold and kept < factor.shape[-1]  # else nothing is dropped
        singular, basis = singular[..., :kept], vectors[..., :kept]
        if looking and factor.dtype != torch.float64 and not _resolved(singular, kept, _policy.FLOAT32_RANGE):
            projected, folded = rotation.project_fold(factor, diag, basis, fold)
        else:
            projected, folded = columns.project_fold(
                diag, basis, fold, rank_major=is_rank_major(factor), backend=backend
            )
            if fold and looking and _swamped(projected, diag):
                projected, folded = rotation.project_fold(factor, diag, basis, fold)
        ctx.save_for_backward(factor, values, vectors, projected)
        ctx.fold, ctx.kept = fold, kept
        return projected, folded, singular

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_factor: Tensor, grad_diag: Tensor, grad_singular: Tensor) -> tuple[Tensor | None, ...]:
        factor, values, vectors, projected = ctx.saved_tensors
        need_factor, need_diag = ctx.needs_input_grad[:2]
        if not need_factor:
            return (None, grad_diag if need_diag else None, None, None, None, None)
        basis = vectors[..., : ctx.kept]
        chunks = list(products.row_chunks(factor))

        def pulls(rows: slice) -> tuple[Tensor, Tensor]:
            """The gradients of the projected rows, and the rows of the factor, in float64."""
            pull = grad_factor[..., rows, :].double()
            if ctx.fold:
                pull = pull - 2 * grad_diag[..., rows, None].double() * projected[..., rows, :].double()
            return pull, factor[..., rows, :].double()

        # First pass: the gradient for the basis, then through the eigenvectors for the Gram matrix.
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
        return (result, grad_diag if need_diag else None, None, None, None, None)


def _enough(values: Tensor, energy: float) -> int:
    """The smallest number of leading eigenvalues [..., R] with this share of their sum, in every batch item."""
    shares = values.cumsum(-1) / values.sum(-1, keepdim=True)
    enough = (shares < energy * (1 - 1e-12)).sum(-1) + 1  # [...]
    return min(int(enough.max()), values.shape[-1]) if enough.numel() else 0


def _resolved(singular: Tensor, kept: int, range: float) -> bool:
    """Whether the kept singular values [..., R] lie within a range of the largest one, and that in the range of numbers
    whose squares are accurate."""
    if singular[..., :kept].numel() == 0:
        return True
    largest, smallest = singular[..., 0], singular[..., :kept].amin(-1)
    fine = (smallest >= range * largest) & (largest > 1e-140) & (largest < 1e140)
    return bool((fine | (largest == 0) | largest.isnan()).all())


def _swamped(projected: Tensor, diag: Tensor) -> bool:
    """Whether the rounding of the projected factor, which the kernels fold, may change a diagonal entry."""
    rounding = 4 * torch.finfo(projected.dtype).eps
    return bool((rounding * products.row_squares(projected) > _policy.FOLD_TOLERANCE * diag).any())


def _is_dense(tensor: Tensor) -> bool:
    """Whether no two entries share memory."""
    return all(stride != 0 or size == 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _inverse_gaps(values: Tensor) -> Tensor:
    """1 / (lambda_j - lambda_i), and 0 on the diagonal.

    The gradient of a function of the covariance does not depend on the entries of equal eigenvalues. For other
    functions these entries are finite, and decrease to 0 for gaps within rounding error.
    """
    gaps = values[..., None, :] - values[..., :, None]
    least = 1e-12 * values[..., :1, None]
    return torch.where(gaps == 0, 0, gaps / (gaps.square() + least.square()))
