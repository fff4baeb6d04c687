"""Differentiable functions other than the log-density: solve, Cholesky factor, diagonal of the inverse."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from lrd_kernels import _policy, reference
from lrd_kernels.autograd import vmap
from lrd_kernels.autograd.backward import Gradients, Saved, Wanted, log_prob_bwd
from lrd_kernels.autograd.forward import Arguments, Terms, log_prob_fwd, op_inputs, redo_declined
from lrd_kernels.linalg import capacitance, products
from lrd_kernels.ops import dispatch, registry
from lrd_kernels.ops.registry import Capacitance, Forward
from lrd_kernels.ops.views import BatchViews, sum_to


class _Passes(NamedTuple):
    """The outputs of both passes of the log-density family, one after the other."""

    forward: Forward
    grads: Gradients


def _both_passes(views: BatchViews, arguments: Arguments, wanted: Wanted, precision: int, backend: str) -> _Passes:
    """The forward pass, and the backward pass for a gradient of 1. In eager mode on the CPU, "auto" uses QR
    where a Cholesky factorisation is not accurate enough."""
    terms = Terms(1.0, 0.0, precision=precision, backend=backend)
    looking = backend == "cpu" and precision == _policy.AUTO and dispatch.may_inspect(arguments.cov_factor)
    inputs = op_inputs(views, arguments, None, terms.op_precision)
    declining = inputs._replace(precision=_policy.DECLINING_AUTO) if looking else inputs
    forward = log_prob_fwd(declining, None, terms)
    one = torch.ones_like(forward.result)
    redone = redo_declined(inputs, forward, terms) if looking else None
    return _Passes(forward, log_prob_bwd(inputs, Saved(*forward[1:]), one, wanted, terms, redone))


class Solve(Function):
    """(rhs, cov_factor, cov_diag, precision, backend) -> (x = Sigma^-1 rhs, z = P^T x in float64).

    x is the gradient of -1/2 times the Mahalanobis term with respect to loc, so the raw ops compute it. z is returned
    for the backward pass.
    """

    @staticmethod
    def forward(
        rhs: Tensor, cov_factor: Tensor, cov_diag: Tensor, precision: int, backend: str
    ) -> tuple[Tensor, Tensor]:
        arguments = Arguments(rhs, None, cov_factor, cov_diag, None)
        views = arguments.views()
        wanted = Wanted(-0.5, 0.0, factor=False, diag=False, loc=True, sum_loc=False)
        passes = _both_passes(views, arguments, wanted, precision, backend)
        x = passes.grads.loc.masked_fill((passes.forward.value_info != 0)[..., None], torch.nan)
        return views.from_values(x), views.from_values(passes.grads.z)

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
        if grad_z is not None:  # z = P^T x
            lifted = products.lift(cov_factor, grad_z[..., None, :])[..., 0, :].to(x.dtype)
            grad = lifted if grad is None else grad + lifted
        if grad is None:
            return (None,) * 5
        # With s = Sigma^-1 grad: d rhs = s, d Sigma = -(s x^T + x s^T) / 2, and z_s = P^T s, z = P^T x.
        s, z_s = Solve.apply(grad, cov_factor, cov_diag, *ctx.how)
        grad_factor = None
        if need_factor:
            along_x = z_s if grad_z is None else z_s - grad_z
            grad_factor = -(s[..., None] * z[..., None, :] + x[..., None] * along_x[..., None, :])
            grad_factor = sum_to(grad_factor, cov_factor).to(cov_factor.dtype)
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
    """(cov_factor, cov_diag, mask, precision, backend) -> (L in float64, info). Gradients are computed with the
    reference."""

    @staticmethod
    def forward(
        cov_factor: Tensor, cov_diag: Tensor, mask: Tensor | None, precision: int, backend: str
    ) -> tuple[Tensor, Tensor]:
        ops = registry.OPS[backend]
        arguments = Arguments(None, None, cov_factor, cov_diag, mask)
        views = arguments.views()
        gram, *sums = ops.gram_fwd(*op_inputs(views, arguments, None, precision))
        found = Capacitance(*ops.capacitance_fwd(gram, *sums))
        failed = found.growth.isinf()  # by invalid numbers, or by rounding
        chol = views.from_gaussians(found.chol.masked_fill(failed[:, None, None], torch.nan))
        explained = gram.diagonal(dim1=-2, dim2=-1) > _policy.EXPLAINED_RATIO
        beyond = (found.growth > _policy.CHOLESKY_GROWTH) | explained.any(-1)
        looking = precision == _policy.AUTO and chol.numel() > 0 and dispatch.may_inspect(cov_factor)
        if not (looking and bool(beyond.any())):
            return chol, views.from_gaussians(failed.to(torch.int32))
        by_qr = capacitance.cholesky_by_qr(cov_factor, cov_diag, mask)
        chol = torch.where(views.from_gaussians(beyond)[..., None, None], by_qr, chol)
        return chol, chol.isnan().any(-1).any(-1).to(torch.int32)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs[:3])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
        cov_factor, cov_diag, mask = ctx.saved_tensors

        def chol(P: Tensor, D: Tensor) -> Tensor:
            return reference.capacitance_cholesky(P, D, mask=mask)[0].to(grad.dtype)

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
        arguments = Arguments(None, None, cov_factor, cov_diag, None)
        views = arguments.views()
        wanted = Wanted(0.0, 1.0, factor=False, diag=True, loc=False, sum_loc=False)
        forward, grads = _both_passes(views, arguments, wanted, _policy.AUTO, backend)
        return views.from_gaussians(grads.diag.masked_fill(forward.growth.isinf()[:, None], torch.nan))

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
