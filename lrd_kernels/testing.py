"""Sample inputs, error budgets and assertions that tests, benchmarks and the self-test share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
LAYOUTS = ("row", "rank", "strided")


class Inputs(NamedTuple):
    """Arguments of `log_prob`, in its order."""

    value: Tensor
    loc: Tensor
    cov_factor: Tensor
    cov_diag: Tensor


def make_inputs(
    batch: Sequence[int] = (),
    S: int = 37,
    R: int = 5,
    *,
    dtype: torch.dtype = torch.float64,
    layout: str = "row",
    value_batch: Sequence[int] | None = None,
    smallest_diag: float = 0.2,
    seed: int = 0,
    requires_grad: bool = False,
) -> Inputs:
    """A random Gaussian and a value typical of it. Leaves, whatever the layout."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    loc = normal(*batch, S)
    factor = normal(*batch, S, R) / max(R, 1) ** 0.5
    diag = smallest_diag + torch.rand(*batch, S, generator=generator, dtype=torch.float64)
    values = (*batch,) if value_batch is None else (*value_batch,)
    value = normal(*values, S) + normal(*values, 1) * (factor.sum(-1) if value_batch is None else 1.0)
    tensors = (value.to(dtype), loc.to(dtype), in_layout(factor.to(dtype), layout), diag.to(dtype))
    return Inputs(*(t.requires_grad_(requires_grad) for t in tensors))


def in_layout(factor: Tensor, layout: str) -> Tensor:
    """The same numbers row-major, rank-major, or with no contiguous dimension at all."""
    if layout == "row":
        return factor.contiguous()
    if layout == "rank":
        return factor.mT.contiguous().mT
    if layout == "strided":
        wide = torch.full((*factor.shape[:-1], 2 * factor.shape[-1] + 1), torch.nan, dtype=factor.dtype)
        wide[..., 1::2] = factor
        return wide[..., 1::2]
    raise ValueError(f"layout must be one of {LAYOUTS}; got {layout!r}")


def value_and_grads(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], weights: Tensor | None = None
) -> tuple[Tensor, ...]:
    """The result and the gradient of its (weighted) sum for every input. The inputs are left as they are."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    result = function(*leaves)
    total = result.sum() if weights is None else (result * weights.to(result)).sum()
    return (result.detach(), *torch.autograd.grad(total, leaves))


def hard_inputs(family: str, hardness: float, S: int, R: int, seed: int = 0) -> Inputs:
    """float32 inputs that are typical of a Gaussian whose capacitance is ill-conditioned in one of three ways.

    Args:
        family: "condition": columns mixed so that the capacitance has condition number about `hardness`;
            "diagonal": random columns over a diagonal of about 1 / `hardness`;
            "pixels": random columns, and five outputs whose diagonal is 1 / `hardness`.
    """
    rng = np.random.default_rng(seed)
    factor = rng.standard_normal((S, R))
    diag = 0.5 + rng.random(S)
    if family == "condition":
        left, _ = np.linalg.qr(rng.standard_normal((max(S, R), R)))
        right, _ = np.linalg.qr(rng.standard_normal((R, R)))
        factor = (left[:S] * np.logspace(0, np.log10(hardness) / 2, R)) @ right
    elif family == "diagonal":
        diag /= hardness
    elif family == "pixels":
        diag[rng.choice(S, 5, replace=False)] = 1 / hardness
    else:
        raise ValueError(f"family must be 'condition', 'diagonal' or 'pixels'; got {family!r}")
    loc = rng.standard_normal(S)
    value = loc + factor @ rng.standard_normal(R) + np.sqrt(diag) * rng.standard_normal(S)
    return Inputs(*(torch.from_numpy(t.astype(np.float32)) for t in (value, loc, factor, diag)))


def extended_log_prob(inputs: Inputs) -> tuple[np.ndarray, ...]:
    """Log-density of one Gaussian and its gradients for all inputs, in NumPy's extended precision."""
    y, mu, P, D = (t.detach().double().numpy().astype(np.longdouble) for t in inputs)
    R = P.shape[1]
    w, r = 1 / D, y - mu
    C = np.eye(R, dtype=np.longdouble) + P.T @ (P * w[:, None])
    inverse = np.eye(R, dtype=np.longdouble)  # becomes L^-1 while C becomes L
    for i in range(R):
        C[i, i] = np.sqrt(C[i, i] - C[i, :i] @ C[i, :i])
        C[i + 1 :, i] = (C[i + 1 :, i] - C[i + 1 :, :i] @ C[i, :i]) / C[i, i]
        inverse[i] = (inverse[i] - C[i, :i] @ inverse[:i]) / C[i, i]
    z = inverse.T @ (inverse @ (P.T @ (w * r)))
    v = P @ inverse.T
    a = w * (r - P @ z)
    maha = a @ r
    logdet = 2 * np.log(np.diag(C)).sum() + np.log(D).sum()
    result = -(maha + logdet + len(D) * np.log(2 * np.longdouble(np.pi))) / 2
    grad_factor = a[:, None] * z - w[:, None] * (v @ inverse)
    grad_diag = (a * a - w * (1 - w * (v * v).sum(1))) / 2
    return result, -a, a, grad_factor, grad_diag


def relative_error(actual: Tensor, truth: Tensor) -> float:
    """Largest deviation over the largest entry of the truth."""
    if truth.numel() == 0:
        return 0.0
    scale = float(truth.double().abs().max()) or 1.0
    return float((actual.double() - truth.double()).abs().max()) / scale


def assert_within_budget(actual: Tensor, truth: Tensor, plain: Tensor, what: str = "result") -> None:
    """A kernel may err at most twice what plain torch in float32 errs, plus the rounding of its result.

    For float64 inputs plain torch's error is that of float32 scaled by the two epsilons, and the budget is doubled,
    because the truth is then rounded as much as the result.

    Args:
        actual: what the kernel gave.
        truth: the reference in float64, from the same (already rounded) inputs.
        plain: the reference formula computed in float32 throughout.
    """
    assert actual.shape == truth.shape, f"{what}: shape {tuple(actual.shape)}, not {tuple(truth.shape)}"
    eps = torch.finfo(actual.dtype).eps
    budget = 2 * relative_error(plain, truth) + 4 * eps
    if actual.dtype == torch.float64:
        budget = 4 * relative_error(plain, truth) * eps / torch.finfo(torch.float32).eps + 16 * eps
    error = relative_error(actual, truth)
    if error <= budget and (truth.numel() == 0 or bool(actual.isfinite().all())):
        return
    worst = int((actual.double() - truth.double()).abs().nan_to_num(torch.inf).argmax())
    where = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), actual.shape))
    a, t = actual.double().flatten(), truth.double().flatten()
    cosine = float(torch.nn.functional.cosine_similarity(a, t, dim=0))
    raise AssertionError(
        f"{what}: relative error {error:.3g} exceeds its budget {budget:.3g}; worst at {where}:"
        f" {float(a[worst]):.9g}, not {float(t[worst]):.9g}; relative L2 {float((a - t).norm() / t.norm()):.3g},"
        f" cosine {cosine:.9f}, mean difference {float((a - t).mean()):.3g}"
    )
