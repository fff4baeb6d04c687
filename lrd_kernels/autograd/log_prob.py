"""The log-density family as a differentiable function: a weighted sum of the Mahalanobis term and the log-determinant.

The backward pass is one op. The functions take the caller's broadcastable shapes and map them internally (`ops.views`),
which keeps their `vmap` rules short. Forward mode uses the gradients of the backward op, second derivatives the
reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from lrd_kernels import _policy, reference
from lrd_kernels.autograd import vmap
from lrd_kernels.autograd.backward import Saved, Wanted, log_prob_bwd
from lrd_kernels.autograd.forward import (
    Arguments,
    Factorisation,
    Factorised,
    Terms,
    log_prob_fwd,
    op_inputs,
    redo_declined,
)
from lrd_kernels.ops import dispatch
from lrd_kernels.ops.views import BatchViews, sum_to

Needs = tuple[bool, bool, bool, bool]  # which of (value, loc, cov_factor, cov_diag) need a gradient


def to_caller(saved: Saved, views: BatchViews, value: Tensor | None) -> Saved:
    """Converts to the caller's batch dimensions. Without values, the last two tensors are placeholders."""
    if value is None:
        z, value_info = saved.z.new_empty(0), saved.value_info.new_empty(0)
    else:
        z, value_info = views.from_values(saved.z), views.from_values(saved.value_info)
    return Saved(views.from_gaussians(saved.chol_inv), views.from_gaussians(saved.summary), z, value_info)


def to_ops(saved: Saved, views: BatchViews, value: Tensor | None, R: int) -> Saved:
    """Converts back from the caller's batch dimensions."""
    if value is None:
        z, value_info = saved.z.new_empty(views.B, 0, R), saved.value_info.new_empty(views.B, 0)
    else:
        z, value_info = views.values(saved.z).contiguous(), views.values(saved.value_info, 0).contiguous()
    chol_inv, summary = views.gaussians(saved.chol_inv, 2), views.gaussians(saved.summary)
    return Saved(chol_inv.contiguous(), summary.contiguous(), z, value_info)


class LogProb(Function):
    """(value, loc, cov_factor, cov_diag, mask, terms) -> (result, L^-1, summary, z, value_info).

    All outputs except the first are for the backward pass.
    """

    @staticmethod
    def forward(
        value: Tensor | None,
        loc: Tensor | None,
        cov_factor: Tensor,
        cov_diag: Tensor,
        mask: Tensor | None,
        terms: Terms,
    ) -> tuple[Tensor, ...]:
        arguments = Arguments(value, loc, cov_factor, cov_diag, mask)
        views = arguments.views()
        result, *saved = log_prob_fwd(op_inputs(views, arguments, terms.eps, terms.op_precision), None, terms)
        if views.N == 0:  # an empty batch of values was given: drop the result that the op returns without a value
            result = result[:, :0]
        return views.from_values(result), *to_caller(Saved(*saved), views, value)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.terms = inputs
        _, *saved = output
        ctx.mark_non_differentiable(*saved)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *saved)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
        needs = ctx.needs_input_grad[:4]
        if grad is None:
            return (None,) * 6
        arguments = (grad, *ctx.saved_tensors, ctx.terms, needs)
        if torch.compiler.is_compiling() or not (torch.is_grad_enabled() or dispatch.transforms_active()):
            grads = gradients_of(*arguments)
        else:
            grads = LogProbBackward.apply(*arguments)
        return (*grads, None, None)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        led = vmap.lead(info.batch_size, in_dims, args, event_dims=(1, 1, 2, 1, 1))
        return vmap.trail(LogProb.apply(*led), info.batch_size)


