"""Products of a factor with a few vectors in float64. The factor is converted to float64 in chunks of rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

CHUNK_ELEMENTS = 2**20  # elements of the factor held in float64 at a time


def chunk_rows(factor: Tensor, elements: int | None = None) -> int:
    """The number of rows of a factor [..., S, R] in a chunk of about so many elements, at least 1."""
    return max((elements or CHUNK_ELEMENTS) * factor.shape[-2] // max(factor.numel(), 1), 1)


def row_chunks(factor: Tensor, elements: int | None = None) -> Iterator[slice]:
    """Chunks of rows of a factor [..., S, R], of about so many elements; there is at least one."""
    S, rows = factor.shape[-2], chunk_rows(factor, elements)
    return (slice(begin, begin + rows) for begin in range(0, max(S, 1), rows))


# `split`, not slices: its gradient is one concatenation, that of every slice a tensor of the factor's size.


def project(factor: Tensor, vectors: Tensor) -> Tensor:
    """`v P` for the rows v of vectors [..., K, S]: [..., K, R]."""
    rows = chunk_rows(factor)
    parts = zip(vectors.split(rows, -1), factor.split(rows, -2), strict=True)
    return sum((v.double() @ P.double() for v, P in parts), start=factor.new_zeros((), dtype=torch.float64))


def lift(factor: Tensor, coefficients: Tensor) -> Tensor:
    """`P c` for the rows c of coefficients [..., K, R]: [..., K, S]."""
    return torch.cat([coefficients.double() @ P.double().mT for P in factor.split(chunk_rows(factor), -2)], -1)


def row_squares(factor: Tensor, elements: int | None = None) -> Tensor:
    """The sum of squares of every row of P: [..., S]; in chunks of about so many elements."""
    return torch.cat([P.double().square().sum(-1) for P in factor.split(chunk_rows(factor, elements), -2)], -1)
