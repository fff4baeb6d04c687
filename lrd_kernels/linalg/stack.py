"""The columns of a joint covariance, met where the samples lie: they are not put side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lrd_kernels import reference
from lrd_kernels._policy import OP_PRECISIONS
from lrd_kernels.linalg import capacitance
from lrd_kernels.ops import dispatch, registry
from lrd_kernels.ops.views import is_rank_major


@dataclass(frozen=True)
class Stack:
    """Factors [T, ..., S, R] times their scale, then vectors [V, ..., S], less their mean where they are to be centred,
    times theirs: T R + V columns of Gaussians of the batch shape and S outputs that `shape` [..., S] tells."""

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
        """With the shape, dtype and device of `like` [..., S]; None stands for no columns."""
        if factors is None:
            factors = like.new_empty(0, *like.shape, 0)
        if vectors is None:
            vectors = like.new_empty(0, *like.shape)
        return cls(like.shape, factors, vectors, factor_scale, vector_scale, centre)

    @property
    def split(self) -> int:
        """How many columns come from the factors."""
        return self.factors.shape[0] * self.factors.shape[-1]

    @property
    def columns(self) -> int:
        return self.split + self.vectors.shape[0]

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
        """All columns side by side: [..., S, T R + V]."""
        blocks = [(block * self.factor_scale).expand(*self.shape, block.shape[-1]) for block in self.factors]
        vectors = self.vectors
        if self.centre and vectors.shape[0]:
            vectors = vectors - vectors.mean(0)
        blocks.append((vectors * self.vector_scale).movedim(0, -1).expand(*self.shape, vectors.shape[0]))
        return torch.cat(blocks, -1)

    def gram(self, *, precision: str = "float64", backend: str | None = None) -> Tensor:
        """`X^T X` of the columns X, in float64: [..., T R + V, T R + V]."""
        chosen = dispatch.choose(backend, self.factors.device.type)
        if chosen == "reference":
            X = self.dense()
            return reference.gram(X, X.new_ones(()).expand(X.shape[:-1]))
        gram = registry.OPS[chosen].joint_gram_fwd(*self._inputs(), OP_PRECISIONS[precision])
        return gram.reshape(*self.shape[:-1], *gram.shape[1:])

    def project_fold(
        self, diag: Tensor, basis: Tensor, fold: bool, *, rank_major: bool, backend: str | None = None
    ) -> tuple[Tensor, Tensor]:
        """`X Q` for a basis Q [..., T R + V, K], and the diagonal [..., S], folded with what that leaves out."""
        chosen = dispatch.choose(backend, self.factors.device.type)
        if chosen == "reference":
            return reference.project_fold(self.dense(), diag.expand(self.shape), basis, fold)
        flat_diag = diag.expand(self.shape).reshape(self._items, self.shape[-1])
        flat_basis = basis.reshape(self._items, *basis.shape[-2:]).contiguous()
        factor, folded = registry.OPS[chosen].project_fold_fwd(*self._inputs(), flat_diag, flat_basis, fold, rank_major)
        return factor.reshape(*self.shape, factor.shape[-1]), folded.reshape(self.shape)

    def basis_gram(self, rank: int, *, backend: str | None = None) -> Tensor:
        """The Gram matrix from whose eigenvectors `rank` columns are made: a slightly other basis loses next to nothing
        where columns are dropped; where all stay, every digit counts."""
        return self.gram(precision="float32" if 0 < rank < self.columns else "float64", backend=backend)

    def truncate(self, diag: Tensor, rank: int, gram: Tensor, *, rank_major: bool) -> tuple[Tensor, Tensor]:
        """The leading `rank` columns of these, by their Gram matrix, and the diagonal with the variance of the rest."""
        basis = capacitance.eigenvectors(gram)[1][..., :rank]
        return self.project_fold(diag, basis, True, rank_major=rank_major)

    @property
    def rank_major(self) -> bool:
        """The layout of the factors, or of the vectors as columns where there are no factors."""
        return is_rank_major(self.factors if self.split else self.vectors.movedim(0, -1))

    @property
    def _items(self) -> int:
        return math.prod(self.shape[:-1])

    def _inputs(self) -> tuple[Tensor, Tensor, float, float, bool]:
        """The stack's arguments of a raw op: factors [B, T, S, R] and vectors [B, V, S], of one batch dimension."""
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
