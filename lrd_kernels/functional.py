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

from typing import NamedTuple

import torch
from torch import Tensor

from lrd_kernels import _validate, reference
from lrd_kernels._policy import DUAL, LOG_2PI, OP_PRECISIONS, PRECISIONS, QR, exp_limit
from lrd_kernels.autograd.forward import Arguments, Factorisation, Terms
from lrd_kernels.autograd.log_prob import weighted_terms
from lrd_kernels.autograd.solve import CapacitanceCholesky, PrecisionDiag, Solve
from lrd_kernels.linalg import products
from lrd_kernels.ops import dispatch
from lrd_kernels.ops.views import BatchViews

TRANSFORMS = ("exp", "softplus")
SOFTPLUS_THRESHOLD = 40  # above, softplus(x) is x to the last bit of float64

__all__ = [
    "capacitance_cholesky",
    "entropy",
    "log_prob",
    "logdet",
    "mahalanobis",
    "matvec",
    "nll_loss",
    "positive_diag",
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
    """Log-density of `value` [..., S] under the Gaussian with mean `loc` [..., S]: shape [...].

        log p(y) = -1/2 ((y - mu)^T Sigma^-1 (y - mu) + log det Sigma + S log 2 pi),    Sigma = diag(D) + P P^T

    y is `value`, mu is `loc`, P is `cov_factor` [..., S, R] and D is `cov_diag` [..., S].

    Args:
        mask: bool [..., S], True where an output exists. The others count for nothing and may hold NaN.
        precision: "auto", "float64", "float32" or "qr", the arithmetic; docs/choosing.md says when to change it.
        on_failure: "raise", or "nan" for NaN in the invalid batch items only.
        backend: a name from `backends()`, or None for the best one.

    Raises:
        ValueError: if a shape or an option is wrong, or if `value` or `loc` is not finite.
        TypeError: if an argument is not a tensor, or if dtypes differ.
        NotPositiveDefiniteError: if `cov_factor` is not finite, or `cov_diag` is not positive and finite.

    Examples:
        >>> loc, P, D = torch.zeros(3), torch.tensor([[1.0], [1.0], [0.0]]), torch.ones(3)
        >>> lrd.log_prob(torch.zeros(3), loc, P, D)
        tensor(-3.3061)
        >>> lrd.log_prob(torch.zeros(5, 3), loc, P, D).shape
        torch.Size([5])
    """
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
    """The squared Mahalanobis distance of `diff` [..., S], such as `value - loc`: shape [...].

        M = diff^T Sigma^-1 diff,    Sigma = diag(cov_diag) + cov_factor cov_factor^T

    `cov_factor` is [..., S, R], `cov_diag` is [..., S]. Outputs where `mask` [..., S] is False count for nothing.
    `precision`, `on_failure` and `backend` choose the arithmetic, what happens to invalid numbers, and who computes:
    see `log_prob`, which raises the same errors.

    Examples:
        >>> P, D = torch.tensor([[1.0], [1.0], [0.0]]), torch.ones(3)
        >>> lrd.mahalanobis(torch.ones(3), P, D)
        tensor(1.6667)
    """
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
    """Log-determinant of the covariance, or of its unmasked part if there is a mask: shape [...].

        log det Sigma = log det(I + P^T D^-1 P) + sum_i log D_i

    P is `cov_factor` [..., S, R] and D is `cov_diag` [..., S]. Outputs where `mask` [..., S] is False count for
    nothing. `precision`, `on_failure` and `backend` choose the arithmetic, what happens to invalid numbers, and who
    computes: see `log_prob`, which raises the same errors.

    Examples:
        >>> P, D = torch.tensor([[1.0], [1.0], [0.0]]), torch.ones(3)
        >>> lrd.logdet(P, D)  # the covariance is [[2, 1, 0], [1, 2, 0], [0, 0, 1]]
        tensor(1.0986)
    """
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
    """Differential entropy of the Gaussian in nats: shape [...].

        H = 1/2 (log det Sigma + S (1 + log 2 pi)),    Sigma = diag(cov_diag) + cov_factor cov_factor^T

    `cov_factor` is [..., S, R], `cov_diag` is [..., S]. S counts the outputs where `mask` [..., S] is True, or all of
    them. `precision`, `on_failure` and `backend` choose the arithmetic, what happens to invalid numbers, and who
    computes: see `log_prob`, which raises the same errors.

    Examples:
        >>> P, D = torch.tensor([[1.0], [1.0], [0.0]]), torch.ones(3)
        >>> lrd.entropy(P, D)
        tensor(4.8061)
    """
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
    """Training loss of a network: the negative log-density of `target` [..., S] per (unmasked) output.

        loss = -log N(target; mean, diag(D) + P P^T) / S,    D = eps + exp(raw_diag)

    `mean` and `raw_diag` are [..., S], and P is `cov_factor` [..., S, R]; pass a network's [..., R, S] as `.mT`, which
    copies nothing. The result is a scalar, or [...] with `reduction="none"`. Outputs where `mask` [..., S] is False
    count for nothing. `precision`, `on_failure` and `backend` choose the arithmetic, what happens to invalid numbers,
    and who computes: see `log_prob`, which raises the same errors.

    Args:
        eps: lower bound on the variance. The kernels compute `D = eps + exp(raw_diag)` without a temporary.
        eps_std: lower bound on the standard deviation, used instead of eps: `eps = eps_std ** 2`.
        transform: "exp", or "softplus" for `D = eps + softplus(raw_diag)`, which needs a temporary of raw_diag's size.
        reduction: reduction over batch items: "mean", "sum", or "none" for shape [...].

    Examples:
        >>> mean, raw_diag, columns = torch.zeros(8, 100), torch.zeros(8, 100), torch.ones(8, 4, 100)
        >>> lrd.nll_loss(mean, raw_diag, columns.mT, torch.zeros(8, 100), eps=0.01)
        tensor(0.9538)
    """
    _validate.option("reduction", reduction, _validate.REDUCTIONS)
    floor = floor_of(eps, eps_std)
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

    Returns:
        A tensor with the shape and dtype of `raw`.

    Raises:
        ValueError: if not exactly one of eps and eps_std is given, or if it is negative or not finite.

    Examples:
        >>> lrd.positive_diag(torch.tensor([-100.0, 0.0]), eps=0.01)
        tensor([0.0100, 1.0100])
    """
    _validate.floating("raw", raw)
    _validate.option("transform", transform, TRANSFORMS)
    if (eps is None) == (eps_std is None):
        raise ValueError(f"one of eps and eps_std must be given; got eps={eps}, eps_std={eps_std}")
    floor = floor_of(0.0 if eps is None else eps, eps_std)
    if transform == "softplus":
        return floor + torch.nn.functional.softplus(raw, threshold=SOFTPLUS_THRESHOLD)
    return reference.positive_diag(raw, floor, exp_limit(raw.dtype))


def capacitance_cholesky(
    cov_factor: Tensor,
    cov_diag: Tensor,
    *,
    mask: Tensor | None = None,
    precision: str = "auto",
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Lower Cholesky factor L [..., R, R] of the capacitance matrix, and `info` [...].

        L L^T = C = I + P^T D^-1 P

    P is `cov_factor` [..., S, R] and D is `cov_diag` [..., S]; outputs where `mask` [..., S] is False count for
    nothing. `info` is 0 for a valid batch item. It is 1, and the factor is NaN, if a number is not finite or the
    diagonal is not positive. Such values do not raise an error; wrong shapes and dtypes do. `precision` is "auto",
    "float64" or "float32", and `backend` is a name from `backends()`.

    Examples:
        >>> P, D = torch.tensor([[1.0], [1.0], [0.0]]), torch.ones(3)
        >>> L, info = lrd.capacitance_cholesky(P, D)
        >>> L, info.item()
        (tensor([[1.7321]]), 0)
    """
    _validate.gaussian(cov_factor, cov_diag, mask)
    _validate.option("precision", precision, OP_PRECISIONS)
    chosen = dispatch.choose(backend, cov_factor.device)
    if chosen == "reference":
        return reference.capacitance_cholesky(cov_factor, cov_diag, mask=mask)
    chol, info = CapacitanceCholesky.apply(cov_factor, cov_diag, mask, OP_PRECISIONS[precision], chosen)
    return chol.to(reference.result_dtype(cov_factor.dtype)), info


def solve(
    rhs: Tensor,
    cov_factor: Tensor,
    cov_diag: Tensor,
    *,
    precision: str = "auto",
    on_failure: str = "raise",
    backend: str | None = None,
) -> Tensor:
    """Solves `Sigma x = rhs` for vectors `rhs` [..., S]: shape [..., S].

        Sigma^-1 rhs = D^-1 rhs - D^-1 P (I + P^T D^-1 P)^-1 P^T D^-1 rhs

    P is `cov_factor` [..., S, R] and D is `cov_diag` [..., S]. For several right-hand sides give them batch dimensions,
    as [K, ..., S]. `precision`, `on_failure` and `backend` choose the arithmetic, what happens to invalid numbers, and
    who computes: see `log_prob`, which raises the same errors.

    Examples:
        >>> P, D = torch.tensor([[1.0], [1.0], [0.0]]), torch.ones(3)
        >>> lrd.solve(torch.ones(3), P, D)
        tensor([0.3333, 0.3333, 1.0000])
    """
    _validate.gaussian(cov_factor, cov_diag, rhs=rhs)
    _validate.options(precision, on_failure)
    chosen = dispatch.choose(backend, cov_factor.device)
    if chosen == "reference":
        result = reference.solve(rhs, cov_factor, cov_diag)
    else:  # in float32 for half types, whose gradients would be products of rounded solutions
        wide = [t.to(reference.result_dtype(t.dtype)) for t in (rhs, cov_factor, cov_diag)]
        result = Solve.apply(*wide, PRECISIONS[precision], chosen)[0].to(rhs.dtype)
    if on_failure == "raise":
        # One invalid number makes the whole batch item NaN, so it is enough to check one entry of each.
        _validate.check_result(result[..., :1], cov_factor, cov_diag, None, rhs=rhs)
    return result


def matvec(vec: Tensor, cov_factor: Tensor, cov_diag: Tensor) -> Tensor:
    """The product of the covariance with vectors `vec` [..., S]: shape [..., S].

        Sigma vec = D * vec + P (P^T vec)

    P is `cov_factor` [..., S, R] and D is `cov_diag` [..., S]. Raises ValueError for wrong shapes, and TypeError for
    wrong types and dtypes; numbers are not checked.

    Examples:
        >>> P, D = torch.tensor([[1.0], [1.0], [0.0]]), torch.ones(3)
        >>> lrd.matvec(torch.ones(3), P, D)
        tensor([3., 3., 1.])
    """
    _validate.gaussian(cov_factor, cov_diag, vec=vec)
    views = BatchViews(cov_factor, cov_diag, None, (vec,))
    P = views.factor(cov_factor)  # [F, S, R]
    along = products.project(P, views.rows(vec))  # [F, K N, R]
    return (cov_diag.double() * vec + views.from_rows(products.lift(P, along))).to(vec.dtype)


def latent_mean(diff: Tensor, cov_factor: Tensor, cov_diag: Tensor) -> Tensor:
    """`P^T Sigma^-1 diff` [..., R] in float64, the mean of the latent variables given `value - loc` [..., S].

    Not public; used by `condition`.
    """
    _validate.gaussian(cov_factor, cov_diag, value=diff)
    chosen = dispatch.choose(None, cov_factor.device)
    if chosen == "reference":
        x = reference.solve(diff, cov_factor, cov_diag)
        return products.project(cov_factor, x[..., None, :])[..., 0, :]
    x, z = Solve.apply(diff, cov_factor, cov_diag, PRECISIONS["auto"], chosen)
    _validate.check_result(x[..., :1], cov_factor, cov_diag, None, value=diff)
    return z


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
    _validate.gaussian(cov_factor, cov_diag, mask, diag_name="cov_diag" if eps is None else "raw_diag", **vectors)
    _validate.options(precision, on_failure)
    value, loc = (*vectors.values(), None, None)[:2]
    chosen = dispatch.choose(backend, cov_factor.device)
    if chosen == "reference" or dispatch.forward_mode_is_nested():
        result = reference.terms(
            *(value, loc, cov_factor, cov_diag),
            mask=mask,
            eps=eps,
            maha=maha,
            logdet=logdet,
            constant=per_output * (cov_diag.shape[-1] if mask is None else mask.count_nonzero(-1).double()),
            qr=PRECISIONS[precision] == QR,
        )
    else:
        how = PRECISIONS[precision]
        if 0 in (*cov_factor.shape, *cov_diag.shape):
            how = PRECISIONS["auto"]  # there is nothing to factorise
        elif how != QR and reference.is_wide(cov_factor):
            how = DUAL  # the capacitance would have eigenvalues of 1 beside far larger ones
        wanted = Terms(maha, logdet, per_output, eps, how, chosen)
        result = weighted_terms(Arguments(value, loc, cov_factor, cov_diag, mask), wanted, factorisation)
    if on_failure == "raise":
        _validate.check_result(result, cov_factor, cov_diag, mask, eps, **vectors)
    return result


def floor_of(eps: float, eps_std: float | None) -> float:
    """The lower bound on the variance."""
    name, value = ("eps", eps) if eps_std is None else ("eps_std", eps_std)
    _validate.non_negative(name, value)
    return float(value if eps_std is None else value * value)
