"""The forward pass on the raw ops: the op itself, or QR if a Cholesky factorisation is not accurate enough."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lrd_kernels import _policy, reference
from lrd_kernels.linalg import qr
from lrd_kernels.linalg.dual import Dual
from lrd_kernels.linalg.qr import Rows
from lrd_kernels.ops import dispatch, registry
from lrd_kernels.ops.registry import Forward, OpInputs
from lrd_kernels.ops.views import BatchViews


class Arguments(NamedTuple):
    """The tensors of a call, with the caller's batch dimensions."""

    value: Tensor | None  # [..., S]
    loc: Tensor | None  # [..., S]
    cov_factor: Tensor  # [..., S, R]
    cov_diag: Tensor  # [..., S]
    mask: Tensor | None  # [..., S]

    def views(self) -> BatchViews:
        return BatchViews(self.cov_factor, self.cov_diag, self.mask, (self.value, self.loc))


class Terms(NamedTuple):
    """The quantity to compute, maha * M + logdet * log det + per_output * outputs, and how to compute it."""

    maha: float
    logdet: float
    per_output: float = 0.0  # for every output that is not masked
    eps: float | None = None
    precision: int = _policy.AUTO
    backend: str = "cpu"

    @property
    def outside(self) -> bool:
        """Whether the factorisation takes place outside the ops."""
        return self.precision in (_policy.QR, _policy.DUAL)

    @property
    def op_precision(self) -> int:
        """The precision argument of the ops."""
        return _policy.AUTO if self.outside else self.precision


def op_inputs(views: BatchViews, arguments: Arguments, eps: float | None, precision: int) -> OpInputs:
    """The leading arguments of the S-sized ops."""
    value, loc, cov_factor, cov_diag, mask = arguments
    return OpInputs(
        views.factor(cov_factor),
        views.gaussians(cov_diag),
        None if value is None else views.values(value),
        None if loc is None else views.values(loc),
        None if mask is None else views.gaussians(mask),
        eps,
        precision,
    )


class Factorised(NamedTuple):
    """The factorisation that the calls of one distribution can share."""

    chol_inv: Tensor  # L^-1 [B, R, R]
    summary: Tensor  # growth and log det Sigma, [B, 2]


def log_prob_fwd(inputs: OpInputs, known: Factorised | None, terms: Terms) -> Forward:
    """The forward op, or its outputs computed by QR."""
    mask = inputs.mask
    per_output = terms.per_output if mask is None else 0.0
    if terms.outside:
        found = _by_qr(inputs, terms, per_output * inputs.cov_diag.shape[1])
    else:
        op, given = registry.OPS[terms.backend].log_prob_fwd, known or (None, None)
        found = Forward(*op(*inputs, *given, terms.maha, terms.logdet, per_output))
        if mask is None:
            return found
    result = found.result  # in float64, since what follows may cancel
    if mask is not None and terms.per_output:
        result = result + terms.per_output * mask.count_nonzero(-1).double()[:, None]
    return found._replace(result=result.to(reference.result_dtype(inputs.cov_factor.dtype)))


def _by_qr(inputs: OpInputs, terms: Terms, constant: float) -> Forward:
    """The outputs of the forward op; the result is in float64."""
    rows = rows_of(inputs)
    chol_inv, summary, z, maha = (
        Dual(rows, cholesky=terms.precision == _policy.DUAL).factorised() if rows.wide else qr.factorise(rows)
    )
    failed = summary[:, :1].isinf() | ~maha.isfinite()  # [B, N]
    result = torch.where(summary[:, :1].isinf(), torch.nan, terms.logdet * summary[:, 1:] + constant)
    if inputs.value is not None:
        result = torch.where(failed, torch.nan, result + terms.maha * maha)
    z = z.masked_fill(failed[..., None], 0)
    return Forward(result, chol_inv, summary, z, failed.to(torch.int32))


