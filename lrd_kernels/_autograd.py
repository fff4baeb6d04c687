"""Custom autograd functions over the raw ops.

`LogProb` is the one differentiable function of the package: a weighted sum of the Mahalanobis term and the
log-determinant. Its backward is one op. All functions take the caller's broadcastable shapes and map them inside
(`_batch`), which is what makes their `vmap` rules short. Second derivatives go through the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import Parameter

from lrd_kernels import _ops, reference
from lrd_kernels._batch import Batch
from lrd_kernels._forward import Factorisation, Terms, again_by_qr, declined, log_prob_fwd, op_inputs
from lrd_kernels._policy import AUTO, DECLINING_AUTO


class LogProb(Function):
    """(value, loc, cov_factor, cov_diag, mask, terms) -> (result, L^-1, summary, z, value_info).

    All but the first output are for the backward pass.
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
        batch = Batch(cov_factor, cov_diag, mask, (value, loc))
        inputs = op_inputs(batch, value, loc, cov_factor, cov_diag, mask, terms.eps, terms.precision)
        result, *state = log_prob_fwd(inputs, (None, None), terms)
        if batch.N == 0:  # values were given, but none: the op's one result without a value is not asked for
            result = result[:, :0]
        return batch.from_values(result), *_as_outputs(batch, value, *state)

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
        if torch.compiler.is_compiling() or not (
            torch.is_grad_enabled() or torch._C._are_functorch_transforms_active()
        ):
            grads = _log_prob_bwd(*arguments)
        else:
            grads = LogProbBackward.apply(*arguments)
        return (*grads, None, None)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        led = _lead(info.batch_size, in_dims, args, event_dims=(1, 1, 2, 1, 1))
        return _trail(LogProb.apply(*led), info.batch_size)


