"""Thousands of random and adversarial covariances: each must give the right answer or the right type of error.

They are small, in float32, and belong to the families below. The log-density and all gradients are compared with
120-digit arithmetic. The log-density must be within 1e-6, relative or absolute. Each gradient must be within 1e-4 of
its largest entry or, if that is more, within 1e-14 times the largest eigenvalue of the capacitance matrix. Where this
allows any value, gradients must be finite. What overflows float32 must be infinite.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence

import mpmath
import numpy as np
import torch
from torch import Tensor

import lrd_kernels as lrd
from benchmarks import commands, machine
from lrd_kernels.testing import Inputs, value_and_grads

# Right answers by the largest eigenvalue of the capacitance matrix, right errors, and wrong answers.
COLUMNS = ("up to 1e10", "up to 1e14", "beyond", "right error", "wrong")
GRADIENTS = ("value", "loc", "cov_factor", "cov_diag")
Change = Callable[[Inputs, torch.Generator], None]


def uniform(generator: torch.Generator, low: float, high: float) -> float:
    return low + (high - low) * float(torch.rand((), generator=generator))


def index(generator: torch.Generator, size: int) -> int:
    return int(torch.randint(size, (), generator=generator))


# Families: each function modifies random inputs in place. The docstrings become cells of the report.


def plain(x: Inputs, g: torch.Generator) -> None:
    """scales of P and D over six orders of magnitude"""
    x.cov_factor.mul_(10 ** uniform(g, -3, 3))
    x.cov_diag.mul_(10 ** uniform(g, -3, 3))


def duplicate_columns(x: Inputs, g: torch.Generator) -> None:
    """two columns the same, or nearly"""
    x.cov_factor.mul_(10 ** uniform(g, 0, 6))
    x.cov_factor[:, 0] = x.cov_factor[:, -1] * (1 + (0.0 if index(g, 2) else 10 ** uniform(g, -7, -2)))


def all_columns_equal(x: Inputs, g: torch.Generator) -> None:
    """a factor of rank one"""
    x.cov_factor[:] = x.cov_factor[:, :1].clone() * 10 ** uniform(g, -2, 8)


def zero_columns(x: Inputs, g: torch.Generator) -> None:
    """some columns, or all, zero"""
    x.cov_factor[:, index(g, x.cov_factor.shape[1]) :] = 0
    if index(g, 4) == 0:
        x.cov_factor.zero_()


def huge(x: Inputs, g: torch.Generator) -> None:
    """everything times up to 1e12"""
    scale = 10 ** uniform(g, 3, 12)
    x.cov_factor.mul_(scale)
    x.cov_diag.mul_(scale * scale)
    x.value.mul_(scale)
    x.loc.mul_(scale)


def tiny(x: Inputs, g: torch.Generator) -> None:
    """everything times down to 1e-12"""
    scale = 10 ** uniform(g, -12, -3)
    x.cov_factor.mul_(scale)
    x.cov_diag.mul_(scale * scale)
    x.value.mul_(scale)
    x.loc.mul_(scale)


def small_floor(x: Inputs, g: torch.Generator) -> None:
    """the whole diagonal down to 1e-14"""
    x.cov_diag.mul_(10 ** uniform(g, -14, -4))


def dead_pixel(x: Inputs, g: torch.Generator) -> None:
    """one output whose variance is next to nothing, its factor row zero or not"""
    at = index(g, len(x.cov_diag))
    x.cov_diag[at] = 10 ** uniform(g, -22, -6)
    if index(g, 2):
        x.cov_factor[at] = 0
        x.value[at] = x.loc[at]


def constant_regions(x: Inputs, g: torch.Generator) -> None:
    """outputs that share one row of the factor, and one diagonal entry"""
    cut = 1 + index(g, len(x.cov_diag))
    x.cov_factor[:cut] = x.cov_factor[0].clone()
    x.cov_diag[:cut] = x.cov_diag[0] * 10 ** uniform(g, -8, 0)


def denormals(x: Inputs, g: torch.Generator) -> None:
    """entries below the normal range of float32"""
    x.cov_factor[:, 0] *= 1e-42
    x.cov_factor[index(g, len(x.cov_diag))] *= 1e-40
    if index(g, 2):
        x.loc.mul_(1e-41)


def mixed_scales(x: Inputs, g: torch.Generator) -> None:
    """every row and every column at a scale of its own"""
    S, R = x.cov_factor.shape
    x.cov_factor.mul_(10 ** (4 * torch.rand(S, 1, generator=g) - 2)).mul_(10 ** (6 * torch.rand(R, generator=g) - 3))
    x.cov_diag.mul_(10 ** (6 * torch.rand(S, generator=g) - 5))


def far_value(x: Inputs, g: torch.Generator) -> None:
    """a value up to 1e9 standard deviations away, in a direction the factor explains or in any"""
    away = 10 ** uniform(g, 2, 9)
    x.value.copy_(x.cov_factor[:, 0] * away if index(g, 2) else torch.randn(len(x.value), generator=g) * away)


FAMILIES: tuple[Change, ...] = (
    *(plain, duplicate_columns, all_columns_equal, zero_columns, huge, tiny, small_floor, dead_pixel),
    *(constant_regions, denormals, mixed_scales, far_value),
)


# Invalid inputs: each function returns the error that must be raised.


def break_diag(x: Inputs, g: torch.Generator) -> type[Exception]:
    """a diagonal entry zero, negative or not finite"""
    x.cov_diag[index(g, len(x.cov_diag))] = (0.0, -1.0, -1e-38, torch.nan, torch.inf, -torch.inf)[index(g, 6)]
    return lrd.NotPositiveDefiniteError


def break_factor(x: Inputs, g: torch.Generator) -> type[Exception]:
    """an entry of the factor not finite"""
    S, R = x.cov_factor.shape
    x.cov_factor[index(g, S), index(g, R)] = (torch.nan, torch.inf, -torch.inf)[index(g, 3)]
    return lrd.NotPositiveDefiniteError


def break_value(x: Inputs, g: torch.Generator) -> type[Exception]:
    """an entry of the value or the mean not finite"""
    (x.value, x.loc)[index(g, 2)][index(g, len(x.value))] = (torch.nan, torch.inf)[index(g, 2)]
    return ValueError


BREAKS = (break_diag, break_factor, break_value)


def random_inputs(g: torch.Generator) -> Inputs:
    """Up to 32 outputs and 8 columns, in both layouts; about one in eight has at least as many columns as outputs."""
    S, R = 1 + index(g, 32), 1 + index(g, 8)
    if index(g, 8) == 0:
        S = 1 + index(g, R)
    factor = torch.randn(S, R, generator=g)
    if index(g, 2):
        factor = factor.mT.contiguous().mT
    diag = 0.05 + torch.rand(S, generator=g)
    return Inputs(torch.randn(S, generator=g), torch.randn(S, generator=g), factor, diag)


def exact(x: Inputs) -> list[np.ndarray]:
    """Log-density and gradients in mpmath's arithmetic."""
    y, mu, P, D = (np.vectorize(mpmath.mpf, otypes=[object])(t.double().numpy()) for t in x)
    S, R = P.shape
    r, w = y - mu, 1 / D
    C = mpmath.matrix((np.eye(R, dtype=int) + P.T @ (w[:, None] * P)).tolist())
    L = mpmath.cholesky(C)
    inverse = np.array((L**-1).tolist(), dtype=object).reshape(R, R)
    z = inverse.T @ (inverse @ (P.T @ (w * r)))
    a = w * (r - P @ z)
    v = P @ inverse.T  # L^-1 p of every row
    logdet = sum(2 * mpmath.log(L[i, i]) for i in range(R)) + sum(mpmath.log(d) for d in D)
    log_p = -(r @ a + logdet + S * mpmath.log(2 * mpmath.pi)) / 2
    dP = a[:, None] * z[None] - w[:, None] * (v @ inverse)
    dD = (a * a - w * (1 - (v * v).sum(1) * w)) / 2
    return [np.array(log_p, dtype=object), -a, a, dP, dD]


