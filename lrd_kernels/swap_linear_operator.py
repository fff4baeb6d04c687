"""Puts the kernels into linear_operator's low-rank-plus-diagonal operator, which gpytorch's models use."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lrd_kernels import functional
from lrd_kernels._patching import Patch

__all__ = ["patch_linear_operator"]


class patch_linear_operator(Patch):
    """Makes linear_operator's `LowRankRootAddedDiagLinearOperator` use the kernels, in place.

    The kernels then compute its solves, log-determinants and `inv_quad_logdet`, with sums in float64, such as those of
    gpytorch's marginal likelihoods with inducing points. After a plain call the patch stays active until `undo()` is
    called on the returned object; as a context manager it is undone at the end of the block. Patches can be nested.

    Raises:
        ImportError: if linear_operator is not installed.
        RuntimeError: if its class does not have the expected methods.

    Examples:
        >>> with lrd.patch_linear_operator():  # doctest: +SKIP
        ...     loss = -marginal_log_likelihood(model(x), y)
    """

    @classmethod
    def _replaced(cls) -> tuple[type, dict[str, Any]]:
        from linear_operator.operators import LowRankRootAddedDiagLinearOperator as Target

        methods = {"_solve": _solve, "_logdet": _logdet, "inv_quad_logdet": _inv_quad_logdet}
        if missing := [name for name in methods if name not in vars(Target)]:
            raise RuntimeError(
                f"LowRankRootAddedDiagLinearOperator has no {', '.join(missing)}: this version of linear_operator is"
                " not supported"
            )
        return Target, methods


def _covariance(operator: Any) -> tuple[Tensor, Tensor]:
    """The factor [..., N, R] and the diagonal [..., N]."""
    return operator._linear_op.root.to_dense(), operator._diag_tensor.diagonal(dim1=-2, dim2=-1)


def _solve(self: Any, rhs: Tensor, preconditioner: Any = None, num_tridiag: int | None = 0) -> Tensor:
    """`Sigma^-1 rhs` for rhs [..., N, C]."""
    batch = torch.broadcast_shapes(rhs.shape[:-2], self.batch_shape)
    columns = rhs.expand(*batch, *rhs.shape[-2:]).movedim(-1, 0)  # [C, ..., N]
    return functional.solve(columns, *_covariance(self)).movedim(0, -1)


def _logdet(self: Any) -> Tensor:
    return functional.logdet(*_covariance(self))


def _inv_quad_logdet(
    self: Any, inv_quad_rhs: Tensor | None = None, logdet: bool | None = False, reduce_inv_quad: bool | None = True
) -> tuple[Tensor | None, Tensor | None]:
    """`rhs^T Sigma^-1 rhs` for every column of rhs [..., N, C], or their sum, and the log-determinant."""
    if inv_quad_rhs is not None and inv_quad_rhs.shape[:-1] != self.shape[:-1]:  # the original has the errors
        return patch_linear_operator._originals["inv_quad_logdet"](self, inv_quad_rhs, logdet, reduce_inv_quad)
    covariance = _covariance(self)
    inv_quad = None
    if inv_quad_rhs is not None:
        inv_quad = functional.mahalanobis(inv_quad_rhs.movedim(-1, 0), *covariance).movedim(0, -1)
        inv_quad = inv_quad.sum(-1) if reduce_inv_quad else inv_quad
    return inv_quad, functional.logdet(*covariance) if logdet else None