class EagerLogProb(Function):
    """`LogProb` without its further outputs, for plain eager calls: they stay with the node, which costs far less."""

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
        batch = Batch(cov_factor, cov_diag, mask, (value, loc))
        looking = (  # elsewhere it would wait for the device
            terms.backend == "cpu"
            and terms.precision == AUTO
            and not terms.qr
            and type(cov_factor) in (Tensor, Parameter)
        )
        precision = DECLINING_AUTO if looking else terms.precision
        inputs = op_inputs(batch, value, loc, cov_factor, cov_diag, mask, terms.eps, precision)
        known = (None, None) if factorisation is None else factorisation.recall(cov_factor, cov_diag)
        outputs = log_prob_fwd(inputs, known, terms)
        result, *made, z, value_info = outputs
        if known[0] is not None:
            made = list(known)
        elif looking and declined(result):
            again_by_qr(inputs, outputs, terms)
        elif factorisation is not None:
            factorisation.remember(cov_factor, cov_diag, *made)
        ctx.save_for_backward(value, loc, cov_factor, cov_diag, mask)
        ctx.batch, ctx.terms, ctx.state = batch, terms, (*made, z, value_info)
        return batch.from_values(result if batch.N else result[:, :0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors
        batch, terms, state, needs = ctx.batch, ctx.terms, ctx.state, ctx.needs_input_grad[:4]
        if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
            outputs = _as_outputs(batch, tensors[0], *state)
            return (*LogProbBackward.apply(grad, *tensors, *outputs, terms, needs), None, None, None)
        arguments: tuple[Any, ...] = (batch, grad, *tensors, *state, terms, needs)
        return (*_gradients(*arguments), None, None, None)


def log_prob(
    value: Tensor | None,
    loc: Tensor | None,
    cov_factor: Tensor,
    cov_diag: Tensor,
    mask: Tensor | None,
    terms: Terms,
    factorisation: Factorisation | None = None,
) -> Tensor:
    """The differentiable result of `LogProb`. A factorisation is used, or filled, in plain eager calls."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return LogProb.apply(value, loc, cov_factor, cov_diag, mask, terms)[0]
    # `apply` without its inspection of the signature, which costs more than a kernel
    arguments = (value, loc, cov_factor, cov_diag, mask, terms, factorisation)
    return super(Function, EagerLogProb).apply(*arguments)


def _as_outputs(
    batch: Batch, value: Tensor | None, chol_inv: Tensor, summary: Tensor, z: Tensor, value_info: Tensor
) -> tuple[Tensor, ...]:
    """What the forward op leaves for the backward one, in the caller's batch dimensions."""
    if value is None:  # nothing per value: the two are placeholders
        z, value_info = z.new_empty(0), value_info.new_empty(0)
    else:
        z, value_info = batch.from_values(z), batch.from_values(value_info)
    return batch.from_gaussians(chol_inv), batch.from_gaussians(summary), z, value_info


def _log_prob_bwd(
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
    needs: tuple[bool, bool, bool, bool],
) -> tuple[Tensor | None, ...]:
    """Gradients for (value, loc, cov_factor, cov_diag), each None unless needed, from the outputs of `LogProb`."""
    batch = Batch(cov_factor, cov_diag, mask, (value, loc))
    if value is None:
        z, value_info = z.new_empty(batch.B, 0, cov_factor.shape[-1]), value_info.new_empty(batch.B, 0)
    else:
        z, value_info = batch.values(z).contiguous(), batch.values(value_info, 0).contiguous()
    chol_inv, summary = batch.gaussians(chol_inv, 2).contiguous(), batch.gaussians(summary).contiguous()
    state = (chol_inv, summary, z, value_info)
    return _gradients(batch, grad, value, loc, cov_factor, cov_diag, mask, *state, terms, needs)


def _gradients(
    batch: Batch,
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
    needs: tuple[bool, bool, bool, bool],
) -> tuple[Tensor | None, ...]:
    """The same from what the forward op gave."""
    need_value, need_loc, need_factor, need_diag = needs
    sum_loc = need_loc and not need_value and loc is not None and batch.shares_gaussians(loc)
    grad_factor, grad_diag, grad_loc = _ops.OPS[terms.backend].log_prob_bwd(
        *op_inputs(batch, value, loc, cov_factor, cov_diag, mask, terms.eps, terms.precision),
        chol_inv,
        summary,
        z,
        value_info,
        batch.values(grad, 0) if batch.N else grad.new_zeros(batch.B, 1),
        terms.maha,
        terms.logdet,
        need_factor,
        need_diag,
        need_value or need_loc,
        sum_loc,
    )
    vector = None
    if need_value or need_loc:
        vector = batch.from_gaussians(grad_loc.squeeze(1)) if sum_loc else batch.from_values(grad_loc)
    return (
        _sum_to(vector.neg(), value) if need_value else None,  # type: ignore[union-attr, arg-type]
        _sum_to(vector, loc) if need_loc else None,  # type: ignore[arg-type]
        batch.from_factor(grad_factor, cov_factor) if need_factor else None,
        _sum_to(batch.from_gaussians(grad_diag), cov_diag) if need_diag else None,
    )


class LogProbBackward(Function):
    """`_log_prob_bwd` as a function that can itself be differentiated (by the reference) and vmapped."""

    @staticmethod
    def forward(grad: Tensor, *args: Any) -> tuple[Tensor | None, ...]:
        return _log_prob_bwd(grad, *args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.terms = inputs[-2]
        ctx.save_for_backward(*inputs[:6])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        grad, *inputs, mask = ctx.saved_tensors
        terms = ctx.terms

        def first_gradients(grad: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
            def result(*tensors: Tensor) -> Tensor:
                full: Any = _fill(inputs, tensors)
                return reference.terms(*full, mask=mask, eps=terms.eps, maha=terms.maha, logdet=terms.logdet)

            return torch.func.vjp(result, *tensors)[1](grad)

        given = [t for t in inputs if t is not None]
        cotangents = tuple(
            torch.zeros_like(t) if g is None else g for t, g in zip(inputs, grads, strict=True) if t is not None
        )
        second = torch.func.vjp(first_gradients, grad, *given)[1](cotangents)
        return (second[0], *_fill(inputs, second[1:]), *(None,) * 7)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        # Every tensor gets the mapped dimension for its own, so that no gradient is summed over it.
        event_dims = (0, 1, 1, 2, 1, 1, 2, 1, 1, 1 if args[1] is None else 0)
        led = _lead(info.batch_size, in_dims, args, event_dims, expand=True)
        grads = LogProbBackward.apply(*led)
        grads = tuple(
            None if g is None else g.reshape(info.batch_size, *_inner_shape(t, d))
            for g, t, d in zip(grads, args[1:5], in_dims[1:5], strict=True)
        )
        return grads, tuple(None if g is None else 0 for g in grads)


class Solve(Function):
    """(rhs, cov_factor, cov_diag, precision, backend) -> (x = Sigma^-1 rhs, z = P^T x).

    x is the gradient of -1/2 the Mahalanobis term for loc, so the raw ops give it. z is returned for backward.
    """

    @staticmethod
    def forward(
        rhs: Tensor, cov_factor: Tensor, cov_diag: Tensor, precision: int, backend: str
    ) -> tuple[Tensor, Tensor]:
        ops = _ops.OPS[backend]
        batch = Batch(cov_factor, cov_diag, None, (rhs,))
        inputs = op_inputs(batch, rhs, None, cov_factor, cov_diag, None, None, precision)
        result, *saved = ops.log_prob_fwd(*inputs, None, None, 1.0, 0.0, 0.0)
        *_, z, value_info = saved
        one = torch.ones_like(result)
        _, _, x = ops.log_prob_bwd(*inputs, *saved, one, -0.5, 0.0, False, False, True, False)
        x = x.masked_fill((value_info != 0)[..., None], torch.nan)
        return batch.from_values(x), batch.from_values(z).to(x.dtype)

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
        # With s = Sigma^-1 grad: d rhs = s, d Sigma = -(s x^T + x s^T) / 2, and P^T s, P^T x are the two z.
        s, z_s = Solve.apply(grad, cov_factor, cov_diag, *ctx.how)
        grad_factor = None
        if need_factor:
            along_x = z_s if grad_z is None else z_s - grad_z
            grad_factor = -(s[..., None] * z[..., None, :] + x[..., None] * along_x[..., None, :])
            grad_factor = _sum_to(grad_factor, cov_factor)
        return (
            s.sum_to_size(ctx.rhs_shape) if need_rhs else None,
            grad_factor,
            _sum_to(-s * x, cov_diag) if need_diag else None,
            None,
            None,
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        led = _lead(info.batch_size, in_dims, args, event_dims=(1, 2, 1))
        return _trail(Solve.apply(*led), info.batch_size)


class CapacitanceCholesky(Function):
    """(cov_factor, cov_diag, mask, precision, backend) -> (L, info); differentiated by the reference."""

    @staticmethod
    def forward(
        cov_factor: Tensor, cov_diag: Tensor, mask: Tensor | None, precision: int, backend: str
    ) -> tuple[Tensor, Tensor]:
        ops = _ops.OPS[backend]
        batch = Batch(cov_factor, cov_diag, mask, ())
        inputs = op_inputs(batch, None, None, cov_factor, cov_diag, mask, None, precision)
        chol, *_, growth = ops.capacitance_fwd(*ops.gram_fwd(*inputs))
        failed = growth.isinf()
        chol = chol.masked_fill(failed[:, None, None], torch.nan)
        dtype = reference.result_dtype(cov_factor.dtype)
        return batch.from_gaussians(chol).to(dtype), batch.from_gaussians(failed.to(torch.int32))

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
        led = _lead(info.batch_size, in_dims, args, event_dims=(2, 1, 1))
        return _trail(CapacitanceCholesky.apply(*led), info.batch_size)


class PrecisionDiag(Function):
    """(cov_factor, cov_diag, backend) -> diagonal of Sigma^-1, the log-determinant's gradient for the diagonal.

    Differentiated by the reference.
    """

    @staticmethod
    def forward(cov_factor: Tensor, cov_diag: Tensor, backend: str) -> Tensor:
        ops = _ops.OPS[backend]
        batch = Batch(cov_factor, cov_diag, None, ())
        inputs = op_inputs(batch, None, None, cov_factor, cov_diag, None, None, AUTO)
        result, *saved = ops.log_prob_fwd(*inputs, None, None, 0.0, 1.0, 0.0)
        one = torch.ones_like(result)
        _, diag, _ = ops.log_prob_bwd(*inputs, *saved, one, 0.0, 1.0, False, True, False, False)
        return batch.from_gaussians(diag.masked_fill(result.isnan(), torch.nan))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return (*torch.func.vjp(reference.precision_diag, *ctx.saved_tensors)[1](grad), None)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        led = _lead(info.batch_size, in_dims, args, event_dims=(2, 1))
        outputs, dims = _trail((PrecisionDiag.apply(*led),), info.batch_size)
        return outputs[0], dims[0]


def _sum_to(grad: Tensor, like: Tensor) -> Tensor:
    """A gradient summed over the batch dimensions along which its tensor was broadcast."""
    return grad if grad.shape == like.shape else grad.sum_to_size(like.shape)


def _fill(template: Sequence[Tensor | None], tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """`template` with its tensors replaced, in order, its None left."""
    left = iter(tensors)
    return [None if t is None else next(left) for t in template]


def _lead(
    size: int, in_dims: tuple[Any, ...], args: tuple[Any, ...], event_dims: tuple[int, ...], expand: bool = False
) -> list[Any]:
    """A vmap rule's tensors with the mapped dimension as the outermost batch dimension of all.

    The first `len(event_dims)` arguments are tensors or None; tensors that are not mapped broadcast, or are expanded.
    """
    count = len(event_dims)
    shapes = [
        0 if t is None else t.dim() - e - (d is not None)
        for t, d, e in zip(args[:count], in_dims[:count], event_dims, strict=True)
    ]
    inner = max(shapes)  # batch dimensions inside the mapped one
    led = []
    for tensor, dim, own in zip(args[:count], in_dims[:count], shapes, strict=True):
        if tensor is not None and (dim is not None or expand):
            tensor = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            tensor = tensor[(slice(None),) + (None,) * (inner - own)]
        led.append(tensor)
    return [*led, *args[count:]]


def _inner_shape(tensor: Tensor, dim: int | None) -> list[int]:
    """The shape of one of a mapped tensor's elements."""
    shape = list(tensor.shape)
    if dim is not None:
        del shape[dim]
    return shape


def _trail(outputs: tuple[Tensor, ...], size: int) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    """A vmap rule's outputs and where they are mapped: a leading 1 that only broadcasts is taken away."""
    mapped = [t.shape[0] == size for t in outputs]
    tensors = tuple(t[0] if t.shape[0] == 1 != size else t for t in outputs)
    return tensors, tuple(0 if m else None for m in mapped)