def wrong(actual: Sequence[Tensor], truth: Sequence[np.ndarray], size: float) -> str | None:
    """The first result outside its bounds, if any. `size` is the largest eigenvalue of the capacitance matrix."""
    result, wanted = float(actual[0]), truth[0].item()
    if not abs(result - wanted) <= 1e-6 * max(abs(wanted), 1):
        return f"log p {result:.9g} instead of {float(wanted):.9g}"
    budget = max(1e-4, 1e-14 * size)
    for name, found, right in zip(GRADIENTS, actual[1:], truth[1:], strict=True):
        right = right.astype(float)
        error = np.abs(found.double().numpy() - right)
        largest = max(np.abs(right).max(), torch.finfo(torch.float32).tiny / 1e-4)
        over = np.abs(right) > torch.finfo(torch.float32).max * (1 - budget)
        fine = (error <= budget * largest) | (over & np.isinf(found.numpy()))
        if budget >= 1:
            fine = np.isfinite(found.numpy()) | over
        if not fine.all():
            return f"gradient for {name} off by {np.where(fine, 0, error).max() / largest:.2g} of its largest entry"
    return None


def attempt(x: Inputs) -> tuple[str, str | None]:
    """The range of the capacitance matrix's largest eigenvalue, and what is wrong with the answer, if anything."""
    scaled = x.cov_factor.double() / x.cov_diag.double().sqrt()[:, None]
    size = 1 + float(torch.linalg.matrix_norm(scaled, 2)) ** 2
    band = "up to 1e10" if size <= 1e10 else "up to 1e14" if size <= 1e14 else "beyond"
    try:
        actual = value_and_grads(lrd.log_prob, x)
    except Exception as error:
        return band, f"{type(error).__name__}: {error}"
    problem = wrong(actual, exact(x), size)
    return band, problem and f"{problem} (capacitance up to {size:.1e})"


