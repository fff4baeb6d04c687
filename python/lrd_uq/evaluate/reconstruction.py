"""How much of the error the columns of a factor explain."""

from __future__ import annotations

import torch
from torch import Tensor


def unexplained_error(factor: Tensor, error: Tensor) -> Tensor:
    """`|e - Q Q^T e| / |e|` for errors `e` [B, S]; Q is an orthonormal basis of the columns of `factor` [B, S, R].

    [B]: 1 without columns, and 0 if the error is a linear combination of them.
    """
    if factor.shape[-1] == 0:
        return error.new_ones(len(error))
    basis = torch.linalg.qr(factor.double()).Q
    left = error.double() - (basis @ (basis.mT @ error.double()[..., None]))[..., 0]
    return (left.norm(dim=-1) / error.double().norm(dim=-1).clamp(min=1e-30)).to(error.dtype)