class ForwardLogProb(LogProb):
    """`LogProb` with a forward mode, which `torch.compile` could not trace."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        LogProb.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*inputs[:5], *output)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor | None, ...]:
        # Expanded, so that no gradient is summed over batch items.
        *vectors, cov_factor, cov_diag, mask, result, chol_inv, summary, z, value_info = ctx.saved_tensors
        batch = result.shape

        def expanded(tensor: Tensor | None, event_dims: int = 1) -> Tensor | None:
            return tensor if tensor is None else tensor.expand(*batch, *tensor.shape[tensor.dim() - event_dims :])

        full = (*map(expanded, vectors), expanded(cov_factor, 2), expanded(cov_diag), expanded(mask))
        saved = (expanded(chol_inv, 2), expanded(summary), z, value_info)
        needs = tuple(t is not None for t in tangents[:4])
        grads = LogProbBackward.apply(torch.ones_like(result), *full, *saved, ctx.terms, needs)
        parts = (grad * t for grad, t in zip(grads, tangents, strict=False) if t is not None)
        sums = (p.sum(tuple(range(len(batch), p.dim())), dtype=torch.float64) for p in parts)
        return (sum(sums, torch.zeros_like(result)).to(result.dtype), *(None,) * 4)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        led = vmap.lead(info.batch_size, in_dims, args, event_dims=(1, 1, 2, 1, 1))
        return vmap.trail(ForwardLogProb.apply(*led), info.batch_size)


class EagerLogProb(Function):
    """`LogProb` with one output, for plain eager calls, which is much cheaper.

    What is as small as the result is stored on the node, which costs less than saving it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        value: Tensor | None,
        loc: Tensor | None,
        cov_factor: Tensor,
        cov_diag: Tensor,
        mask: Tensor | None,
        terms: Terms,
        factorisation: Factorisation | None,
    ) -> Tensor:
        arguments = Arguments(value, loc, cov_factor, cov_diag, mask)
        views = arguments.views()
        looking = terms.backend == "cpu" and terms.precision == _policy.AUTO and dispatch.may_inspect(cov_factor)
        precision = _policy.DECLINING_AUTO if looking else terms.op_precision
        inputs = op_inputs(views, arguments, terms.eps, precision)
        known = None if factorisation is None else factorisation.recall(cov_factor, cov_diag)
        ctx.redone = None
        forward = log_prob_fwd(inputs, known, terms)
        result, chol_inv, summary, z, value_info = forward
        if known is not None:
            chol_inv, summary = known
        elif looking and dispatch.has_nan(result):
            ctx.redone = redo_declined(inputs, forward, terms)
        elif factorisation is not None:
            factorisation.remember(cov_factor, cov_diag, Factorised(chol_inv, summary))
        ctx.save_for_backward(value, loc, cov_factor, cov_diag, mask, chol_inv, z)
        ctx.views, ctx.terms, ctx.small = views, terms, (summary, value_info)
        return views.from_values(result if views.N else result[:, :0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        *tensors, chol_inv, z = ctx.saved_tensors
        summary, value_info = ctx.small
        arguments, saved = Arguments(*tensors), Saved(chol_inv, summary, z, value_info)
        needs = ctx.needs_input_grad[:4]
        if torch.is_grad_enabled() or dispatch.transforms_active():
            terms = ctx.terms if ctx.redone is None else ctx.terms._replace(precision=_policy.QR)
            outputs = to_caller(saved, ctx.views, arguments.value)
            return (*LogProbBackward.apply(grad, *arguments, *outputs, terms, needs), None, None, None)
        grads = _gradients(ctx.views, grad, arguments, saved, ctx.terms, needs, ctx.redone)
        return (*grads, None, None, None)


def weighted_terms(arguments: Arguments, terms: Terms, factorisation: Factorisation | None = None) -> Tensor:
    """maha * M + logdet * log det + constant, differentiable. Plain eager calls read or fill the factorisation."""
    if torch.compiler.is_compiling():
        return LogProb.apply(*arguments, terms)[0]
    if dispatch.transforms_active() or dispatch.forward_mode():
        return ForwardLogProb.apply(*arguments, terms)[0]
    # `apply` without inspecting the signature, which costs more than a kernel
    return super(Function, EagerLogProb).apply(*arguments, terms, factorisation)


def gradients_of(
    grad: Tensor,
    value: Tensor | None,
    loc: Tensor | None,
    cov_factor: Tensor,
    cov_diag: Tensor,
    mask: Tensor | None,
    chol_inv: Tensor,
    summary: Tensor,
    z: Tensor,
    value_info: Tensor,
    terms: Terms,
    needs: Needs,
) -> tuple[Tensor | None, ...]:
    """Gradients for (value, loc, cov_factor, cov_diag), each None if not needed, from the outputs of `LogProb`."""
    arguments = Arguments(value, loc, cov_factor, cov_diag, mask)
    views = arguments.views()
    saved = to_ops(Saved(chol_inv, summary, z, value_info), views, value, cov_factor.shape[-1])
    return _gradients(views, grad, arguments, saved, terms, needs)


def _gradients(
    views: BatchViews,
    grad: Tensor,
    arguments: Arguments,
    saved: Saved,
    terms: Terms,
    needs: Needs,
    redone: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """The same gradients, from the outputs of the forward op. Those of the factors `redone` are computed by QR."""
    value, loc, cov_factor, cov_diag, _ = arguments
    need_value, need_loc, need_factor, need_diag = needs
    sum_loc = need_loc and not need_value and loc is not None and views.shares_gaussians(loc)
    inputs = op_inputs(views, arguments, terms.eps, terms.op_precision)
    weights = views.values(grad, 0) if views.N else grad.new_zeros(views.B, 1)
    wanted = Wanted(terms.maha, terms.logdet, need_factor, need_diag, need_value or need_loc, sum_loc)
    grad_factor, grad_diag, grad_loc, _ = log_prob_bwd(inputs, saved, weights, wanted, terms, redone)
    vector = None
    if need_value or need_loc:
        vector = views.from_gaussians(grad_loc.squeeze(1)) if sum_loc else views.from_values(grad_loc)
    return (
        sum_to(vector.neg(), value) if need_value else None,  # type: ignore[union-attr, arg-type]
        sum_to(vector, loc) if need_loc else None,  # type: ignore[arg-type]
        views.from_factor(grad_factor, cov_factor) if need_factor else None,
        sum_to(views.from_gaussians(grad_diag), cov_diag) if need_diag else None,
    )


class LogProbBackward(Function):
    """`gradients_of` as a function that supports differentiation (with the reference) and vmap."""

    @staticmethod
    def forward(grad: Tensor, *args: Any) -> tuple[Tensor | None, ...]:
        return gradients_of(grad, *args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.terms, ctx.needs = inputs[-2:]
        ctx.save_for_backward(*inputs[:6])
        ctx.save_for_forward(*inputs[:6])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        grad, *inputs, mask = ctx.saved_tensors
        given = [t for t in inputs if t is not None]
        cotangents = tuple(
            torch.zeros_like(t) if g is None else g for t, g in zip(inputs, grads, strict=True) if t is not None
        )
        second = torch.func.vjp(_first_gradients(inputs, mask, ctx.terms), grad, *given)[1](cotangents)
        return (second[0], *_fill(inputs, second[1:]), *(None,) * 7)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor | None, ...]:
        primals, mask = ctx.saved_tensors[:5], ctx.saved_tensors[5]
        both = [(p, t) for p, t in zip(primals, tangents, strict=False) if p is not None]
        given = tuple(p for p, _ in both)
        along = tuple(torch.zeros_like(p) if t is None else t for p, t in both)
        second = torch.func.jvp(_first_gradients(primals[1:], mask, ctx.terms), given, along)[1]
        return tuple(t if need else None for t, need in zip(_fill(primals[1:], second), ctx.needs, strict=True))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        # Every tensor is expanded along the mapped dimension, so that no gradient is summed over it.
        event_dims = (0, 1, 1, 2, 1, 1, 2, 1, 1, 1 if args[1] is None else 0)
        led = vmap.lead(info.batch_size, in_dims, args, event_dims, expand=True)
        grads = LogProbBackward.apply(*led)
        grads = tuple(
            None if g is None else g.reshape(info.batch_size, *vmap.inner_shape(t, d))
            for g, t, d in zip(grads, args[1:5], in_dims[1:5], strict=True)
        )
        return grads, tuple(None if g is None else 0 for g in grads)


def _first_gradients(
    inputs: Sequence[Tensor | None], mask: Tensor | None, terms: Terms
) -> Callable[..., tuple[Tensor, ...]]:
    """The gradients, by the reference, as a function of the gradient of the result and of the inputs that are given."""

    def first_gradients(grad: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        def result(*tensors: Tensor) -> Tensor:
            full: Any = _fill(inputs, tensors)
            return reference.terms(
                *full,
                mask=mask,
                eps=terms.eps,
                maha=terms.maha,
                logdet=terms.logdet,
                qr=terms.precision == _policy.QR,
            )

        return torch.func.vjp(result, *tensors)[1](grad)

    return first_gradients


def _fill(template: Sequence[Tensor | None], tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """`template` with its tensors replaced in order; None entries are kept."""
    left = iter(tensors)
    return [None if t is None else next(left) for t in template]
