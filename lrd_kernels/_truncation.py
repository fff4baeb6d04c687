"""Fewer columns: truncation of the low-rank part, with what it drops folded into the diagonal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from lrd_kernels import _capacitance, _dispatch, _ops, _validate, reference
from lrd_kernels._batch import Batch

__all__ = ["truncate"]

CHUNK_ELEMENTS = 2**20  # of the factor that the backward pass holds in float64 at a time


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
        values = _eigenvectors(_capacitance.gram(factor.detach(), backend=backend))[0].clamp(min=0)
        shares = values.cumsum(-1) / values.sum(-1, keepdim=True)
        enough = (shares < energy * (1 - 1e-12)).sum(-1) + 1  # [...]
        kept = min(int(enough.max()), R) if enough.numel() else 0
    return Truncate.apply(factor, diag, kept, fold, backend)


def _eigenvectors(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, the largest first, and eigenvectors [..., R, R]; NaN for a matrix that is not finite."""
    good = gram.isfinite().all(-1).all(-1)[..., None]
    values, vectors = torch.linalg.eigh(torch.where(good[..., None], gram, 0))
    # Signs are free: the largest entry of each vector is positive.
    if vectors.numel():
        peaks = vectors.gather(-2, vectors.abs().argmax(-2, keepdim=True))
        vectors = vectors * torch.where(peaks < 0, -1.0, 1.0)
    return torch.where(good, values.flip(-1), torch.nan), torch.where(good[..., None], vectors.flip(-1), torch.nan)


def project_fold(
    factor: Tensor, diag: Tensor, basis: Tensor, fold: bool, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """`P V`, and the diagonal with what `P V` leaves out, where it is folded."""
    if _dispatch.choose(backend, factor.device.type) == "reference":
        return reference.project_fold(factor, diag, basis, fold)
    batch = Batch(factor, diag, None, ())
    inputs = (batch.factor(factor), batch.gaussians(diag), batch.gaussians(basis, 2).contiguous())
    projected, folded = _ops.project_fold_fwd(*inputs, fold)
    return batch.from_gaussians(projected), batch.from_gaussians(folded)


class Truncate(Function):
    """(factor, diag, kept, fold, backend) -> (factor, diag, singular values)."""

    @staticmethod
    def forward(
        ctx: Any, factor: Tensor, diag: Tensor, kept: int, fold: bool, backend: str | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        # A slightly other basis loses next to nothing where columns are dropped; where all stay, every digit counts.
        precision = "float32" if kept < factor.shape[-1] and kept > 0 else "float64"
        values, vectors = _eigenvectors(_capacitance.gram(factor, precision=precision, backend=backend))
        singular = values[..., :kept].clamp(min=0).sqrt()
        projected, folded = project_fold(factor, diag, vectors[..., :kept], fold, backend)
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
        chunks = _row_chunks(factor)

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


def _row_chunks(factor: Tensor) -> list[slice]:
    S = factor.shape[-2]
    rows = max(CHUNK_ELEMENTS * S // max(factor.numel(), 1), 1)
    return [slice(begin, begin + rows) for begin in range(0, S, rows)]


def _is_dense(tensor: Tensor) -> bool:
    """Whether no two entries share memory."""
    return all(stride != 0 or size == 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _inverse_gaps(values: Tensor) -> Tensor:
    """1 / (lambda_j - lambda_i), and 0 on the diagonal. What depends on the covariance alone does not ask for the gap
    of equal eigenvalues; where it is asked for it stays finite, and falls to 0 within rounding."""
    gaps = values[..., None, :] - values[..., :, None]
    least = 1e-12 * values[..., :1, None]
    return torch.where(gaps == 0, 0, gaps / (gaps.square() + least.square()))


Blocks = list[tuple[Tensor, float]]


def stack(blocks: Blocks, like: Tensor) -> Tensor:
    """The columns of all blocks, each times its scale: [..., S, K]. `like` [..., S] tells the shape of none."""
    if not blocks:
        return like.new_zeros(*like.shape, 0)
    return torch.cat([(block * scale).expand(*like.shape, block.shape[-1]) for block, scale in blocks], -1)


@torch.no_grad()
def compress(parts: Sequence[tuple[Blocks, Tensor]], like: Tensor, rank: int) -> list[tuple[Tensor, Tensor]]:
    """Truncates stacks of column blocks, none of which is ever formed: each part's factor and folded diagonal.

    Blocks are met by their tensors: what is a block of the first part and of another one is read once. The first part
    must have all blocks, and another one a run of them. Two passes over their rows, in chunks: for the Gram matrix,
    then for the projections.
    """
    blocks = parts[0][0]
    total = sum(block.shape[-1] for block, _ in blocks)
    if total == 0:
        return [(like.new_zeros(*like.shape, 0), diag) for _, diag in parts]
    rank_major = _ops.is_rank_major(blocks[0][0])
    S, B = like.shape[-1], max(math.prod(like.shape[:-1]), 1)
    rows_at_once = max(CHUNK_ELEMENTS * 4 // (B * total), 1)
    chunks = [slice(begin, begin + rows_at_once) for begin in range(0, S, rows_at_once)]

    def gather(rows: slice) -> Tensor:
        """[..., n, K] of the first part, in the blocks' layout."""
        some = [(block[..., rows, :] * scale).expand(*like[..., rows].shape, -1) for block, scale in blocks]
        return torch.cat([s.mT for s in some], -2).mT if rank_major else torch.cat(some, -1)

    gram = like.new_zeros(*like.shape[:-1], total, total, dtype=torch.float64)
    for rows in chunks:
        gram += _capacitance.gram(gather(rows), precision="float32" if rank < total else "float64")
    offsets, begin = {}, 0
    for block, scale in blocks:
        offsets[id(block), scale] = slice(begin, begin + block.shape[-1])
        begin += block.shape[-1]

    plans = []  # which columns of the first part, their basis, and where the results go
    for own, diag in parts:
        picked = [offsets[id(block), scale] for block, scale in own]
        taken = slice(picked[0].start, picked[-1].stop) if picked else slice(0, 0)
        basis = _eigenvectors(gram[..., taken, taken])[1][..., :rank]
        shape = (*like.shape, basis.shape[-1])
        kept = like.new_empty(*shape[:-2], shape[-1], shape[-2]).mT if rank_major else like.new_empty(shape)
        plans.append((taken, basis, diag.expand(like.shape), kept, torch.empty_like(like)))
    for rows in chunks:
        X = gather(rows)
        for taken, basis, diag, kept, folded in plans:
            projected, part = project_fold(X[..., taken], diag[..., rows], basis, True)
            kept[..., rows, :], folded[..., rows] = projected, part
    return [(kept, folded) for *_, kept, folded in plans]
