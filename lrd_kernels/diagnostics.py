"""Numerical diagnostics of a covariance: bounds and estimates of condition numbers, and a summary of them.

These functions are not differentiable. Invalid numbers do not raise an error; the results of their batch items are NaN.
Eigenvalues are numbered in ascending order, from lambda_1 (smallest) to lambda_S (largest).
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from lrd_kernels import _validate, functional
from lrd_kernels._policy import CHOLESKY_CONDITION, FLOAT32_CONDITION, GRADIENT_CONDITION
from lrd_kernels.linalg import capacitance, rotation
from lrd_kernels.linalg.eigen import Covariance, lanczos, power
from lrd_kernels.ops import dispatch

__all__ = [
    "Diagnosis",
    "ExtremeEigenvalues",
    "capacitance_condition",
    "condition_bounds",
    "diagnose",
    "extreme_eigenvalues",
]

METHODS = ("lanczos", "power")
QUANTILES = (0.0, 0.01, 0.1, 0.5, 0.9, 0.99, 1.0)
AT_FLOOR = 1.01  # a diagonal entry up to this multiple of the floor counts as at the floor


@torch.no_grad()
def condition_bounds(cov_factor: Tensor, cov_diag: Tensor, *, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Lower and upper bounds on the condition number of Sigma, each [...] in float64, by Weyl's inequality.

        (|P|^2 + lambda_1(D)) / lambda_{R+1}(D)  <=  kappa(Sigma)  <=  (|P|^2 + lambda_S(D)) / lambda_1(D)

    |P| is the spectral norm of P, computed from its R x R Gram matrix, and lambda_k(D) is the k-th smallest entry of D.
    If S <= R, there is no lambda_{R+1}(D); the smallest of all of Weyl's bounds on lambda_1(Sigma) is used instead.
    P is `cov_factor` [..., S, R], D is `cov_diag` [..., S]; outputs where `mask` [..., S] is False count for nothing.
    Raises ValueError for wrong shapes, and TypeError for wrong types and dtypes.

    Examples:
        >>> lower, upper = lrd.condition_bounds(torch.ones(3, 1), torch.ones(3))
        >>> lower, upper  # the eigenvalues are 1, 1 and 4
        (tensor(4., dtype=torch.float64), tensor(4., dtype=torch.float64))
    """
    _validate.gaussian(cov_factor, cov_diag, mask)
    dispatch.refuse_tangents("condition_bounds", cov_factor, cov_diag)
    spectrum = _spectrum(cov_factor, mask)
    lower, upper = weyl_bounds(spectrum, sortable(cov_diag, mask, torch.inf), sortable(cov_diag, mask, -torch.inf))
    batches = [cov_factor.shape[:-2], cov_diag.shape[:-1]] + ([] if mask is None else [mask.shape[:-1]])
    shape = torch.broadcast_shapes(*batches)
    return lower.expand(shape), upper.expand(shape)


