"""Gaussians whose outputs lie in several parts, such as the processes of a group or the blocks of a stream.

Everything about the whole that a part needs is in a few sums over its outputs, all in float64 and no larger than
R x R.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from lrd_kernels import _policy, reference
from lrd_kernels.autograd.backward import Saved, Wanted, log_prob_bwd
from lrd_kernels.autograd.forward import Arguments, Terms, op_inputs, rows_of
from lrd_kernels.autograd.log_prob import gradients_of, to_ops
from lrd_kernels.linalg import qr
from lrd_kernels.ops import dispatch, registry
from lrd_kernels.ops.registry import Capacitance
from lrd_kernels.ops.views import BatchViews, sum_to

CANCELLING = 1e5  # from this ratio of r^T w r to M on, M is computed from residuals


class Sums(NamedTuple):
    """Sums over the outputs of a part, in the caller's batch dimensions and in float64."""

    gram: Tensor  # P^T w P [..., R, R]
    u: Tensor  # P^T w r [..., R]; empty without a value
    quad: Tensor  # r^T w r [...]; empty without a value
    log_diag: Tensor  # sum log D [...]
    outputs: Tensor  # the number of outputs that exist [...]

    def packed(self) -> Tensor:
        """All numbers as one vector; of the Gram matrix, its lower triangle."""
        rows, columns = torch.tril_indices(*self.gram.shape[-2:], device=self.gram.device)
        return torch.cat([part.reshape(-1) for part in (self.gram[..., rows, columns], *self[1:])])

    def unpacked(self, numbers: Tensor) -> Sums:
        """Sums with the shapes of these, from such a vector."""
        R = self.gram.shape[-1]
        rows, columns = torch.tril_indices(R, R, device=numbers.device)
        triangle = (*self.gram.shape[:-2], len(rows))
        shapes = [triangle, *(part.shape for part in self[1:])]
        lower, *others = (
            part.reshape(shape)
            for part, shape in zip(numbers.split([torch.Size(s).numel() for s in shapes]), shapes, strict=True)
        )
        gram = torch.empty_like(self.gram)
        gram[..., rows, columns] = lower
        gram[..., columns, rows] = lower
        return Sums(gram, *others)

    def plus(self, other: Sums) -> Sums:
        return Sums(*(a + b for a, b in zip(self, other, strict=True)))


class Root(NamedTuple):
    """What stands for the rows A = D^-1/2 P and b = D^-1/2 r of a part, in the caller's batch dimensions."""

    rows: Tensor  # T [..., R, R], with A^T A = T^T T
    fitted: Tensor  # v [..., R], with A^T b = T^T v; empty without a value
    left: Tensor  # |b|^2 - |v|^2 [...]; empty without a value


class Part:
    """A part of the outputs, with everything that it adds to the whole."""

    def __init__(self, arguments: Arguments, terms: Terms) -> None:
        if terms.backend == "reference":
            raise RuntimeError(
                "outputs in several parts need the compiled kernels; lrd_kernels.backends() says why none serves"
            )
        self.arguments, self.terms, self.views = arguments, terms, arguments.views()
        precision = _policy.FLOAT64 if terms.op_precision == _policy.AUTO else terms.op_precision
        self.inputs = op_inputs(self.views, arguments, terms.eps, precision)

    def sums(self) -> Sums:
        gram, u, quad, log_diag = registry.OPS[self.terms.backend].gram_fwd(*self.inputs)
        views, mask = self.views, self.arguments.mask
        outputs = gram.new_tensor(self.inputs.cov_diag.shape[-1]) if mask is None else mask.count_nonzero(-1).double()
        if self.arguments.value is None:
            u, quad = u.reshape(-1), quad.reshape(-1)
        else:
            u, quad = views.from_values(u), views.from_values(quad)
        return Sums(views.from_gaussians(gram), u, quad, views.from_gaussians(log_diag), outputs)

    def residual(self, z: Tensor) -> Tensor:
        """`(r - P z)^T w (r - P z)` [...] for z [..., R], which does not cancel."""
        rows, total = rows_of(self.inputs), self.inputs.cov_diag.new_zeros((), dtype=torch.float64)
        own = self.views.values(z).mT  # [B, R, N]
        for s, P, r in rows.slices():
            total = total + (rows.root[:, s, None] * (r - P @ own)).square().sum(1)
        return self.views.from_values(total.expand(self.views.B, self.views.N))

    def decomposed(self) -> Root:
        found = rows_of(self.inputs).decomposed()
        views, root = self.views, self.views.from_gaussians(found.root())
        if self.arguments.value is None:
            return Root(root, found.fitted.reshape(-1), found.left.reshape(-1))
        return Root(root, views.from_values(found.fitted.mT), views.from_values(found.left))


class Parts(Protocol):
    """All parts together: the same quantities as those of a part, of the whole."""

    def sums(self) -> Sums: ...
    def residual(self, z: Tensor) -> Tensor: ...
    def decomposed(self) -> list[Root]: ...


