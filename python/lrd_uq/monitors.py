"""What can go wrong unseen, in the log: gradients that are not finite, covariances that run away."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

import lrd_kernels as lrd
from lrd_uq.extra import lightning as L
from lrd_uq.heads import DiagonalHead
from lrd_uq.module import JointUncertainty, Step

AT_FLOOR = 1.01  # a variance counts as at the floor up to this multiple of it


class GradientFilter(L.pytorch.Callback):
    """Drops a step whose gradients are not all finite, and counts it in the log as `filtered_steps`."""

    def __init__(self) -> None:
        self.filtered = 0

    def on_before_optimizer_step(
        self, trainer: L.pytorch.Trainer, pl_module: L.pytorch.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        self.filtered += lrd.filter_gradients(pl_module.parameters(), mode="skip") > 0
        pl_module.log("filtered_steps", float(self.filtered))

    def state_dict(self) -> dict[str, Any]:
        return {"filtered": self.filtered}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.filtered = state_dict["filtered"]


class CovarianceMonitor(L.pytorch.Callback):
    """Logs the health of the predicted covariances, and warns in plain words when they run away.

    A covariance that is right has a trace near the mean squared length of the residuals, so that the ratio of the two
    tells an exploding factor, which the likelihood hardly shows.

    Args:
        every: steps between two looks.
        most_trace: of the low-rank part, as a multiple of the squared residuals; beyond it, a warning.
        most_condition: of the capacitance; beyond it, a warning.
    """

    def __init__(self, every: int = 10, most_trace: float = 4.0, most_condition: float = 1e6) -> None:
        self.every, self.most_trace, self.most_condition = every, most_trace, most_condition
        self._warned: set[str] = set()

    def on_train_batch_end(
        self, trainer: L.pytorch.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, JointUncertainty)
        if pl_module.latest is None or not isinstance(pl_module.latest.head, DiagonalHead):
            return
        if trainer.global_step % self.every:
            return
        found = health(pl_module.latest)
        pl_module.log_dict({name: value.float() for name, value in found.items()})
        for kind, message in self.complaints(found):
            if kind not in self._warned:
                self._warned.add(kind)
                warnings.warn(f"step {trainer.global_step}: {message}", stacklevel=1)  # of this module, not lightning's

    def complaints(self, found: dict[str, Tensor]) -> list[tuple[str, str]]:
        """Kind and plain words of each thing that runs away."""
        messages = []
        ratio = float(found["trace_ratio"])
        if not ratio <= self.most_trace:  # so that NaN is bad
            messages.append(
                (
                    "trace",
                    f"the low-rank part runs away: its trace is {float(found['low_rank_trace']):.3g}, {ratio:.1f} times"
                    " the squared residuals that it should explain. Raise factor_penalty, or begin with a phase of"
                    " rank 0",
                )
            )
        condition = float(found["capacitance_condition"])
        if not condition <= self.most_condition:
            messages.append(
                (
                    "condition",
                    f"the capacitance has a condition number of {condition:.2g}: raise eps, lower the rank, or lower"
                    " alpha",
                )
            )
        return messages


@torch.no_grad()
def health(step: Step) -> dict[str, Tensor]:
    """Scalars of a step: the worst of the batch for condition numbers and singular values, means for the others."""
    assert isinstance(step.head, DiagonalHead)
    gaussian = step.head.gaussian(step.output, step.mask)
    distribution = gaussian.distribution()
    factor, diag = distribution.cov_factor, distribution.cov_diag
    exists = torch.ones_like(diag, dtype=torch.bool) if step.mask is None else step.mask
    trace = factor.square().sum((-2, -1))  # [B]; outputs that do not exist have none
    residual = torch.where(exists, step.target - gaussian.mean, 0).square().sum(-1)
    at_floor = (diag <= AT_FLOOR * step.head.eps) & exists
    found = {
        "share_at_floor": at_floor.sum() / exists.sum().clamp(min=1),
        "low_rank_trace": trace.mean(),
        "trace_ratio": trace.mean() / residual.mean(),
        "condition_upper": lrd.condition_bounds(factor, diag, mask=step.mask)[1].max(),
        "capacitance_condition": lrd.capacitance_condition(factor, diag, mask=step.mask).max(),
        "largest_singular_value": torch.zeros(()),
    }
    if factor.shape[-1]:
        found["largest_singular_value"] = lrd.truncate(factor, diag, 1, fold=False)[2].max()
    return found
