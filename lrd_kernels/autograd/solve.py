"""Differentiable functions other than the log-density: solve, Cholesky factor, diagonal of the inverse."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from lrd_kernels import _policy, reference
from lrd_kernels.autograd import vmap
from lrd_kernels.autograd.forward import Arguments, op_inputs
from lrd_kernels.ops import registry
from lrd_kernels.ops.registry import Capacitance, Forward
from lrd_kernels.ops.views import sum_to


class Solve(Function):
    """(rhs, cov_factor, cov_diag, precision, backend) -> (x = Sigma^-1 rhs, z = P^T x).

    x is the gradient of -1/2 times the Mahalanobis term with respect to loc, so the raw ops compute it. z is returned
    for the backward pass.
    """

    @staticmethod
    def forward(
        rhs: Tensor, cov_factor: Tensor, cov_diag: Tensor, precision: int, backend: str
    ) -> tuple[Tensor, Tensor]:
        ops = registry.OPS[backend]
        arguments = Arguments(rhs, None, cov_factor, cov_diag, None)
        views = arguments.views()
        inputs = op_inputs(views, arguments, None, precision)
        forward = Forward(*ops.log_prob_fwd(*inputs, None, None, 1.0, 0.0, 0.0))
        one = torch.ones_like(forward.result)
        _, _, x = ops.log_prob_bwd(*inputs, *forward[1:], one, -0.5, 0.0, False, False, True, False)
        x = x.masked_fill((forward.value_info != 0)[..., None], torch.nan)
        return views.from_values(x), views.from_values(forward.z).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        rhs, cov_factor, cov_diag, *ctx.how = inputs
        ctx.save_for_backward(*output, cov_factor, cov_diag)
        ctx.rhs_shape = rhs.shape
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_z: Tensor | None) -> tuple[Any, ...]:
        x, z, cov_factor, cov_diag = ctx.saved_tensors
        need_rhs, need_factor, need_diag = ctx.needs_input_grad[:3]
        if grad_z is not None:  # only in second derivatives: z = P^T x
            lifted = (cov_factor @ grad_z[..., None])[..., 0]
            grad = lifted if grad is None else grad + lifted
        if grad is None:
            return (None,) * 5
        # With s = Sigma^-1 grad: d rhs = s, d Sigma = -(s x^T + x s^T) / 2, and z_s = P^T s, z = P^T x.
        s, z_s = Solve.apply(grad, cov_factor, cov_diag, *ctx.how)
        grad_factor = None
        if need_factor:
            along_x = z_s if grad_z is None else z_s - grad_z
            grad_factor = -(s[..., None] * z[..., None, :] + x[..., None] * along_x[..., None, :])
            grad_factor = sum_to(grad_factor, cov_factor)
        return (
            s.sum_to_size(ctx.rhs_shape) if need_rhs else None,
            grad_factor,
            sum_to(-s * x, cov_diag) if need_diag else None,
            None,
            None,
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        led = vmap.lead(info.batch_size, in_dims, args, event_dims=(1, 2, 1))
        return vmap.trail(Solve.apply(*led), info.batch_size)


class CapacitanceCholesky(Function):
    """(cov_factor, cov_diag, mask, precision, backend) -> (L, info); gradients are computed with the reference."""

    @staticmethod
    def forward(
        cov_factor: Tensor, cov_diag: Tensor, mask: Tensor | None, precision: int, backend: str
    ) -> tuple[Tensor, Tensor]:
        ops = registry.OPS[backend]
        arguments = Arguments(None, None, cov_factor, cov_diag, mask)
        views = arguments.views()
        found = Capacitance(*ops.capacitance_fwd(*ops.gram_fwd(*op_inputs(views, arguments, None, precision))))
        failed = found.growth.isinf()
        chol = found.chol.masked_fill(failed[:, None, None], torch.nan)
        dtype = reference.result_dtype(cov_factor.dtype)
        return views.from_gaussians(chol).to(dtype), views.from_gaussians(failed.to(torch.int32))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs[:3])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
        cov_factor, cov_diag, mask = ctx.saved_tensors

        def chol(P: Tensor, D: Tensor) -> Tensor:
            return reference.capacitance_cholesky(P, D, mask=mask)[0]

        return (*torch.func.vjp(chol, cov_factor, cov_diag)[1](grad), None, None, None)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        led = vmap.lead(info.batch_size, in_dims, args, event_dims=(2, 1, 1))
        return vmap.trail(CapacitanceCholesky.apply(*led), info.batch_size)


class PrecisionDiag(Function):
    """(cov_factor, cov_diag, backend) -> diagonal of Sigma^-1, the gradient of log det Sigma for the diagonal.

    Gradients are computed with the reference.
    """

    @staticmethod
    def forward(cov_factor: Tensor, cov_diag: Tensor, backend: str) -> Tensor:
        ops = registry.OPS[backend]
        arguments = Arguments(None, None, cov_factor, cov_diag, None)
        views = arguments.views()
        inputs = op_inputs(views, arguments, None, _policy.AUTO)
        forward = Forward(*ops.log_prob_fwd(*inputs, None, None, 0.0, 1.0, 0.0))
        one = torch.ones_like(forward.result)
        _, diag, _ = ops.log_prob_bwd(*inputs, *forward[1:], one, 0.0, 1.0, False, True, False, False)
        return views.from_gaussians(diag.masked_fill(forward.result.isnan(), torch.nan))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return (*torch.func.vjp(reference.precision_diag, *ctx.saved_tensors)[1](grad), None)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        led = vmap.lead(info.batch_size, in_dims, args, event_dims=(2, 1))
        outputs, dims = vmap.trail((PrecisionDiag.apply(*led),), info.batch_size)
        return outputs[0], dims[0]
