"""The functions of the package: names, defaults and the choice of a backend.

All functions take `cov_factor` [..., S, R] and `cov_diag` [..., S], which define `Sigma = diag(cov_diag) + cov_factor
cov_factor^T`. Batch dimensions broadcast and are not materialised. `cov_factor` may have any strides: row-major (R
contiguous) and rank-major (S contiguous, a `[..., R, S]` tensor passed as `.mT`) are both read in place. float32,
float64, bfloat16 and float16 are accepted; all tensors of a call must have the same dtype. Sums are accumulated in
float64. Scalar results of half-precision inputs are float32, and gradients have the input's dtype.

Common arguments:
    mask: bool [..., S], True where an output exists. A masked output (False) contributes nothing and has a zero
        gradient; its value, mean, diagonal and factor row may be arbitrary, including NaN.
    precision: "auto" stays within the error budget: it uses float64, or float32 products where a certificate, computed
        from the capacitance matrix and from the cancellation in the Mahalanobis term, allows them. "float64" and
        "float32" force the precision of the products. "qr" uses a factorisation that does not form the capacitance
        matrix; it is several times slower and available in `log_prob`, `mahalanobis`, `logdet`, `entropy` and
        `nll_loss`. In eager mode on the CPU, "auto" switches to QR for batch items whose capacitance matrix is too
        ill-conditioned for a Cholesky factorisation. Elsewhere, pass "qr" for condition numbers above about 1e11.
    on_failure: "raise" raises an error that names the first invalid number. "nan" returns NaN for the invalid batch
        items only, with zero gradients. On a GPU, and inside `torch.compile` or `torch.func`, inputs are not checked
        and the behaviour is always "nan".
    backend: a name from `backends()`, or None for the best one that supports these tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lrd_kernels import _validate, reference
from lrd_kernels._policy import LOG_2PI, OP_PRECISIONS, PRECISIONS, QR, exp_limit
from lrd_kernels.autograd.forward import Arguments, Factorisation, Terms
from lrd_kernels.autograd.log_prob import weighted_terms
from lrd_kernels.autograd.solve import CapacitanceCholesky, PrecisionDiag, Solve
from lrd_kernels.ops import dispatch
from lrd_kernels.ops.views import BatchViews

TRANSFORMS = ("exp", "softplus")

__all__ = [
    "capacitance_cholesky",
    "entropy",
    "log_prob",
    "logdet",
    "mahalanobis",
    "matvec",
    "nll_loss",
    "positive_diag",
    "rsample",
    "solve",
]


class Options(NamedTuple):
    """How a scalar is computed: see the common arguments above."""

    mask: Tensor | None = None
    precision: str = "auto"
    on_failure: str = "raise"
    backend: str | None = None
    eps: float | None = None  # if given, the diagonal is raw, and the kernels compute `eps + exp(raw)`


def log_prob(
    value: Tensor,
    loc: Tensor,
    cov_factor: Tensor,
    cov_diag: Tensor,
    *,
    mask: Tensor | None = None,
    precision: str = "auto",
    on_failure: str = "raise",
    backend: str | None = None,
) -> Tensor:
    """Log-density of `value` [..., S] under the Gaussian with mean `loc` [..., S]: shape [...]."""
    vectors = {"value": value, "loc": loc}
    options = Options(mask, precision, on_failure, backend)
    return terms(vectors, cov_factor, cov_diag, options, maha=-0.5, logdet=-0.5, per_output=-0.5 * LOG_2PI)


def mahalanobis(
    diff: Tensor,
    cov_factor: Tensor,
    cov_diag: Tensor,
    *,
    mask: Tensor | None = None,
    precision: str = "auto",
    on_failure: str = "raise",
    backend: str | None = None,
) -> Tensor:
    """The squared distance `diff^T Sigma^-1 diff` of `diff` [..., S]: shape [...]."""
    options = Options(mask, precision, on_failure, backend)
    return terms({"diff": diff}, cov_factor, cov_diag, options, maha=1.0, logdet=0.0)


def logdet(
    cov_factor: Tensor,
    cov_diag: Tensor,
    *,
    mask: Tensor | None = None,
    precision: str = "auto",
    on_failure: str = "raise",
    backend: str | None = None,
) -> Tensor:
    """Log-determinant of Sigma, or of its unmasked part if there is a mask: shape [...]."""
    options = Options(mask, precision, on_failure, backend)
    return terms({}, cov_factor, cov_diag, options, maha=0.0, logdet=1.0)


def entropy(
    cov_factor: Tensor,
    cov_diag: Tensor,
    *,
    mask: Tensor | None = None,
    precision: str = "auto",
    on_failure: str = "raise",
    backend: str | None = None,
) -> Tensor:
    """Differential entropy in nats: shape [...]."""
    options = Options(mask, precision, on_failure, backend)
    return terms({}, cov_factor, cov_diag, options, maha=0.0, logdet=0.5, per_output=0.5 * (1 + LOG_2PI))


def nll_loss(
    mean: Tensor,
    raw_diag: Tensor,
    cov_factor: Tensor,
    target: Tensor,
    *,
    eps: float = 0.01,
    eps_std: float | None = None,
    transform: str = "exp",
    mask: Tensor | None = None,
    reduction: str = "mean",
    precision: str = "auto",
    on_failure: str = "raise",
    backend: str | None = None,
) -> Tensor:
    """Negative log-density of `target` [..., S] per (unmasked) output, with diagonal `positive_diag(raw_diag, eps)`.

    Args:
        eps: lower bound on the variance. The kernels compute `D = eps + exp(raw_diag)` without a temporary.
        eps_std: lower bound on the standard deviation, used instead of eps: `eps = eps_std ** 2`.
        transform: "exp", or "softplus" for `D = eps + softplus(raw_diag)`, which needs a temporary of raw_diag's size.
        reduction: reduction over batch items: "mean", "sum", or "none" for shape [...].
    """
    _validate.option("reduction", reduction, _validate.REDUCTIONS)
    floor = _floor(eps, eps_std)
    _validate.option("transform", transform, TRANSFORMS)
    vectors = {"target": target, "mean": mean}
    fused = transform == "exp"
    diag = raw_diag if fused else positive_diag(raw_diag, floor, transform=transform)
    options = Options(mask, precision, on_failure, backend, floor if fused else None)
    result = terms(vectors, cov_factor, diag, options, maha=0.5, logdet=0.5, per_output=0.5 * LOG_2PI)
    result = result / (max(raw_diag.shape[-1], 1) if mask is None else mask.sum(-1).clamp(min=1))
    if reduction == "none":
        return result
    return result.mean() if reduction == "mean" else result.sum()


def positive_diag(
    raw: Tensor, eps: float | None = None, *, eps_std: float | None = None, transform: str = "exp"
) -> Tensor:
    """Maps unconstrained numbers to a positive diagonal, `eps + exp(raw)`, for the variances of a Gaussian.

    The exponential does not overflow: above 80 (350 in float64, 11 in float16) the result and its gradient are
    constant. The gradient is therefore finite and non-zero for any finite number.

    Args:
        eps: lower bound on the variance.
        eps_std: lower bound on the standard deviation; its square is the lower bound on the variance. Exactly one of
            eps and eps_std must be given.
        transform: "exp", or "softplus" for `eps + log(1 + exp(raw))`, which grows linearly.
    """
    _validate.floating("raw", raw)
    _validate.option("transform", transform, TRANSFORMS)
    if (eps is None) == (eps_std is None):
        raise ValueError(f"one of eps and eps_std must be given; got eps={eps}, eps_std={eps_std}")
    floor = _floor(0.0 if eps is None else eps, eps_std)
    if transform == "softplus":
        return floor + torch.nn.functional.softplus(raw)
    return reference.positive_diag(raw, floor, exp_limit(raw.dtype))


def capacitance_cholesky(
    cov_factor: Tensor,
    cov_diag: Tensor,
    *,
    mask: Tensor | None = None,
    precision: str = "auto",
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Lower Cholesky factor [..., R, R] of the capacitance `I + P^T D^-1 P`, and `info` [...].

    `info` is 0 for a valid batch item. It is 1, and the factor is NaN, if a number is not finite or the diagonal is not
    positive. Such values do not raise an error.
    """
    _validate.gaussian(cov_factor, cov_diag, mask)
    _validate.option("precision", precision, OP_PRECISIONS)
    chosen = dispatch.choose(backend, cov_factor.device)
    if chosen == "reference":
        return reference.capacitance_cholesky(cov_factor, cov_diag, mask=mask)
    return CapacitanceCholesky.apply(cov_factor, cov_diag, mask, OP_PRECISIONS[precision], chosen)


