"""Products of a factor with a few vectors in float64. The factor is converted to float64 in chunks of rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

CHUNK_ELEMENTS = 2**20  # elements of the factor held in float64 at a time


def row_chunks(factor: Tensor, elements: int | None = None) -> Iterator[slice]:
    """Chunks of rows of a factor [..., S, R], of about so many elements; there is at least one."""
    S = factor.shape[-2]
    rows = max((elements or CHUNK_ELEMENTS) * S // max(factor.numel(), 1), 1)
    return (slice(begin, begin + rows) for begin in range(0, max(S, 1), rows))


def project(factor: Tensor, vectors: Tensor) -> Tensor:
    """`v P` for the rows v of vectors [..., K, S]: [..., K, R]."""
    parts = (vectors[..., rows].double() @ factor[..., rows, :].double() for rows in row_chunks(factor))
    return sum(parts, start=factor.new_zeros((), dtype=torch.float64))


def lift(factor: Tensor, coefficients: Tensor) -> Tensor:
    """`P c` for the rows c of coefficients [..., K, R]: [..., K, S]."""
    return torch.cat([coefficients @ factor[..., rows, :].double().mT for rows in row_chunks(factor)], -1)