def redo_declined(inputs: OpInputs, forward: Forward, terms: Terms) -> Tensor | None:
    """Recomputes the Gaussians that the forward op declined, with all others that use their factors; by QR where a
    Cholesky factorisation is not accurate enough for the gradients.

    Returns the positions of the factors that were computed by QR. Gaussians with invalid numbers fail again.
    """
    declined = _factors_of(forward.growth.isinf(), inputs)
    if len(declined) == 0:  # only values failed
        return None
    items, chosen = of_factors(inputs._replace(precision=_policy.AUTO), declined)
    again = log_prob_fwd(chosen, None, terms)
    beyond = _factors_of((again.growth > _policy.CHOLESKY_GROWTH) | _explains_an_output(chosen), chosen)
    _replace(forward, items, again)
    if len(beyond) == 0:
        return None
    items, chosen = of_factors(inputs, declined[beyond])
    _replace(forward, items, log_prob_fwd(chosen, None, terms._replace(precision=_policy.QR)))
    return declined[beyond]


def _explains_an_output(inputs: OpInputs) -> Tensor:
    """Whether the low-rank part explains an output almost completely, for every Gaussian [B]."""
    rows, largest = rows_of(inputs._replace(value=None, loc=None)), inputs.cov_diag.new_zeros(())
    for s, P, _ in rows.slices():
        largest = torch.maximum(largest, (P.square().sum(-1) * rows.root[:, s].square()).amax(-1, keepdim=True))
    return (largest > _policy.EXPLAINED_RATIO).expand(inputs.cov_diag.shape[0], 1)[:, 0]


def _replace(forward: Forward, items: Tensor, parts: Forward) -> None:
    for output, part in zip(forward, parts, strict=True):
        if output.shape[1:] == part.shape[1:]:  # else there is no L^-1, nor a need of it
            output[items] = part


def of_factors(inputs: OpInputs, factors: Tensor) -> tuple[Tensor, OpInputs]:
    """The positions of the Gaussians that use some of the factors, and their inputs."""
    every = torch.arange(inputs.cov_diag.shape[0], device=factors.device)
    items = every.reshape(inputs.cov_factor.shape[0], -1)[factors].reshape(-1)

    def of_items(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[items]

    return items, inputs._replace(
        cov_factor=inputs.cov_factor[factors],
        cov_diag=inputs.cov_diag[items],
        value=of_items(inputs.value),
        loc=of_items(inputs.loc),
        mask=of_items(inputs.mask),
    )


def _factors_of(items: Tensor, inputs: OpInputs) -> Tensor:
    """The positions of the factors that the marked Gaussians [B] use."""
    F = inputs.cov_factor.shape[0]
    return items.reshape(F, len(items) // max(F, 1)).any(-1).nonzero()[:, 0]


def rows_of(inputs: OpInputs) -> Rows:
    """The rows of the least-squares problems that belong to the arguments of an op."""
    diag, value, loc = inputs.cov_diag.double(), inputs.value, inputs.loc
    if inputs.eps is not None:
        diag = reference.positive_diag(diag, inputs.eps, _policy.exp_limit(inputs.cov_diag.dtype))
    diff = value if value is None or loc is None else value.double() - loc.double()
    return Rows(inputs.cov_factor, diag, diff, inputs.mask)


class Factorisation:
    """A cache that the calls of one distribution share while its parameters do not change."""

    def __init__(self) -> None:
        self._key: tuple[int, ...] | None = None
        self._known: Factorised | None = None

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return Factorisation, ()  # a copy has different memory and starts with an empty cache

    def recall(self, cov_factor: Tensor, cov_diag: Tensor) -> Factorised | None:
        if self._known is None or self._key != _state_of(cov_factor, cov_diag):
            return None
        return self._known

    def remember(self, cov_factor: Tensor, cov_diag: Tensor, known: Factorised) -> None:
        self._key = _state_of(cov_factor, cov_diag)
        self._known = None if self._key is None else known


def _state_of(*tensors: Tensor) -> tuple[int, ...] | None:
    """A key that changes when a tensor is modified, or None if modifications cannot be detected: inference tensors have
    no version counter, and tensor subclasses may have no memory."""
    if any(not dispatch.is_plain(t) or t.is_inference() for t in tensors):
        return None
    return tuple(number for t in tensors for number in (t.data_ptr(), t._version))
