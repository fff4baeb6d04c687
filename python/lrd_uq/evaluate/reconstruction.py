"""How much of the error the columns of a factor explain."""

from __future__ import annotations

import torch
from torch import Tensor


def unexplained_error(factor: Tensor, error: Tensor) -> Tensor:
    """The share of errors e [B, S] that lies outside the columns of `factor` [B, S, R]: shape [B].

        |e - Q Q^T e| / |e|,    Q an orthonormal basis of the columns

    It is 1 without columns, and 0 if the error is a linear combination of them.

    Examples:
        >>> from lrd_uq.evaluate import unexplained_error
        >>> unexplained_error(torch.tensor([[[1.0], [0.0]]]), torch.tensor([[3.0, 4.0]]))
        tensor([0.8000])
    """
    if factor.shape[-1] == 0:
        return error.new_ones(len(error))
    basis = torch.linalg.qr(factor.double()).Q
    left = error.double() - (basis @ (basis.mT @ error.double()[..., None]))[..., 0]
    return (left.norm(dim=-1) / error.double().norm(dim=-1).clamp(min=1e-30)).to(error.dtype)