@torch.no_grad()
def capacitance_condition(cov_factor: Tensor, cov_diag: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Condition number of the capacitance matrix `I + P^T D^-1 P`, [...] in float64.

    P is `cov_factor` [..., S, R], D is `cov_diag` [..., S]; outputs where `mask` [..., S] is False count for nothing.
    docs/safety.md says what it means for accuracy. It is computed from the singular values of
    the Cholesky factor. From 1e14 on, where that factor is not accurate enough, the factor comes from a QR
    decomposition. Raises ValueError for wrong shapes, and TypeError for wrong types and dtypes.

    Examples:
        >>> P, D = torch.tensor([[3.0, 0.0], [0.0, 0.0]]), torch.ones(2)
        >>> print(f"{lrd.capacitance_condition(P, D):.3f}")  # of diag(10, 1)
        10.000
    """
    _validate.gaussian(cov_factor, cov_diag, mask)
    dispatch.refuse_tangents("capacitance_condition", cov_factor, cov_diag)
    return _condition(capacitance.gram(cov_factor, cov_diag, mask), cov_factor, cov_diag, mask)


class ExtremeEigenvalues(NamedTuple):
    """The smallest and largest eigenvalue of Sigma, each [...] in float64.

    The result of `extreme_eigenvalues`.

    Attributes:
        smallest: [...]
        largest: [...]
        smallest_residual: [...]; an eigenvalue of Sigma lies within `smallest_residual * smallest` of `smallest`.
        largest_residual: [...], likewise.
        converged: bool [...], whether both residuals are within the tolerance.
        iterations: int64 [...], the total number of products with Sigma and of solves.

    Examples:
        >>> found = lrd.extreme_eigenvalues(torch.ones(3, 1), torch.ones(3))
        >>> print(f"{found.smallest:.3f} {found.largest:.3f} {found.condition:.3f}")
        1.000 4.000 4.000
    """

    smallest: Tensor
    largest: Tensor
    smallest_residual: Tensor
    largest_residual: Tensor
    converged: Tensor
    iterations: Tensor

    @property
    def condition(self) -> Tensor:
        """Condition number of Sigma, `largest / smallest`: [...]."""
        return self.largest / self.smallest


@torch.no_grad()
def extreme_eigenvalues(
    cov_factor: Tensor, cov_diag: Tensor, *, tol: float = 1e-6, max_iter: int = 500, method: str = "lanczos"
) -> ExtremeEigenvalues:
    """Smallest and largest eigenvalue of Sigma, each [...], by iteration in float64, one batch item at a time.

        Sigma v = lambda v,    Sigma = diag(cov_diag) + cov_factor cov_factor^T

    `cov_factor` is [..., S, R] and `cov_diag` is [..., S]. Iterations that do not converge give a result, too: look at
    `converged`.

    Args:
        tol: largest relative residual of a converged eigenvalue.
        max_iter: largest number of products with the matrix, for each of the two eigenvalues.
        method: "lanczos" is a restarted Lanczos method on Sigma and on `(Sigma - s I)^-1`. The shift s is just below
            the smallest diagonal entry, which is itself just below the smallest eigenvalue. "power" is plain power
            iteration on Sigma and Sigma^-1; the smallest eigenvalue may take thousands of steps, because the
            neighbouring eigenvalues are close to it.

    Raises:
        ValueError: if a shape, a limit or the method is wrong.
        TypeError: for wrong types and dtypes.

    Examples:
        >>> found = lrd.extreme_eigenvalues(torch.ones(3, 1), torch.ones(3))
        >>> print(f"{found.largest:.3f}", found.converged.item())
        4.000 True
    """
    _validate.gaussian(cov_factor, cov_diag)
    dispatch.refuse_tangents("extreme_eigenvalues", cov_factor, cov_diag)
    _validate.non_negative("tol", tol)
    _validate.non_negative("max_iter", max_iter)
    _validate.option("method", method, METHODS)
    shape = torch.broadcast_shapes(cov_factor.shape[:-2], cov_diag.shape[:-1])
    factors = cov_factor.expand(*shape, *cov_factor.shape[-2:])
    diags = cov_diag.expand(*shape, cov_diag.shape[-1])
    items = itertools.product(*map(range, shape))
    results = [_extremes(factors[item], diags[item], tol, max_iter, method) for item in items]
    columns = torch.tensor(results, dtype=torch.float64, device=cov_factor.device).reshape(*shape, 5).unbind(-1)
    smallest, largest, smallest_residual, largest_residual, iterations = columns
    converged = (smallest_residual <= tol) & (largest_residual <= tol)
    return ExtremeEigenvalues(
        smallest, largest, smallest_residual, largest_residual, converged, iterations.to(torch.int64)
    )


class Diagnosis(NamedTuple):
    """The numerical health of a covariance, the result of `diagnose`. All tensors but `bad_entries` are float64.

    Attributes:
        outputs: S
        rank: R
        condition_lower: [...], lower bound on the condition number of Sigma; see `condition_bounds`.
        condition_upper: [...], upper bound on it.
        capacitance_condition: [...], the condition number of `I + P^T D^-1 P`.
        floor: [...], eps, or the smallest diagonal entry if eps is None.
        share_at_floor: [...], the share of diagonal entries up to 1.01 times the floor.
        largest_leverage: [...], the largest of `h_i = (P C^-1 P^T)_ii / D_i` over outputs, with C the capacitance
            matrix; 1 if the low-rank part explains an output completely.
        spectrum: [..., R], the eigenvalues of `P P^T`, in descending order.
        effective_rank: [...], exp of the entropy of the normalised spectrum.
        diag_quantiles: [..., 7], quantiles of D at 0, 1, 10, 50, 90, 99 and 100 %.
        bad_entries: int64 [...], the number of non-finite entries of P or D and of non-positive entries of D.

    Examples:
        >>> lrd.diagnose(torch.ones(3, 1), torch.ones(3)).effective_rank
        tensor(1., dtype=torch.float64)
    """

    outputs: int
    rank: int
    condition_lower: Tensor
    condition_upper: Tensor
    capacitance_condition: Tensor
    floor: Tensor
    share_at_floor: Tensor
    largest_leverage: Tensor
    spectrum: Tensor
    effective_rank: Tensor
    diag_quantiles: Tensor
    bad_entries: Tensor

    @property
    def verdict(self) -> str:
        """A text that describes the problem of the worst batch item and how to fix it."""
        return _verdict(self)

    def __str__(self) -> str:
        return _describe(self)


@torch.no_grad()
def diagnose(cov_factor: Tensor, cov_diag: Tensor, eps: float | None = None) -> Diagnosis:
    """Diagnoses the numerical health of a covariance, at less than the cost of a training step. Print the result.

    `cov_factor` P is [..., S, R] and `cov_diag` D is [..., S]; the result has a number for each batch item [...] and a
    verdict on the worst one. It looks at the condition of `Sigma = diag(D) + P P^T` and of `I + P^T D^-1 P`, at the
    spectrum of `P P^T` and at the distribution of D.

    Args:
        eps: the floor (lower bound) of the diagonal, as in `positive_diag` (default: the smallest diagonal entry).

    Raises:
        ValueError: if a shape is wrong, or if eps is negative or not finite.
        TypeError: for wrong types and dtypes.

    Examples:
        >>> health = lrd.diagnose(torch.ones(1000, 2), torch.full((1000,), 0.5), eps=0.01)
        >>> print(health.verdict)
        Healthy.
    """
    _validate.gaussian(cov_factor, cov_diag)
    dispatch.refuse_tangents("diagnose", cov_factor, cov_diag)
    if cov_diag.shape[-1] == 0:
        raise ValueError(f"cov_diag must have at least one output; got shape {tuple(cov_diag.shape)}")
    if eps is not None:
        _validate.non_negative("eps", eps)
    bad = (~cov_factor.isfinite()).sum((-2, -1)) + (~(cov_diag.isfinite() & (cov_diag > 0))).sum(-1)
    weighted = capacitance.gram(cov_factor, cov_diag)
    spectrum = _spectrum(cov_factor, None)
    lower, upper = weyl_bounds(spectrum, cov_diag.double(), cov_diag.double())
    diag = cov_diag.double()
    S = diag.shape[-1]
    floor = diag.amin(-1) if eps is None else torch.full_like(diag[..., 0], eps)
    shares = spectrum / spectrum.sum(-1, keepdim=True)
    explained = 1 - functional.precision_diag(cov_factor.double(), diag) * diag
    nan = torch.where(bad > 0, torch.nan, 0.0)
    ranks = [1 + round(q * (S - 1)) for q in QUANTILES]
    return Diagnosis(
        outputs=S,
        rank=cov_factor.shape[-1],
        condition_lower=lower + nan,
        condition_upper=upper + nan,
        capacitance_condition=_condition(weighted, cov_factor, cov_diag, None) + nan,
        floor=floor,
        share_at_floor=(diag <= AT_FLOOR * floor[..., None]).double().mean(-1),
        largest_leverage=explained.amax(-1).clamp(0, 1) + nan,
        spectrum=spectrum.flip(-1),
        effective_rank=torch.special.entr(shares).sum(-1).exp() if spectrum.shape[-1] else torch.zeros_like(floor),
        diag_quantiles=torch.stack([diag.kthvalue(k, -1).values for k in ranks], -1),
        bad_entries=bad,
    )


def sortable(cov_diag: Tensor, mask: Tensor | None, absent: float) -> Tensor:
    diag = cov_diag.double()
    return diag if mask is None else torch.where(mask, diag, absent)


def _spectrum(cov_factor: Tensor, mask: Tensor | None) -> Tensor:
    """Eigenvalues of P^T P [..., R] in ascending order; NaN if a number is not finite."""
    if cov_factor.shape[-1] < cov_factor.shape[-2]:
        values = capacitance.eigenvectors(capacitance.gram(cov_factor, None, mask))[0].clamp(min=0)
    else:  # few outputs: the small ones matter beside the diagonal
        factor = cov_factor if mask is None else torch.where(mask[..., None], cov_factor, 0)
        values = rotation.singular_basis(factor)[0].square()
    return values.flip(-1)


def weyl_bounds(spectrum: Tensor, ascending_last: Tensor, descending_last: Tensor) -> tuple[Tensor, Tensor]:
    """Weyl's bounds from the eigenvalues of P^T P [..., R] and the diagonal [..., S]. Masked entries are infinity in
    `ascending_last` and minus infinity in `descending_last`."""
    S, R = ascending_last.shape[-1], spectrum.shape[-1]
    if S == 0:
        shape = torch.broadcast_shapes(spectrum.shape[:-1], ascending_last.shape[:-1])
        return spectrum.new_full(shape, torch.nan), spectrum.new_full(shape, torch.nan)
    smallest, largest = ascending_last.amin(-1), descending_last.amax(-1)
    norm = spectrum[..., -1] if R else torch.zeros_like(smallest)
    if S > R:
        edge = ascending_last.kthvalue(R + 1, -1).values
    else:
        edge = (spectrum[..., R - S :] + ascending_last.sort(-1, descending=True).values).amin(-1)
    good = (smallest > 0) & (largest < torch.inf)
    lower = torch.where(good, (norm + smallest) / edge, torch.nan)
    return lower, torch.where(good, (norm + largest) / smallest, torch.nan)


def _condition(gram: Tensor, cov_factor: Tensor, cov_diag: Tensor, mask: Tensor | None) -> Tensor:
    if gram.shape[-1] == 0:  # no entry that could show a bad diagonal
        good = (cov_diag > 0) & cov_diag.isfinite()
        good = (good if mask is None else good | ~mask).all(-1)
        return torch.where(good, 1.0, torch.nan).to(gram.dtype).expand(gram.shape[:-2])
    good = gram.isfinite().all(-1).all(-1)
    condition = _condition_of(capacitance.cholesky(gram))
    beyond = good & ~(condition < CHOLESKY_CONDITION)
    if bool(beyond.any()):
        by_qr = _condition_of(capacitance.cholesky_by_qr(cov_factor, cov_diag, mask))
        condition = torch.where(beyond, by_qr, condition)
    return condition


def _condition_of(chol: Tensor) -> Tensor:
    """Condition number of L L^T, whose eigenvalues are at least 1."""
    good = chol.isfinite().all(-1).all(-1)
    eye = torch.eye(chol.shape[-1], dtype=chol.dtype, device=chol.device)
    values = torch.linalg.svdvals(torch.where(good[..., None, None], chol, eye))
    return torch.where(good, (values[..., 0] / values[..., -1].clamp(min=1)).square(), torch.nan)


def _extremes(P: Tensor, D: Tensor, tol: float, max_iter: int, method: str) -> tuple[float, ...]:
    """Smallest and largest eigenvalue, their residuals, and the iterations, for one batch item."""
    if not bool((D.isfinite() & (D > 0)).all() & P.isfinite().all()) or D.numel() == 0:
        return (math.nan, math.nan, math.nan, math.nan, 0)
    sigma = Covariance(P, D.double())
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(D.shape, dtype=torch.float64, generator=generator).to(D.device)
    iterate = lanczos if method == "lanczos" else power
    largest, largest_residual, products = iterate(sigma.times, start, lambda v, r: r / v, tol, max_iter)
    if method == "lanczos":
        low, high = sigma.smallest_within()
        if high - low <= tol * low:  # for example, if more than R outputs are at the floor
            return (low, largest, (high - low) / low, largest_residual, products)
        shift = low - max(0.1 * (high - low), 1e-4 * low)
        inverse, error = sigma.inverse(shift)
    else:
        shift, inverse, error = 0.0, sigma.inverse_by_root(), 0.0

    def relative(value: float, residual: float) -> float:
        # |1 / (lambda - shift) - value| <= residual, expressed in lambda = shift + 1 / value
        found = shift + 1 / value if value else 0.0
        return (residual + error) / (value * value * found) if found > 0 else math.inf

    value, smallest_residual, solves = iterate(inverse, start, relative, tol, max_iter)
    return (shift + 1 / value if value else math.inf, largest, smallest_residual, largest_residual, products + solves)


ADVICE = "raise eps, lower the rank, or lower the weight alpha of the likelihood in the loss"


def _verdict(d: Diagnosis) -> str:
    if d.condition_upper.numel() == 0:
        return "Empty: there are no covariances to diagnose."
    if int(d.bad_entries.sum()):
        return f"Invalid covariance: {int(d.bad_entries.sum())} entries are not finite, or not positive in D."
    condition, share = float(d.capacitance_condition.max()), float(d.share_at_floor.max())
    if condition >= CHOLESKY_CONDITION:
        words = f'Too ill-conditioned for a float64 Cholesky factorisation: use precision="qr", and {ADVICE}.'
    elif condition >= GRADIENT_CONDITION:
        words = f"Ill-conditioned: gradients begin to lose digits even in float64; {ADVICE}."
    elif max(condition, float(d.condition_lower.max())) >= FLOAT32_CONDITION:
        words = f"Safe with this package, but float32 arithmetic may fail elsewhere. To be safe there too: {ADVICE}."
    else:
        words = "Healthy."
    if share > 0.5:
        words += f" {share:.0%} of the diagonal is at its floor: the floor is active; the data may allow a lower eps."
    if d.rank >= 4 and float(d.effective_rank.min()) < 0.5 * d.rank:
        words += f" The effective rank is {float(d.effective_rank.min()):.1f} with {d.rank} columns: fewer may suffice."
    return words


def _describe(d: Diagnosis) -> str:
    def span(tensor: Tensor) -> str:
        if tensor.numel() == 0:
            return "-"
        low, high = float(tensor.min()), float(tensor.max())
        return f"{low:.3g}" if tensor.numel() == 1 or low == high else f"{low:.3g} to {high:.3g}"

    items = d.condition_upper.numel()
    quantiles = ", ".join(f"{q:.0%} {span(d.diag_quantiles[..., i])}" for i, q in enumerate(QUANTILES))
    leading = ", ".join(span(d.spectrum[..., i]) for i in range(min(d.rank, 4)))
    more = ", ..." if d.rank > 4 else ""
    lines = [
        f"{items} covariance{'s' * (items != 1)} of {d.outputs} outputs and rank {d.rank}",
        f"  condition of Sigma        from {span(d.condition_lower)} to {span(d.condition_upper)} (bounds)",
        f"  condition of capacitance  {span(d.capacitance_condition)}",
        f"  diagonal at its floor     {float(d.share_at_floor.double().mean()):.1%} (floor {span(d.floor)})"
        if items
        else "",
        f"  quantiles of D            {quantiles}",
        f"  spectrum of P P^T         {leading}{more} (effective rank {span(d.effective_rank)})",
        f"  largest leverage          {span(d.largest_leverage)}",
        f"  bad entries               {int(d.bad_entries.sum())}",
        f"  {d.verdict}",
    ]
    return "\n".join(line for line in lines if line)
