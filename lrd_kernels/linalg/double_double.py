"""Products of matrices with about 31 digits, for results that are small differences of large terms."""

from __future__ import annotations

import torch
from torch import Tensor

SPLIT = 2.0**27 + 1  # Dekker's: splits 53 bits into two halves, whose products are exact


def product(A: Tensor, B: Tensor) -> Tensor:
    """`A B` [..., n, m] of float64 matrices [..., n, R] and [..., R, m], rounded once unless the terms cancel by more
    than 1e15."""
    high = A.new_zeros(*A.shape[:-1], B.shape[-1])
    low = torch.zeros_like(high)
    for k in range(A.shape[-1]):
        term, rest = _exact_product(A[..., :, k, None], B[..., None, k, :])
        total = high + term
        back = total - high  # Knuth's: what the sum has lost
        low = low + ((high - (total - back)) + (term - back)) + rest
        high = total
    return high + low


def _exact_product(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The rounded product and its rounding error."""
    product = a * b
    (a_high, a_low), (b_high, b_low) = _halves(a), _halves(b)
    return product, a_low * b_low - (((product - a_high * b_high) - a_low * b_high) - a_high * b_low)


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    scaled = SPLIT * x
    high = scaled - (scaled - x)
    return high, x - high