def solve(
    rhs: Tensor,
    cov_factor: Tensor,
    cov_diag: Tensor,
    *,
    precision: str = "auto",
    on_failure: str = "raise",
    backend: str | None = None,
) -> Tensor:
    """`Sigma^-1 rhs` for vectors `rhs` [..., S]: shape [..., S]."""
    _validate.gaussian(cov_factor, cov_diag, rhs=rhs)
    _validate.option("precision", precision, OP_PRECISIONS)
    _validate.option("on_failure", on_failure, _validate.ON_FAILURE)
    chosen = dispatch.choose(backend, cov_factor.device)
    if chosen == "reference":
        result = reference.solve(rhs, cov_factor, cov_diag)
    else:
        result = Solve.apply(rhs, cov_factor, cov_diag, OP_PRECISIONS[precision], chosen)[0]
    if on_failure == "raise":
        # One invalid number makes the whole batch item NaN, so it is enough to check one entry of each.
        _validate.check_result(result[..., :1], cov_factor, cov_diag, None, rhs=rhs)
    return result


def matvec(vec: Tensor, cov_factor: Tensor, cov_diag: Tensor) -> Tensor:
    """`Sigma vec` for vectors `vec` [..., S]: shape [..., S]."""
    _validate.gaussian(cov_factor, cov_diag, vec=vec)
    views = BatchViews(cov_factor, cov_diag, None, (vec,))
    P = _multipliable(views.factor(cov_factor))  # [F, S, R]
    v = _multipliable(views.rows(vec))  # [F, K N, S]
    return cov_diag * vec + views.from_rows((v @ P) @ P.mT).to(vec.dtype)


