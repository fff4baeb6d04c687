"""How much of the error do the columns of a factor explain?"""

from __future__ import annotations

import torch
from torch import Tensor


def unexplained_error(factor: Tensor, error: Tensor) -> Tensor:
    """`|e - Q Q^T e| / |e|` with Q an orthonormal basis of the columns of `factor` [B, S, R], of errors [B, S]: [B].

    1 without columns, 0 where the error is a combination of them.
    """
    if factor.shape[-1] == 0:
        return error.new_ones(len(error))
    basis = torch.linalg.qr(factor.double()).Q
    left = error.double() - (basis @ (basis.mT @ error.double()[..., None]))[..., 0]
    return (left.norm(dim=-1) / error.double().norm(dim=-1).clamp(min=1e-30)).to(error.dtype)
