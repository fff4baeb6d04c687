"""Differentiable truncation of the low-rank part, with the dropped variance added to the diagonal."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from lrd_kernels import _policy, reference
from lrd_kernels.autograd import vmap
from lrd_kernels.linalg import capacitance, products, rotation
from lrd_kernels.linalg.stack import Pull, Stack
from lrd_kernels.ops import dispatch

SQUARES_ELEMENTS = 2**17  # elements of the projected factor that are squared at a time: they stay in the cache
Needs = tuple[bool, bool]  # which of (factors, vectors) need a gradient


class Truncation(NamedTuple):
    """What to keep of a stack of columns, and how they are scaled. If energy is given, it determines how many columns
    are kept."""

    kept: int
    energy: float | None
    fold: bool
    backend: str | None
    rank_major: bool
    factor_scale: float
    vector_scale: float
    centre: bool

    def stack(self, factors: Tensor, vectors: Tensor) -> Stack:
        """The stack of factors [..., T, S, R] and vectors [..., V, S]."""
        shape = (*vectors.shape[:-2], vectors.shape[-1])
        scales = (self.factor_scale, self.vector_scale, self.centre)
        return Stack(shape, factors.movedim(-3, 0), vectors.movedim(-2, 0), *scales)


def truncate(
    columns: Stack, diag: Tensor, kept: int, *, energy: float | None = None, fold: bool = True, backend: str | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The leading columns of a stack in the basis of its right singular vectors [..., S, K], the diagonal [..., S], and
    their singular values [..., K]; differentiable."""
    S, batch = columns.shape[-1], columns.shape[:-1]
    factors, vectors = columns.factors.movedim(0, -3), columns.vectors.movedim(0, -2)
    factors = factors.expand(*batch, *factors.shape[-3:])
    vectors = vectors.expand(*batch, *vectors.shape[-2:])
    scales = (columns.factor_scale, columns.vector_scale, columns.centre)
    how = Truncation(kept, energy, fold, backend, columns.rank_major, *scales)
    return Truncate.apply(factors, vectors, diag.expand(*batch, S), how)[:3]


class Truncate(Function):
    """(factors [..., T, S, R], vectors [..., V, S], diag [..., S], how) -> (projected, diag, singular values,
    eigenvalues and eigenvectors of the Gram matrix). The last two are for the backward pass."""

    @staticmethod
    def forward(factors: Tensor, vectors: Tensor, diag: Tensor, how: Truncation) -> tuple[Tensor, ...]:
        columns, kept = how.stack(factors, vectors), how.kept
        looking, narrow = dispatch.may_inspect(diag), diag.dtype != torch.float64
        values, eigenvectors = capacitance.eigenvectors(columns.gram(backend=how.backend))
        singular = values.clamp(min=0).sqrt()
        if looking and not _resolved(singular, min(kept, columns.largest_rank), _policy.GRAM_RANGE[not narrow]):
            singular, eigenvectors = rotation.singular_basis(columns.dense())
            values = singular.square()
        if how.energy is not None:
            kept = _enough(values.clamp(min=0), how.energy)
        fold = how.fold and kept < columns.columns  # else nothing is dropped
        singular, basis = singular[..., :kept], eigenvectors[..., :kept]
        exact = looking and narrow and not _resolved(singular, min(kept, columns.largest_rank), _policy.FLOAT32_RANGE)
        if not exact:
            projected, folded = columns.project_fold(diag, basis, fold, rank_major=how.rank_major, backend=how.backend)
            exact = fold and looking and _swamped(projected, diag)
        if exact:
            projected, folded = rotation.project_fold(columns.dense(), diag, basis, fold)
        return projected, folded, singular, values, eigenvectors

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        factors, vectors, _, ctx.how = inputs
        projected, _, _, values, eigenvectors = output
        ctx.mark_non_differentiable(values, eigenvectors)
        ctx.save_for_backward(factors, vectors, projected, values, eigenvectors)

    @staticmethod
    def backward(
        ctx: Any, grad_factor: Tensor, grad_diag: Tensor, grad_singular: Tensor, *_: Any
    ) -> tuple[Tensor | None, ...]:
        *needs, need_diag, _ = ctx.needs_input_grad
        grads: tuple[Tensor | None, ...] = (None, None)
        if any(needs):
            arguments = (grad_factor, grad_diag, grad_singular, *ctx.saved_tensors, ctx.how, tuple(needs))
            if torch.compiler.is_compiling() or not (torch.is_grad_enabled() or dispatch.transforms_active()):
                grads = _truncate_bwd(*arguments)
            else:
                grads = TruncateBackward.apply(*arguments)
        return (*grads, grad_diag if need_diag else None, None)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        led = vmap.lead(info.batch_size, in_dims, args, event_dims=(3, 2, 1), expand=True)
        return Truncate.apply(*led), (0,) * 5