def rsample(
    loc: Tensor,
    cov_factor: Tensor,
    cov_diag: Tensor,
    sample_shape: Sequence[int] = (),
    *,
    generator: torch.Generator | None = None,
    antithetic: bool = False,
    noise: tuple[Tensor, Tensor] | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Reparameterised samples, differentiable in all parameters: shape [*sample_shape, ..., S].

    Draws the same numbers as `torch.distributions.LowRankMultivariateNormal.rsample` from the same generator state.

    Args:
        antithetic: if True, the second half of the samples mirrors the first half about the mean; the number of samples
            must be even.
        noise: standard normal numbers to use instead of new ones, for the columns [*sample_shape, ..., R] and for the
            outputs [*sample_shape, ..., S]. Samples of two Gaussians with the same noise differ only because of the
            parameters.
        mask: bool [..., S], True for the outputs to sample; the others are set to the mean.
    """
    _validate.gaussian(cov_factor, cov_diag, loc=loc)
    batch_shape = torch.broadcast_shapes(loc.shape[:-1], cov_factor.shape[:-2], cov_diag.shape[:-1])
    shape = (*sample_shape, *batch_shape)
    noise_factor, noise_diag = _noise(
        loc, cov_factor, shape, generator, tuple(sample_shape) if antithetic else False, noise
    )
    # All samples share the factor, so they become the rows of one product.
    views = BatchViews(cov_factor, cov_diag, None, (noise_diag,))
    P = _multipliable(views.factor(cov_factor))  # [F, S, R]
    rows = _multipliable(views.rows(noise_factor))  # [F, K N, R]
    result = loc + views.from_rows(rows @ P.mT).to(loc.dtype) + cov_diag.sqrt() * noise_diag
    return result if mask is None else torch.where(mask, result, loc)


def _noise(
    loc: Tensor,
    cov_factor: Tensor,
    shape: tuple[int, ...],
    generator: torch.Generator | None,
    mirrored: Sequence[int] | bool,
    given: tuple[Tensor, Tensor] | None,
) -> Iterator[Tensor]:
    """Standard normal numbers for the columns [*shape, R], then for the outputs [*shape, S]."""
    sizes = (cov_factor.shape[-1], cov_factor.shape[-2])
    if given is not None:
        for tensor, size in zip(given, sizes, strict=True):
            if tensor.shape != (*shape, size):
                raise ValueError(f"noise must have shape {(*shape, size)}; got {tuple(tensor.shape)}")
            yield tensor
        return
    if mirrored is not False and (not mirrored or shape[0] % 2):
        raise ValueError(f"antithetic samples come in pairs: sample_shape must begin with an even number; got {shape}")
    drawn = (shape[0] // 2, *shape[1:]) if mirrored else shape
    for size in sizes:
        numbers = torch.randn((*drawn, size), dtype=loc.dtype, device=loc.device, generator=generator)
        yield torch.cat([numbers, -numbers]) if mirrored else numbers


def precision_diag(cov_factor: Tensor, cov_diag: Tensor) -> Tensor:
    """Diagonal of `Sigma^-1`: shape [..., S]. Not public; used by the KL divergences."""
    chosen = dispatch.choose(None, cov_factor.device)
    if chosen == "reference":
        return reference.precision_diag(cov_factor, cov_diag)
    return PrecisionDiag.apply(cov_factor, cov_diag, chosen)


def terms(
    vectors: dict[str, Tensor],
    cov_factor: Tensor,
    cov_diag: Tensor,
    options: Options,
    *,
    maha: float,
    logdet: float,
    per_output: float = 0.0,
    factorisation: Factorisation | None = None,
) -> Tensor:
    """`maha * M + logdet * log det Sigma + per_output * (number of outputs)`: the core of all scalar functions.

    `vectors` holds the value and its mean, in this order; either may be missing. Their keys are the names used in
    error messages. A distribution passes its `factorisation`, which outlives the call.
    """
    mask, precision, on_failure, backend, eps = options
    _validate.gaussian(cov_factor, cov_diag, mask, **vectors)
    _validate.options(precision, on_failure)
    value, loc = (*vectors.values(), None, None)[:2]
    constant = per_output * cov_diag.shape[-1] if mask is None else 0.0
    chosen = dispatch.choose(backend, cov_factor.device)
    # With more columns than outputs, torch factorises the S x S matrix instead.
    if chosen == "reference" or reference.is_wide(cov_factor):
        result = reference.terms(
            *(value, loc, cov_factor, cov_diag),
            mask=mask,
            eps=eps,
            maha=maha,
            logdet=logdet,
            constant=constant,
            qr=PRECISIONS[precision] == QR,
        )
    else:
        wanted = Terms(maha, logdet, constant, eps, PRECISIONS[precision], chosen)
        result = weighted_terms(Arguments(value, loc, cov_factor, cov_diag, mask), wanted, factorisation)
    if mask is not None and per_output != 0.0:
        result = result + (per_output * mask.sum(-1, dtype=torch.float64)).to(result.dtype)
    if on_failure == "raise":
        _validate.check_result(result, cov_factor, cov_diag, mask, eps, **vectors)
    return result


def _floor(eps: float, eps_std: float | None) -> float:
    """The lower bound on the variance."""
    name, value = ("eps", eps) if eps_std is None else ("eps_std", eps_std)
    _validate.non_negative(name, value)
    return float(value if eps_std is None else value * value)


def _multipliable(matrix: Tensor) -> Tensor:
    """Widens half-precision matrices on the CPU, where their products lose accuracy or, on some machines, trap."""
    return matrix.float() if matrix.device.type == "cpu" and matrix.dtype.itemsize == 2 else matrix