class Whole(NamedTuple):
    """What every part needs of the whole, in the caller's batch dimensions."""

    maha: Tensor | None  # [...]; None without a value
    logdet: Tensor  # [...]
    outputs: Tensor  # [...]
    chol_inv: Tensor  # L^-1 [..., R, R]
    z: Tensor  # [..., R]; empty without a value
    growth: Tensor  # [...]
    by_qr: bool

    @property
    def summary(self) -> Tensor:
        return torch.stack([self.growth, self.logdet], -1)


def canonical_views(arguments: Arguments) -> BatchViews:
    """The mapping of batch dimensions for tensors of these shapes, which does not depend on how they lie in memory."""

    def like(tensor: Tensor, event: int = 1) -> Tensor:
        return torch.empty(*tensor.shape[: tensor.dim() - event], *(1,) * event)

    value, loc, factor, diag, mask = arguments
    value, loc, mask = (None if tensor is None else like(tensor) for tensor in (value, loc, mask))
    return BatchViews(like(factor, 2), like(diag), mask, (value, loc))


def whole_of(parts: Parts, arguments: Arguments, terms: Terms, sums: Sums) -> Whole:
    """Factorises the whole covariance and solves for the values, from the sums over all parts. Of the arguments, only
    the shapes count."""
    views, has_value = canonical_views(arguments), arguments.value is not None
    R = sums.gram.shape[-1]
    gram, log_diag = views.gaussians(sums.gram, 2).contiguous(), views.gaussians(sums.log_diag[..., None])[:, 0]
    if has_value:
        u, quad = views.values(sums.u).contiguous(), views.values(sums.quad, 0).contiguous()
    else:
        u, quad = gram.new_empty(views.B, 0, R), gram.new_empty(views.B, 0)
    ops = registry.OPS[terms.backend]
    found = Capacitance(*ops.capacitance_fwd(gram, u, quad, log_diag.contiguous()))
    good = gram.isfinite().all(-1).all(-1) & log_diag.isfinite()
    looking = terms.backend == "cpu" and terms.precision == _policy.AUTO and dispatch.may_inspect(gram)
    by_qr = terms.precision == _policy.QR or (looking and bool((good & _too_ill_conditioned(gram, found)).any()))
    by_qr = by_qr and R > 0
    if by_qr:
        found = _by_qr(parts.decomposed(), views, found, good, log_diag, has_value)
    failed = ~good | found.growth.isinf()
    growth, logdet = found.growth.masked_fill(failed, torch.inf), found.logdet.masked_fill(failed, torch.nan)
    maha, z = None, found.z.reshape(-1)
    if has_value:
        maha, z = views.from_values(found.maha.masked_fill(failed[:, None], torch.nan)), views.from_values(found.z)
        if not by_qr and dispatch.may_inspect(quad) and bool((quad > CANCELLING * found.maha).any()):
            maha = torch.where(maha.isfinite(), parts.residual(z) + z.square().sum(-1), maha)
        z = torch.where(maha.isfinite()[..., None], z, 0)
    return Whole(
        maha,
        views.from_gaussians(logdet[:, None])[..., 0],
        sums.outputs,
        views.from_gaussians(found.chol_inv),
        z,
        views.from_gaussians(growth[:, None])[..., 0],
        by_qr,
    )


def _too_ill_conditioned(gram: Tensor, found: Capacitance) -> Tensor:
    """Whether a Cholesky factorisation in float64 loses digits that QR keeps: [B]"""
    explained = gram.diagonal(dim1=-2, dim2=-1) > _policy.EXPLAINED_RATIO
    return explained.any(-1) | (found.growth > _policy.CHOLESKY_GROWTH)


def _by_qr(
    roots: Iterable[Root], views: BatchViews, found: Capacitance, good: Tensor, log_diag: Tensor, has_value: bool
) -> Capacitance:
    """The factorisation from the QR decompositions of all parts, whose triangles are stacked."""

    def flattened(root: Root) -> Root:
        rows = views.gaussians(root.rows, 2)
        if not has_value:
            return Root(rows, rows.new_empty(*rows.shape[:2], 0), rows.new_empty(views.B, 0))
        return Root(rows, views.values(root.fitted).mT, views.values(root.left, 0))

    # The longest row on top, as inside a part: digits of small rows would be lost otherwise.
    several = sorted(map(flattened, roots), key=lambda root: -float(root.rows.nan_to_num().abs().max()))
    B, R, N = several[0].fitted.shape
    whole = qr.decomposed(((root.rows, root.fitted) for root in several), B, R, N, log_diag)
    whole = qr.regularised(whole._replace(left=whole.left + sum(root.left for root in several)))
    eye = torch.eye(R, dtype=log_diag.dtype, device=log_diag.device).expand_as(whole.triangle)
    whole = whole._replace(triangle=torch.where(good[:, None, None], whole.triangle, eye))
    logdet = 2 * whole.triangle.diagonal(dim1=-2, dim2=-1).log().sum(-1) + log_diag
    chol, z = whole.lower(), whole.solution().mT.contiguous()
    chol_inv = torch.linalg.solve_triangular(chol, eye, upper=False).contiguous()
    growth = torch.where(good, _policy.QR_GROWTH, torch.inf).to(logdet)
    return Capacitance(chol, chol_inv, z, whole.left, logdet, growth)


