"""The forward pass on the raw ops' terms: the op, or QR where a Cholesky does not reach, and what is kept of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lrd_kernels import _ops, _policy, _qr, reference
from lrd_kernels._batch import Batch


class Terms(NamedTuple):
    """What is computed: maha * M + logdet * log det + constant, and how."""

    maha: float
    logdet: float
    constant: float = 0.0
    eps: float | None = None
    precision: int = _policy.AUTO
    qr: bool = False  # the factorisation by QR, in which the ops have no part
    backend: str = "cpu"


def op_inputs(
    batch: Batch,
    value: Tensor | None,
    loc: Tensor | None,
    cov_factor: Tensor,
    cov_diag: Tensor,
    mask: Tensor | None,
    eps: float | None,
    precision: int,
) -> tuple[Any, ...]:
    """The leading arguments of the S-sized ops."""
    return (
        batch.factor(cov_factor),
        batch.gaussians(cov_diag),
        None if value is None else batch.values(value),
        None if loc is None else batch.values(loc),
        None if mask is None else batch.gaussians(mask),
        eps,
        precision,
    )


def log_prob_fwd(
    inputs: tuple[Any, ...], known: tuple[Tensor | None, Tensor | None], terms: Terms
) -> tuple[Tensor, ...]:
    """The forward op, or the same by QR: result, L^-1, summary, z, value_info."""
    if not terms.qr:
        return _ops.OPS[terms.backend].log_prob_fwd(*inputs, *known, terms.maha, terms.logdet, terms.constant)
    factor, diag, value, loc, mask, eps, _ = inputs
    if eps is not None:
        diag = reference.positive_diag(diag.double(), eps, _policy.exp_limit(diag.dtype))
    diff = value if value is None or loc is None else value.double() - loc.double()
    chol_inv, summary, z, maha = _qr.factorise(factor, diag, diff, mask)
    failed = summary[:, :1].isinf() | ~maha.isfinite()  # [B, N]
    result = terms.logdet * summary[:, 1:] + terms.constant
    if value is not None:
        result = torch.where(failed, torch.nan, result + terms.maha * maha)
    z = z.masked_fill(failed[..., None], 0)
    return result.to(reference.result_dtype(factor.dtype)), chol_inv, summary, z, failed.to(torch.int32)


def declined(result: Tensor) -> bool:
    """Whether a result of "auto, declining" has failures."""
    return result.item() != result.item() if result.numel() == 1 else bool(result.isnan().any())


def again_by_qr(inputs: tuple[Any, ...], outputs: Sequence[Tensor], terms: Terms) -> None:
    """Replaces the items that have failed in the outputs of the forward op. Bad numbers fail again."""
    items = outputs[2][:, 0].isinf().nonzero()[:, 0]
    if len(items) == 0:  # a value has failed, no covariance
        return
    factor, *others = inputs[:5]
    per_factor = outputs[2].shape[0] // factor.shape[0]
    chosen = [None if t is None else t[items] for t in others]
    again = log_prob_fwd((factor[items // per_factor], *chosen, *inputs[5:]), (None, None), terms._replace(qr=True))
    for output, part in zip(outputs, again, strict=True):
        output[items] = part


class Factorisation:
    """What the calls of one distribution share, L^-1 and the summary, for as long as its parameters stay the same."""

    def __init__(self) -> None:
        self._key: tuple[int, ...] | None = None
        self._known: tuple[Tensor, Tensor] | None = None

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return Factorisation, ()  # a copy has other memory, and starts afresh

    def recall(self, cov_factor: Tensor, cov_diag: Tensor) -> tuple[Tensor, Tensor] | tuple[None, None]:
        if self._known is None or self._key != _state_of(cov_factor, cov_diag):
            return None, None
        return self._known

    def remember(self, cov_factor: Tensor, cov_diag: Tensor, chol_inv: Tensor, summary: Tensor) -> None:
        self._key = _state_of(cov_factor, cov_diag)
        self._known = None if self._key is None else (chol_inv, summary)


def _state_of(*tensors: Tensor) -> tuple[int, ...] | None:
    """Changes when a tensor does. None where that cannot be told: writes to inference tensors are not counted, and
    what only acts like a tensor may have no memory."""
    if any(type(t) not in (Tensor, torch.nn.Parameter) or t.is_inference() for t in tensors):
        return None
    return tuple(number for t in tensors for number in (t.data_ptr(), t._version))
