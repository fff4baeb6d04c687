"""Callbacks that log what could otherwise go unnoticed: non-finite gradients and degenerating covariances."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

import lrd_kernels as lrd
from lrd_uq import parallel
from lrd_uq.checks import check_counts, check_positive
from lrd_uq.extra import lightning as L
from lrd_uq.heads import DiagonalHead
from lrd_uq.module import JointUncertainty, Step
from lrd_uq.nets import SplitNet
from lrd_uq.nppc import NppcObjective
from lrd_uq.phases import Phases

WORST = ("condition_upper", "capacitance_condition", "largest_singular_value")  # statistics that are maxima
WINDOW = 20  # steps over which skipped ones are counted
FALL = 100  # a validation score this many times its own size below the best one is a failure
AT_FLOOR = 1.01  # variances up to this multiple of eps count as being at the floor


class GradientFilter(L.pytorch.Callback):
    """Skips steps whose gradients are not all finite, and logs their number as `filtered_steps`.

    Warns once if more than half of the last 20 steps were skipped, or of all steps of a shorter training.

    With `precision: 16-mixed` the first steps are among them: the loss is scaled up until gradients overflow, and
    `loss_scale` is logged, too.

    Examples:
        >>> from lrd_uq.monitors import GradientFilter
        >>> GradientFilter().filtered  # for a Trainer's callbacks
        0
    """

    def __init__(self) -> None:
        self.filtered = 0
        self._recent: list[bool] = []  # whether each of the last steps was skipped
        self._warned = False

    def on_before_optimizer_step(
        self, trainer: L.pytorch.Trainer, pl_module: L.pytorch.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        skipped = bool(parallel.skip_bad_gradients(pl_module.parameters(), trainer.strategy))
        self.filtered += skipped
        self._recent = [*self._recent, skipped][-WINDOW:]
        pl_module.log("filtered_steps", float(self.filtered))
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            pl_module.log("loss_scale", scaler.get_scale())
        if len(self._recent) == WINDOW:
            self._warn(trainer, pl_module)

    def on_train_end(self, trainer: L.pytorch.Trainer, pl_module: L.pytorch.LightningModule) -> None:
        self._warn(trainer, pl_module)

    def _warn(self, trainer: L.pytorch.Trainer, module: Any) -> None:
        count = sum(self._recent)
        if self._warned or 2 * count <= len(self._recent):
            return
        self._warned = True
        warnings.warn(
            f"step {trainer.global_step}: {count} of the last {len(self._recent)} steps were skipped, because their"
            f" gradients were not finite: the network hardly trains. Check the data for NaN and infinity outside of the"
            f" masks, lower learning_rate below {module.learning_rate:g}, or raise eps",
            stacklevel=1,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"filtered": self.filtered, "recent": self._recent}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.filtered, self._recent = state_dict["filtered"], state_dict.get("recent", [])


class ScoreMonitor(L.pytorch.Callback):
    """Warns once when the log-likelihood of the validation items falls by orders of magnitude: 100 times its own size,
    and 100 nats per output, below the best one so far, or below that of the first training batch.

    Examples:
        >>> from lrd_uq.monitors import ScoreMonitor
        >>> ScoreMonitor().best is None  # for a Trainer's callbacks
        True
    """

    def __init__(self) -> None:
        self.best: float | None = None  # nats per output
        self._outputs = 1.0  # of an item
        self._warned = False

    def on_train_batch_end(
        self, trainer: L.pytorch.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = trainer.callback_metrics.get("low_rank")  # a negative log-likelihood per output
        if self.best is None and pl_module.latest and loss is not None:
            step = pl_module.latest[0]
            self._outputs = step.target[0].numel() if step.mask is None else float(step.mask.sum() / len(step.mask))
            self.best = -float(loss)

    def on_validation_end(self, trainer: L.pytorch.Trainer, pl_module: Any) -> None:
        score = trainer.callback_metrics.get("val_log_prob")
        if trainer.sanity_checking or self.best is None or score is None:
            return
        now = float(score) / self._outputs
        if not self._warned and now < self.best - FALL * max(abs(self.best), 1.0):
            self._warned = True
            warnings.warn(
                f"step {trainer.global_step}: the log-likelihood of the validation items is {now:.3g} nats per output,"
                f" after {self.best:.3g} before: training diverges. Lower learning_rate below"
                f" {pl_module.learning_rate:g}, set gradient_clip_val to 1, or raise eps",
                stacklevel=1,
            )
        self.best = max(self.best, now)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "outputs": self._outputs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best, self._outputs = state_dict["best"], state_dict["outputs"]


class CovarianceMonitor(L.pytorch.Callback):
    """Logs statistics of the predicted covariances, and warns once when they degenerate.

    The trace of a correct covariance is close to the mean squared norm of the residuals. The ratio of the two shows an
    exploding factor, which hardly changes the likelihood.

    Args:
        every: steps between two checks.
        most_trace: warn if the trace of the low-rank part exceeds this multiple of the squared residuals.
        most_condition: warn if the condition number of the capacitance matrix exceeds this.

    Examples:
        >>> from lrd_uq.monitors import CovarianceMonitor
        >>> CovarianceMonitor(every=10).every  # for a Trainer's callbacks
        10
    """

    def __init__(self, every: int = 10, most_trace: float = 4.0, most_condition: float = 1e6) -> None:
        check_counts(every=every)
        check_positive(most_trace=most_trace, most_condition=most_condition)
        self.every, self.most_trace, self.most_condition = every, most_trace, most_condition
        self._warned: set[str] = set()

    def on_train_batch_end(
        self, trainer: L.pytorch.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, JointUncertainty)
        if not pl_module.latest or not isinstance(pl_module.latest[0].head, DiagonalHead):
            return
        if trainer.global_step % self.every:
            return
        found = health_of(pl_module.latest, trainer.strategy)
        pl_module.log_dict(found)
        if not trainer.is_global_zero:
            return
        for kind, message in self.problems(found, remedy(trainer, pl_module)):
            if kind not in self._warned:
                self._warned.add(kind)
                warnings.warn(f"step {trainer.global_step}: {message}", stacklevel=1)  # attributed to this module

    def problems(self, found: dict[str, Tensor], remedy: str) -> list[tuple[str, str]]:
        """Kind and message of each limit that is exceeded; `remedy` is for a factor that runs away."""
        messages = []
        ratio = float(found["trace_ratio"])
        if not ratio <= self.most_trace:  # also true for NaN
            messages.append(
                (
                    "trace",
                    f"the low-rank part runs away: its trace is {float(found['low_rank_trace']):.3g}, {ratio:.1f} times"
                    f" the squared residuals that it should explain. {remedy}",
                )
            )
        condition = float(found["capacitance_condition"])
        if not condition <= self.most_condition:
            messages.append(
                (
                    "condition",
                    f"the capacitance matrix has a condition number of {condition:.2g}: raise eps, lower the rank, or"
                    " lower alpha",
                )
            )
        return messages


def remedy(trainer: L.pytorch.Trainer, module: JointUncertainty) -> str:
    """What to change so that the low-rank part does not run away, in the settings of this training."""
    objective, member = module.objective, module.method.members(module.net)[0]
    changes = []
    if isinstance(objective, NppcObjective):
        if not isinstance(member, SplitNet):
            changes.append("predict the mean by a network of its own (lrd_uq.nets.SplitNet)")
    elif objective.factor_penalty > 0:
        changes.append(f"raise factor_penalty above {objective.factor_penalty:g}")
    else:
        changes.append("set factor_penalty above 0, for example to 0.01")
    first = next((c.phases[0] for c in trainer.callbacks if isinstance(c, Phases)), None)  # type: ignore[attr-defined]
    longer = first is not None and first.rank == 0
    changes.append("make the phase of rank 0 longer" if longer else "start with a phase of rank 0 (lrd_uq.phases)")
    text = ", or ".join([*changes, f"lower learning_rate below {module.learning_rate:g}"])
    return text[0].upper() + text[1:]


def health_of(steps: list[Step], strategy: Any) -> dict[str, Tensor]:
    """`health` over all processes and members of an ensemble: maxima for condition numbers, singular values and the
    ratio of traces, means for the others."""
    all_found = [over_processes(health(step), strategy) for step in steps]
    found = {}
    for name in all_found[0]:
        values = torch.stack([one[name] for one in all_found])
        found[name] = values.max() if name in (*WORST, "trace_ratio") else values.mean()
    return found


@torch.no_grad()
def health(step: Step) -> dict[str, Tensor]:
    """Statistics of a step: maxima over the batch for condition numbers and singular values, means for the others."""
    assert isinstance(step.head, DiagonalHead)
    gaussian = step.head.gaussian(step.output, step.mask)
    distribution = gaussian.distribution()
    factor, diag = distribution.cov_factor, distribution.cov_diag
    exists = torch.ones_like(diag, dtype=torch.bool) if step.mask is None else step.mask
    trace = factor.square().sum((-2, -1))  # [B]; missing outputs have zero rows
    residual = torch.where(exists, step.target - gaussian.mean, 0).square().sum(-1)
    at_floor = (diag <= AT_FLOOR * step.head.eps) & exists
    found = {
        "share_at_floor": at_floor.sum() / exists.sum().clamp(min=1),
        "low_rank_trace": trace.mean(),
        "squared_residuals": residual.mean(),
        "trace_ratio": trace.mean() / residual.mean(),
        "condition_upper": lrd.condition_bounds(factor, diag, mask=step.mask)[1].max(),
        "capacitance_condition": lrd.capacitance_condition(factor, diag, mask=step.mask).max(),
        "largest_singular_value": torch.zeros(()),
    }
    if factor.shape[-1]:
        found["largest_singular_value"] = lrd.truncate(factor, diag, 1, fold=False)[2].max()
    return found


def over_processes(found: dict[str, Tensor], strategy: Any) -> dict[str, Tensor]:
    """The statistics over the shares of all processes."""
    reduced = {
        name: strategy.reduce(value.float(), reduce_op="max" if name in WORST else "mean")
        for name, value in found.items()
    }
    reduced["trace_ratio"] = reduced["low_rank_trace"] / reduced["squared_residuals"]
    return reduced
