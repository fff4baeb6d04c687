"""The columns of a joint covariance, read from the samples in place without concatenating them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from lrd_kernels import reference
from lrd_kernels._policy import FLOAT32_SQUARES, OP_PRECISIONS
from lrd_kernels.linalg import capacitance, products
from lrd_kernels.ops import dispatch, registry
from lrd_kernels.ops.views import is_rank_major

BACKWARD_OPS = ("cpu",)  # backends that have the gradients of a projection as ops; others use the reference in chunks


def mean_of(tensors: Tensor) -> Tensor:
    """The mean over the first dimension, in float64, without a copy of all in float64, nor of its gradient."""
    plainly = torch.compiler.is_compiling() or dispatch.transforms_active()
    return _mean(tensors) if plainly else _Mean.apply(tensors)


def _mean(tensors: Tensor) -> Tensor:
    total = torch.zeros(tensors.shape[1:], dtype=torch.float64, device=tensors.device)
    for tensor in tensors:
        total = total + tensor
    return total / tensors.shape[0]


class _Mean(Function):
    """The same for plain eager calls, whose gradient takes no memory."""

    @staticmethod
    def forward(tensors: Tensor) -> Tensor:
        return _mean(tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.like = inputs[0].dtype, inputs[0].shape[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        dtype, count = ctx.like
        return (grad / count).to(dtype).expand(count, *grad.shape)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return _mean(tangent)


class Pull(NamedTuple):
    """What comes back to a projection: the gradients grad_factor [..., S, K] for what was projected [..., S, K], and
    grad_diag [..., S], None if nothing was folded."""

    projected: Tensor
    grad_factor: Tensor
    grad_diag: Tensor | None

    def rows(self, rows: slice) -> Pull:
        grad_diag = None if self.grad_diag is None else self.grad_diag[..., rows]
        return Pull(self.projected[..., rows, :], self.grad_factor[..., rows, :], grad_diag)


@dataclass(frozen=True)
class Stack:
    """A stack of T R + V columns for Gaussians of shape [..., S].

    The columns are the factors [T, ..., S, R] times `factor_scale`, then the vectors [V, ..., S] times `vector_scale`,
    with their mean subtracted first if `centre` is True.
    """

    shape: Sequence[int]
    factors: Tensor
    vectors: Tensor
    factor_scale: float = 1.0
    vector_scale: float = 1.0
    centre: bool = False

    @classmethod
    def of(
        cls,
        like: Tensor,
        factors: Tensor | None,
        vectors: Tensor | None,
        factor_scale: float = 1.0,
        vector_scale: float = 1.0,
        centre: bool = False,
    ) -> Stack:
        """A stack with the shape, dtype and device of `like` [..., S]; None means no columns."""
        if factors is None:
            factors = like.new_empty(0, *like.shape, 0)
        if vectors is None:
            vectors = like.new_empty(0, *like.shape)
        return cls(like.shape, factors, vectors, factor_scale, vector_scale, centre)

    @property
    def split(self) -> int:
        """The number of columns that come from the factors."""
        return self.factors.shape[0] * self.factors.shape[-1]

    @property
    def columns(self) -> int:
        return self.split + self.vectors.shape[0]

    @property
    def largest_rank(self) -> int:
        """The rank that the columns have at most: deviations from a mean sum to zero."""
        return self.columns - (1 if self.centre and self.vectors.shape[0] else 0)

    @property
    def only_factors(self) -> Stack:
        return replace(self, vectors=self.vectors[:0])

    @property
    def only_vectors(self) -> Stack:
        return replace(self, factors=self.factors[:0])

    @property
    def requires_grad(self) -> bool:
        return torch.is_grad_enabled() and (self.factors.requires_grad or self.vectors.requires_grad)

    def dense(self) -> Tensor:
        """All columns side by side: [..., S, T R + V]. The factor itself if there is nothing else."""
        if self.factors.shape[0] == 1 and self.vectors.shape[0] == 0 and self.factor_scale == 1.0:
            return self.factors[0].expand(*self.shape, self.factors.shape[-1])
        blocks = [(block * self.factor_scale).expand(*self.shape, block.shape[-1]) for block in self.factors]
        vectors = self.vectors
        if self.centre and vectors.shape[0]:  # the mean may be far larger than the deviations
            vectors = (vectors.double() - mean_of(vectors)).to(vectors.dtype)
        blocks.append((vectors * self.vector_scale).movedim(0, -1).expand(*self.shape, vectors.shape[0]))
        return torch.cat(blocks, -1)

    def gram(self, *, precision: str = "float64", backend: str | None = None) -> Tensor:
        """`X^T X` of the columns X, in float64: [..., T R + V, T R + V]."""
        chosen = dispatch.choose(backend, self.factors.device)
        if chosen == "reference":
            X = self.dense()
            return reference.gram(X, X.new_ones(()).expand(X.shape[:-1]))
        gram = registry.OPS[chosen].joint_gram_fwd(*self._inputs(), OP_PRECISIONS[precision])
        return gram.reshape(*self.shape[:-1], *gram.shape[1:])

    def project_fold(
        self, diag: Tensor, basis: Tensor, fold: bool, *, rank_major: bool, backend: str | None = None
    ) -> tuple[Tensor, Tensor]:
        """`X Q` for a basis Q [..., T R + V, K], and the diagonal [..., S]; `fold` adds the dropped variance."""
        chosen = dispatch.choose(backend, self.factors.device)
        if chosen == "reference":
            return reference.project_fold(self.dense(), diag.expand(self.shape), basis, fold)
        dispatch.refuse_tangents("a truncated covariance", diag)
        flat_diag = diag.expand(self.shape).reshape(self._items, self.shape[-1])
        flat_basis = basis.reshape(self._items, *basis.shape[-2:]).contiguous()
        factor, folded = registry.OPS[chosen].project_fold_fwd(*self._inputs(), flat_diag, flat_basis, fold, rank_major)
        return factor.reshape(*self.shape, factor.shape[-1]), folded.reshape(self.shape)

    def project_basis_bwd(self, pull: Pull, *, backend: str | None = None) -> Tensor:
        """The gradient of `project_fold` for the basis, in float64: [..., T R + V, K]."""
        chosen = dispatch.choose(backend, self.factors.device)
        if chosen in BACKWARD_OPS:
            grad = registry.OPS[chosen].project_basis_bwd(*self._inputs(), *self._flat(pull))
            return grad.reshape(*self.shape[:-1], *grad.shape[1:])
        X, total = self.dense(), pull.projected.new_zeros((), dtype=torch.float64)
        for rows in products.row_chunks(X):
            total = total + reference.project_basis_bwd(X[..., rows, :], *pull.rows(rows))
        return total

    def project_fold_bwd(
        self,
        basis: Tensor,
        turn: Tensor,
        pull: Pull,
        need_factors: bool,
        need_vectors: bool,
        *,
        backend: str | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of `project_fold` for the factors [T, ..., S, R] and the vectors [V, ..., S], None if not
        needed. `basis turn^T + turn basis^T` is the gradient for the Gram matrix, from which the basis comes."""
        chosen = dispatch.choose(backend, self.factors.device)
        (T, *_, R), V = self.factors.shape, self.vectors.shape[0]
        if chosen in BACKWARD_OPS:
            matrices = (matrix.reshape(self._items, *matrix.shape[-2:]).contiguous() for matrix in (basis, turn))
            grad_factors, grad_vectors = registry.OPS[chosen].project_fold_bwd(
                *self._inputs(), *matrices, *self._flat(pull), need_factors, need_vectors
            )
        else:
            X = self.dense()
            like = self.factors.new_empty
            grad_factors = (
                like(T, *self.shape[:-1], R, self.shape[-1]).mT if self.rank_major else like(T, *self.shape, R)
            )
            grad_vectors = like(V, *self.shape)
            for rows in products.row_chunks(X):
                part = reference.project_fold_bwd(X[..., rows, :], basis, turn, *pull.rows(rows))
                of_factors, of_vectors = part[..., : self.split], part[..., self.split :]
                if self.centre:
                    of_vectors = of_vectors - of_vectors.mean(-1, keepdim=True)
                for t in range(T):
                    grad_factors[t][..., rows, :] = self.factor_scale * of_factors[..., t * R : (t + 1) * R]
                grad_vectors[..., rows] = self.vector_scale * of_vectors.movedim(-1, 0)
        return (
            grad_factors.reshape(T, *self.shape, R) if need_factors else None,
            grad_vectors.reshape(V, *self.shape) if need_vectors else None,
        )

    def basis_gram(self, rank: int, *, backend: str | None = None) -> Tensor:
        """The Gram matrix whose eigenvectors define the `rank` leading columns.

        If columns are dropped, a slightly different basis changes almost nothing, so float32 products are used, unless
        they leave the range of float32. If all columns are kept, every digit matters.
        """
        if not 0 < rank < self.columns:
            return self.gram(backend=backend)
        gram = self.gram(precision="float32", backend=backend)
        if dispatch.may_inspect(gram):
            largest = gram.diagonal(dim1=-2, dim2=-1).amax(-1)
            if not bool(((largest > FLOAT32_SQUARES[0]) & (largest < FLOAT32_SQUARES[1])).all()):
                return self.gram(backend=backend)
        return gram

    def truncate(self, diag: Tensor, rank: int, gram: Tensor, *, rank_major: bool) -> tuple[Tensor, Tensor]:
        """The `rank` leading columns, from the Gram matrix, and the diagonal with the variance of the others added."""
        basis = capacitance.eigenvectors(gram)[1][..., :rank]
        return self.project_fold(diag, basis, rank < self.columns, rank_major=rank_major)

    @property
    def rank_major(self) -> bool:
        """The layout of the factors, or of the vectors as columns if there are no factors."""
        return is_rank_major(self.factors if self.split else self.vectors.movedim(0, -1))

    @property
    def _items(self) -> int:
        return math.prod(self.shape[:-1])

    def _flat(self, pull: Pull) -> Pull:
        """With one batch dimension."""
        projected, grad_factor = (t.reshape(self._items, *t.shape[-2:]) for t in pull[:2])
        grad_diag = None if pull.grad_diag is None else pull.grad_diag.reshape(self._items, self.shape[-1])
        return Pull(projected, grad_factor, grad_diag)

    def _inputs(self) -> tuple[Tensor, Tensor, float, float, bool]:
        """The stack as arguments of a raw op, with one batch dimension: factors [B, T, S, R] and vectors [B, V, S]."""
        dispatch.refuse_tangents("a truncated covariance", self.factors, self.vectors)
        T, R, V = self.factors.shape[0], self.factors.shape[-1], self.vectors.shape[0]
        factors = self.factors.detach().movedim(0, -3).expand(*self.shape[:-1], T, self.shape[-1], R)
        vectors = self.vectors.detach().movedim(0, -2).expand(*self.shape[:-1], V, self.shape[-1])
        return (
            factors.reshape(self._items, T, self.shape[-1], R),
            vectors.reshape(self._items, V, self.shape[-1]),
            self.factor_scale,
            self.vector_scale,
            self.centre,
        )