def _truncate_bwd(
    grad_factor: Tensor,
    grad_diag: Tensor,
    grad_singular: Tensor,
    factors: Tensor,
    vectors: Tensor,
    projected: Tensor,
    values: Tensor,
    eigenvectors: Tensor,
    how: Truncation,
    needs: Needs,
) -> tuple[Tensor | None, ...]:
    """The gradients for factors and vectors, None if not needed."""
    columns, kept = how.stack(factors, vectors), projected.shape[-1]
    pull = Pull(projected, grad_factor, grad_diag if how.fold and kept < columns.columns else None)
    basis = eigenvectors[..., :kept]
    # The gradient for the basis, then through the eigenvectors that for the Gram matrix: V H V^T with a symmetric H,
    # of which only the first rows and columns are not zero.
    grad_basis = columns.project_basis_bwd(pull, backend=how.backend)
    turned = torch.cat([eigenvectors.mT @ grad_basis, torch.zeros_like(eigenvectors[..., kept:])], -1)
    inner = turned * _inverse_gaps(values)
    singular = values[..., :kept].clamp(min=0).sqrt()
    along = torch.where(singular > 0, grad_singular / (2 * singular), 0)
    inner.diagonal(dim1=-2, dim2=-1)[..., :kept] += along
    H = inner + inner.mT
    turn = eigenvectors @ torch.cat([H[..., :kept, :kept] / 2, H[..., kept:, :kept]], -2)
    grads = columns.project_fold_bwd(basis, turn, pull, *needs, backend=how.backend)
    return tuple(None if g is None else g.movedim(0, -n) for g, n in zip(grads, (3, 2), strict=True))


class TruncateBackward(Function):
    """`_truncate_bwd` as a function that supports differentiation, in plain torch, and vmap."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor | None, ...]:
        return _truncate_bwd(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.how, ctx.kept = inputs[-2], inputs[5].shape[-1]
        ctx.save_for_backward(*inputs[:5])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        *pulls, factors, vectors = ctx.saved_tensors

        def first_gradients(*arguments: Tensor) -> tuple[Tensor, ...]:
            *pulls, factors, vectors = arguments

            def result(factors: Tensor, vectors: Tensor) -> tuple[Tensor, ...]:
                return _plainly(ctx.how, ctx.kept, factors.double(), vectors.double())

            pulled = torch.func.vjp(result, factors, vectors)[1](tuple(g.double() for g in pulls))
            return tuple(g.to(factors.dtype) for g in pulled)

        cotangents = tuple(
            torch.zeros_like(t) if g is None else g for t, g in zip((factors, vectors), grads, strict=True)
        )
        second = torch.func.vjp(first_gradients, *pulls, factors, vectors)[1](cotangents)
        return (*second, *(None,) * 5)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        led = vmap.lead(info.batch_size, in_dims, args, event_dims=(2, 1, 1, 3, 2, 2, 1, 2), expand=True)
        grads = TruncateBackward.apply(*led)
        return grads, tuple(None if g is None else 0 for g in grads)


def _plainly(how: Truncation, kept: int, factors: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What `Truncate` returns for a diagonal of 0, in plain torch and float64, twice differentiable."""
    X = how.stack(factors, vectors).dense()
    values, eigenvectors = _Eigenvectors.apply(X.mT @ X)
    fold = how.fold and kept < X.shape[-1]
    projected, folded = reference.project_fold(X, torch.zeros_like(X[..., 0]), eigenvectors[..., :kept], fold)
    leading = values[..., :kept]
    return projected, folded, torch.where(leading > 0, torch.where(leading > 0, leading, 1).sqrt(), 0)


class _Eigenvectors(Function):
    """`capacitance.eigenvectors`, differentiable twice; the gradient is that of `_inverse_gaps`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gram: Tensor) -> tuple[Tensor, Tensor]:
        return capacitance.eigenvectors(gram)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*output)

    @staticmethod
    def backward(ctx: Any, grad_values: Tensor, grad_vectors: Tensor) -> Tensor:
        values, vectors = ctx.saved_tensors
        inner = (vectors.mT @ grad_vectors) * _inverse_gaps(values) + torch.diag_embed(grad_values)
        return vectors @ (inner + inner.mT) @ vectors.mT / 2


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
    squares = products.row_squares(projected, SQUARES_ELEMENTS)
    return bool((4 * torch.finfo(projected.dtype).eps * squares > _policy.FOLD_TOLERANCE * diag).any())


def _inverse_gaps(values: Tensor) -> Tensor:
    """1 / (lambda_j - lambda_i) [..., R, R] for eigenvalues [..., R] in descending order, and 0 on the diagonal.

    The gradient of a function of the covariance does not depend on the entries of equal eigenvalues. For other
    functions these entries are finite, and decrease to 0 for gaps within rounding error.
    """
    gaps = values[..., None, :] - values[..., :, None]
    least = 1e-12 * values[..., :1, None].detach()
    equal = gaps == 0
    return torch.where(equal, 0, gaps / torch.where(equal, 1, gaps.square() + least.square()))