def refuse_qr(whole: Whole, what: str) -> None:
    """Raises where what is computed from the sums of several parts would lose its digits."""
    if whole.by_qr:
        raise RuntimeError(
            f"the covariance is too ill-conditioned for {what} over several parts: raise its smallest diagonal entries"
            " (eps). Values of log_prob, logdet, mahalanobis and entropy can be computed under torch.no_grad()"
        )


def result_of(whole: Whole, terms: Terms, dtype: torch.dtype) -> Tensor:
    """maha * M + logdet * log det + per_output * outputs: [...]"""
    result = terms.logdet * whole.logdet + terms.per_output * whole.outputs
    if whole.maha is not None:
        result = result + terms.maha * whole.maha
    return result.to(reference.result_dtype(dtype))


class SplitTerms(Function):
    """(value, loc, cov_factor, cov_diag, mask, terms, join, differentiable) -> (result, outputs) of the whole.

    The tensors are those of one part, and so are the gradients. `join` gives access to all parts from one.
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
        join: Callable[[Part], Parts],
        differentiable: bool,
    ) -> tuple[Tensor, Tensor]:
        arguments = Arguments(value, loc, cov_factor, cov_diag, mask)
        parts = join(Part(arguments, terms))
        whole = whole_of(parts, arguments, terms, parts.sums())
        if differentiable:
            refuse_qr(whole, "gradients")
        ctx.terms = terms
        ctx.save_for_backward(*arguments, *saved_of(whole))
        ctx.mark_non_differentiable(whole.outputs)
        return result_of(whole, terms, cov_factor.dtype), whole.outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
        arguments = (grad, *ctx.saved_tensors, ctx.terms, ctx.needs_input_grad[:4])
        return (*gradients_of(*arguments), *(None,) * 4)


def saved_of(whole: Whole) -> Saved:
    """What the backward op needs, in the caller's batch dimensions."""
    info = whole.z.new_empty(0) if whole.maha is None else ~whole.maha.isfinite()
    return Saved(whole.chol_inv, whole.summary, whole.z, info.to(torch.int32))


class SplitSolve(Function):
    """(rhs, cov_factor, cov_diag, terms, join) -> the rows of Sigma^-1 rhs that belong to this part."""

    @staticmethod
    def forward(
        ctx: Any, rhs: Tensor, cov_factor: Tensor, cov_diag: Tensor, terms: Terms, join: Callable[[Part], Parts]
    ) -> Tensor:
        x, z = solved(rhs, cov_factor, cov_diag, terms, join)
        ctx.save_for_backward(x, z, cov_factor, cov_diag)
        ctx.how, ctx.rhs_shape = (terms, join), rhs.shape
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, z, cov_factor, cov_diag = ctx.saved_tensors
        # With s = Sigma^-1 grad: d rhs = s, d Sigma = -(s x^T + x s^T) / 2. All parts take part, whatever they need.
        s, z_s = solved(grad, cov_factor, cov_diag, *ctx.how)
        need_rhs, need_factor, need_diag = ctx.needs_input_grad[:3]
        grad_factor = None
        if need_factor:
            grad_factor = -(s[..., None] * z[..., None, :] + x[..., None] * z_s[..., None, :])
            grad_factor = sum_to(grad_factor, cov_factor).to(cov_factor.dtype)
        return (
            s.sum_to_size(ctx.rhs_shape) if need_rhs else None,
            grad_factor,
            sum_to(-s * x, cov_diag) if need_diag else None,
            None,
            None,
        )


def solved(
    rhs: Tensor, cov_factor: Tensor, cov_diag: Tensor, terms: Terms, join: Callable[[Part], Parts]
) -> tuple[Tensor, Tensor]:
    """The rows x [..., S] of Sigma^-1 rhs that belong to this part, and z = P^T x [..., R] of the whole."""
    arguments = Arguments(rhs, None, cov_factor, cov_diag, None)
    part = Part(arguments, terms)
    parts = join(part)
    whole = whole_of(parts, arguments, terms, parts.sums())
    refuse_qr(whole, "solve and gradients")
    saved = to_ops(saved_of(whole), part.views, rhs, cov_factor.shape[-1])
    wanted = Wanted(-0.5, 0.0, factor=False, diag=False, loc=True, sum_loc=False)
    one = saved.z.new_ones(saved.z.shape[:2], dtype=reference.result_dtype(rhs.dtype))
    x = log_prob_bwd(part.inputs, saved, one, wanted, terms).loc
    x = x.masked_fill((saved.value_info != 0)[..., None], torch.nan)
    return part.views.from_values(x), whole.z
