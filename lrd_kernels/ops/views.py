"""Views of broadcast batch dimensions for the raw ops: F factors, K Gaussians per factor, N values per Gaussian.

A batch dimension along which the factor varies is an F dimension; one along which only the diagonal or the mask varies
is a K dimension (Gaussians that share a factor); one along which only value or loc vary is an N dimension (values that
share a Gaussian). Tensors are viewed as [F, S, R], [F K, S] and [F K, N, S] without a copy. The exceptions are small or
rare: a vector whose batch dimensions cannot be merged by strides, and a factor with two or more batch dimensions that
are slices of larger ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Shape = tuple[int, ...]


class BatchViews:
    """Maps the batch dimensions of a call to F, K and N."""

    def __init__(self, cov_factor: Tensor, cov_diag: Tensor, mask: Tensor | None, vectors: Sequence[Tensor | None]):
        factor_batch = cov_factor.shape[:-2]
        self.plain = len(factor_batch) < 2
        for tensor in (cov_diag, mask, *vectors):
            self.plain = self.plain and (tensor is None or tensor.shape[:-1] == factor_batch)
        if self.plain:  # the common case: one batch dimension, or none, and all have it
            self.shape: Shape = tuple(factor_batch)
            self.B = self.F = factor_batch[0] if factor_batch else 1
            self.N = 1
            return
        others = [t.shape[:-1] for t in vectors if t is not None]
        gaussian_batches = [factor_batch, cov_diag.shape[:-1]] + ([] if mask is None else [mask.shape[:-1]])
        self.shape = tuple(torch.broadcast_shapes(*gaussian_batches, *others))
        n = len(self.shape)
        vary_factor = _varies(factor_batch, n)
        vary_gaussian = [any(v) for v in zip(*(_varies(b, n) for b in gaussian_batches), strict=True)]
        F = [d for d in range(n) if vary_factor[d]]
        K = [d for d in range(n) if vary_gaussian[d] and not vary_factor[d]]
        N = [d for d in range(n) if not vary_gaussian[d]]
        # Sort factor dimensions by stride, so that a permuted batch can still be merged into one dimension.
        if not torch.compiler.is_compiling():  # strides may be symbols there
            strides = [0] * (n - len(factor_batch)) + list(cov_factor.stride()[:-2])
            F.sort(key=lambda d: -strides[d])
        self.order = F + K + N
        self.inverse = sorted(range(n), key=self.order.__getitem__)
        self.factor_dims, self.gaussian_dims = len(F), len(F) + len(K)
        sizes = [self.shape[d] for d in self.order]
        self.F = math.prod(sizes[: self.factor_dims])
        self.B = math.prod(sizes[: self.gaussian_dims])
        self.N = math.prod(sizes[self.gaussian_dims :])
        self.gaussian_shape = tuple(1 if d in N else self.shape[d] for d in range(n))

    def factor(self, cov_factor: Tensor) -> Tensor:
        """[..., S, R] -> [F, S, R]"""
        if self.plain:
            return cov_factor if cov_factor.dim() == 3 else cov_factor[None]
        event = cov_factor.shape[-2:]
        ordered = self._ordered(cov_factor, 2)
        for _ in self.order[self.factor_dims :]:
            ordered = ordered.squeeze(self.factor_dims)
        return ordered.reshape(self.F, *event)

    def gaussians(self, tensor: Tensor, event_dims: int = 1) -> Tensor:
        """A tensor with one entry per Gaussian, [..., *event] -> [B, *event]"""
        if self.plain:
            return tensor if self.shape else tensor[None]
        event = tensor.shape[tensor.dim() - event_dims :]
        ordered = self._ordered(tensor.expand(*self.gaussian_shape, *event), event_dims)
        return ordered.reshape(self.B, *event)

    def values(self, tensor: Tensor, event_dims: int = 1) -> Tensor:
        """A tensor with one entry per value, [..., *event] -> [B, N, *event]"""
        if self.plain:
            return tensor.unsqueeze(1) if self.shape else tensor[None, None]
        event = tensor.shape[tensor.dim() - event_dims :]
        ordered = self._ordered(tensor.expand(*self.shape, *event), event_dims)
        return ordered.reshape(self.B, self.N, *event)

    def from_factor(self, tensor: Tensor, like: Tensor) -> Tensor:
        """[F, S, R] -> the shape of `like`, the factor it belongs to"""
        if self.plain:
            return tensor if self.shape else tensor[0]
        sizes = [self.shape[d] for d in self.order[: self.factor_dims]]
        ones = [1] * (len(self.order) - self.factor_dims)
        spread = tensor.reshape(*sizes, *ones, *tensor.shape[1:])
        return self._restored(spread, 2).reshape(like.shape)

    def from_gaussians(self, tensor: Tensor) -> Tensor:
        """[B, *event] -> [..., *event] with 1 in every N dimension"""
        if self.plain:
            return tensor if self.shape else tensor[0]
        sizes = [self.shape[d] for d in self.order[: self.gaussian_dims]]
        ones = [1] * (len(self.order) - self.gaussian_dims)
        return self._restored(tensor.reshape(*sizes, *ones, *tensor.shape[1:]), tensor.dim() - 1)

    def from_values(self, tensor: Tensor) -> Tensor:
        """[B, N, *event] -> [..., *event]"""
        if self.plain:
            return tensor.squeeze(1) if self.shape else tensor[0, 0]
        sizes = [self.shape[d] for d in self.order]
        return self._restored(tensor.reshape(*sizes, *tensor.shape[2:]), tensor.dim() - 2)

    def shares_gaussians(self, tensor: Tensor) -> bool:
        """Whether there are several values per Gaussian and a vector [..., S] is the same for all of them."""
        if self.plain:
            return False
        batch = _varies(tensor.shape[:-1], len(self.shape))
        return self.N > 1 and not any(batch[d] for d in self.order[self.gaussian_dims :])

    def rows(self, tensor: Tensor) -> Tensor:
        """[..., M] -> [F, K N, M]: vectors that share a factor become the rows of one matrix"""
        per_factor = self.B // max(self.F, 1) * self.N
        return self.values(tensor).reshape(self.F, per_factor, tensor.shape[-1])

    def from_rows(self, tensor: Tensor) -> Tensor:
        """[F, K N, M] -> [..., M]"""
        return self.from_values(tensor.reshape(self.B, self.N, tensor.shape[-1]))

    def _ordered(self, tensor: Tensor, event_dims: int) -> Tensor:
        n = len(self.shape)
        batch_dims = tensor.dim() - event_dims
        if n > batch_dims:  # an empty index is an alias, for which torch's vmap of batched gradients has no rule
            tensor = tensor[(None,) * (n - batch_dims)]
        return tensor.permute(*self.order, *range(n, n + event_dims))

    def _restored(self, tensor: Tensor, event_dims: int) -> Tensor:
        n = len(self.shape)
        return tensor.permute(*self.inverse, *range(n, n + event_dims))


def _varies(batch: Sequence[int], n: int) -> list[bool]:
    """Along which of the n broadcast dimensions a batch varies (its size is not 1; it may be 0)."""
    return [False] * (n - len(batch)) + [size != 1 for size in batch]


def sum_to(grad: Tensor, like: Tensor) -> Tensor:
    """Sums a gradient over the batch dimensions along which its tensor was broadcast."""
    return grad if grad.shape == like.shape else grad.sum_to_size(like.shape)


def is_rank_major(cov_factor: Tensor) -> bool:
    """Whether S, not R, is the contiguous dimension. The gradient of the factor has the same layout."""
    return cov_factor.stride(-1) != 1 and cov_factor.stride(-2) == 1
