"""The budget of every function: the largest error that counts as right, and relative to what.

docs/safety.md holds the table.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Budget(NamedTuple):
    """Largest errors by the dtype of a result. Half types may add `roundings` of their own."""

    float32: float
    float64: float
    relative_to: str
    roundings: int = 1

    def of(self, dtype: torch.dtype) -> float:
        if dtype == torch.float64:
            return self.float64
        if dtype == torch.float32:
            return self.float32
        return self.float32 + self.roundings * torch.finfo(dtype).eps


ITSELF = "itself, or 1 if it is smaller"
ENTRY = "the largest entry of the batch item"
TERMS = "the sum of absolute terms of the entry"
DEVIATIONS = "the two standard deviations"

BUDGETS = {
    "log_prob": Budget(1e-6, 1e-7, ITSELF),
    "mahalanobis": Budget(1e-6, 1e-7, ITSELF),
    "logdet": Budget(1e-6, 1e-7, ITSELF),
    "entropy": Budget(1e-6, 1e-7, ITSELF),
    "nll_loss": Budget(1e-6, 1e-7, ITSELF),
    "gradients of these five": Budget(1e-5, 5e-6, "the largest entry of the gradient in the batch item"),
    "positive_diag": Budget(5e-7, 1e-15, "itself; the gradient too"),
    "capacitance_cholesky": Budget(1e-6, 1e-12, "`(L L^T)_ij` to `sqrt(C_ii C_jj)`"),
    "solve": Budget(1e-5, 1e-5, ENTRY),
    "solve, gradients": Budget(1e-4, 1e-4, "the largest entry of the gradient in the batch item"),
    "matvec": Budget(5e-7, 1e-15, TERMS),
    "rsample": Budget(5e-7, 1e-15, TERMS),
    "whiten": Budget(1e-5, 1e-5, "`|whiten(x)|^2` to the Mahalanobis term, or 1"),
    "unwhiten": Budget(1e-5, 1e-5, "covariance of the map, to " + DEVIATIONS),
    "whiten, unwhiten in turn": Budget(1e-5, 1e-5, "the largest value, plus noise times standard deviation"),
    "precision_matrix": Budget(1e-5, 1e-5, ENTRY),
    "scale_tril": Budget(1e-6, 1e-12, "`(L L^T)_ij` to " + DEVIATIONS),
    "variance": Budget(5e-7, 1e-15, "itself"),
    "condition": Budget(1e-5, 1e-6, "the largest entry of the mean or covariance", 2),
    "marginal": Budget(0.0, 0.0, "exact", 0),
    "aggregate": Budget(5e-7, 1e-13, "the sum of absolute terms of the mean; " + DEVIATIONS),
    "correlation": Budget(5e-7, 1e-13, "1"),
    "quantile": Budget(1e-6, 1e-13, "the mean, plus the quantile in standard deviations"),
    "to": Budget(0.0, 0.0, "exact", 0),
    "from_samples": Budget(1e-6, 1e-14, "the largest sample; " + DEVIATIONS + ", plus rounding of the mean", 3),
    "truncate: singular values": Budget(1e-6, 1e-6, "each; 1e-6 of the largest if it is smaller"),
    "truncate: lengths of columns": Budget(1e-6, 1e-6, "each; 1e-6 of the largest if it is smaller"),
    "truncate: orthogonality": Budget(1e-6, 1e-9, "the two lengths of each pair of columns", 4),
    "truncate: directions": Budget(1e-5, 1e-7, "`|P P^T f - s^2 f|` to `s_1^2 |f|`", 4),
    "truncate: variances": Budget(5e-7, 1e-14, "itself", 3),
    "truncate: diagonal without fold": Budget(0.0, 0.0, "exact", 0),
    "modes": Budget(1e-6, 1e-9, "orthonormality", 4),
    "joint: mean": Budget(5e-7, 1e-14, TERMS),
    "joint: covariance": Budget(1e-6, 1e-14, DEVIATIONS + " and rounding of the means in float64", 3),
    "joint: variances": Budget(1e-6, 1e-14, "itself and rounding of the means in float64", 3),
    "joint: kept part": Budget(1e-5, 1e-6, "variance of the best columns of this number", 3),
    "mixture_log_prob": Budget(1e-6, 1e-6, ITSELF),
    "kl_divergence": Budget(1e-5, 1e-5, "itself plus a thousandth of the sum of absolute terms"),
    "condition_bounds": Budget(1e-6, 1e-6, "itself"),
    "capacitance_condition": Budget(1e-2, 1e-2, "itself"),
    "extreme_eigenvalues": Budget(1.0, 1.0, "the reported residual plus 1e-6"),
    "diagnose": Budget(1e-6, 1e-6, "itself, or 1 if it is smaller; the spectrum to its largest"),
}


def allowed(budget: str, dtype: torch.dtype) -> float:
    """The largest error of a result; 0 where there is nothing to be measured, such as a wrong shape."""
    return BUDGETS[budget].of(dtype) if budget else 0.0


def table() -> str:
    """As Markdown."""
    lines = ["| result | float32 | float64 | relative to |", "|---|---|---|---|"]
    for name, budget in BUDGETS.items():
        code, _, rest = name.partition(":")
        shown = f"`{code}`:{rest}" if rest else name if " " in name else f"`{name}`"
        lines.append(f"| {shown} | {budget.float32:g} | {budget.float64:g} | {budget.relative_to} |")
    return "\n".join(lines) + "\n"