def refused(x: Inputs, wanted: type[Exception]) -> str | None:
    """What happened instead of the expected error, or of NaN with on_failure="nan"; None if all is right."""
    try:
        got: object = lrd.log_prob(*x)
    except wanted:
        quiet = value_and_grads(lambda *a: lrd.log_prob(*a, on_failure="nan"), x)
        clean = bool(quiet[0].isnan()) and all(not t.any() for t in quiet[1:])
        return None if clean else 'on_failure="nan" gave no NaN, or a gradient'
    except Exception as error:
        got = f"{type(error).__name__}: {error}"
    return f"{got} instead of {wanted.__name__}"


def run(count: int, seed: int) -> tuple[dict[str, Counter], list[str]]:
    """Counts of answers for each family, and a description of every wrong one."""
    mpmath.mp.dps = 120
    generator = torch.Generator().manual_seed(seed)
    names = [f.__name__ for f in (*FAMILIES, *BREAKS)]
    counts: dict[str, Counter] = {name: Counter() for name in names}
    failures = []
    start = time.monotonic()
    for done in range(count):
        change = (*FAMILIES, *BREAKS)[done % len(names)]
        x = random_inputs(generator)
        expected = change(x, generator)
        if expected is None:
            column, problem = attempt(x)
        else:
            column, problem = "right error", refused(x, expected)
        counts[change.__name__][column] += problem is None
        if problem is not None:
            counts[change.__name__]["wrong"] += 1
            S, R = x.cov_factor.shape
            failures.append(f"{change.__name__}, number {done}, S = {S}, R = {R}: {problem}")
        if (done + 1) % 500 == 0:
            left = (time.monotonic() - start) / (done + 1) * (count - done - 1)
            print(
                f"{done + 1} of {count}, {len(failures)} wrong (about {left:.0f} s left)", file=sys.stderr, flush=True
            )
    return counts, failures


def report(counts: dict[str, Counter], failures: Sequence[str], seed: int) -> str:
    total = sum(sum(c.values()) for c in counts.values())
    wanted = {f.__name__: (f.__doc__ or "").strip() for f in (*FAMILIES, *BREAKS)}
    lines = ["# Stress", "", f"`make stress`: {total} covariances, seed {seed}, {len(failures)} answered wrong.", ""]
    lines += ["Right answers are counted by the largest eigenvalue of the capacitance.", ""]
    lines += ["```", machine.summary(machine.facts()), "```", ""]
    lines += ["| family | | " + " | ".join(COLUMNS) + " |", "|---|---|" + "---|" * len(COLUMNS)]
    for name, c in counts.items():
        cells = " | ".join(str(c[column]) for column in COLUMNS)
        lines.append(f"| {name.replace('_', ' ')} | {wanted.get(name, '')} | {cells} |")
    return "\n".join([*lines, *(["", *failures] if failures else [])]) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = commands.parser("benchmarks.stress", __doc__, "stress.md")
    parser.add_argument("--count", type=int, default=6000, help="number of covariances")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random covariances")
    options = parser.parse_args(argv)
    text = report(*run(options.count, options.seed), options.seed)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(text)
    print(text)
    return 0 if "0 answered wrong" in text else 1


if __name__ == "__main__":
    sys.exit(main())
