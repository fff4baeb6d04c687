"""Training in phases, such as diagonal, low rank, Bayesian, with a schedule for alpha, rank and eps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lrd_uq.extra import lightning as L
from lrd_uq.heads import DiagonalHead
from lrd_uq.module import JointUncertainty


@dataclass(frozen=True)
class Phase:
    """Settings that apply from a step on. None keeps the value of the previous phase, or of the model.

    Args:
        start: first step; a number below 1 is a fraction of all steps.
        rank: number of factor columns in use: 0 for a diagonal Gaussian, -1 for all columns of the head.
        alpha: weight of the likelihood.
        eps: smallest value of the diagonal.
        bayesian: whether training samples the weights (dropout, variational layers).
        ramp: number of steps over which alpha (linearly) and eps (geometrically) reach their new values.

    Examples:
        >>> from lrd_uq.phases import Phase
        >>> Phase(start=0.15, rank=-1, alpha=1 / 16).alpha
        0.0625
    """

    start: float = 0
    rank: int | None = None
    alpha: float | None = None
    eps: float | None = None
    bayesian: bool | None = None
    ramp: int = 0


class Phases(L.pytorch.Callback):
    """Applies the settings of the current phase before every step. They depend only on the step, so a resumed run
    continues in the right phase.

    Args:
        phases: in the order of their starts; the first one starts at 0.

    Raises:
        ValueError: if the first phase does not start at 0; at the start of training, if two phases start at one step.

    Examples:
        >>> from lrd_uq.phases import Phase, Phases
        >>> callback = Phases([Phase(start=0, rank=0), Phase(start=0.15, rank=-1)])  # for a Trainer's callbacks
        >>> len(callback.phases)
        2
    """

    def __init__(self, phases: list[Phase]) -> None:
        starts = [phase.start for phase in phases]
        if not phases or starts[0] != 0 or any(phase.start < 0 for phase in phases):
            raise ValueError(f"the first of at least one phase must start at 0; got {starts}")
        self.phases = phases
        self._own: Phase | None = None  # the settings of the model before the first phase

    def on_fit_start(self, trainer: L.pytorch.Trainer, pl_module: L.pytorch.LightningModule) -> None:
        assert isinstance(pl_module, JointUncertainty)
        if self._own is None:
            head = pl_module.heads[0]
            self._own = Phase(
                0, head.rank, pl_module.objective.alpha, head.eps if isinstance(head, DiagonalHead) else None, True
            )
        total = trainer.estimated_stepping_batches
        starts = [self._first_step(phase, total) for phase in self.phases]
        if starts != sorted(set(starts)):
            raise ValueError(f"phases must start one after the other; of {total} steps they start at {starts}")

    def on_train_batch_start(self, trainer: L.pytorch.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        assert self._own is not None
        total = trainer.estimated_stepping_batches
        now = self.at(trainer.global_step, total, self._own)
        pl_module.configure_phase(rank=now.rank, alpha=now.alpha, eps=now.eps, bayesian=now.bayesian)

    def at(self, step: int, total: float, own: Phase) -> Phase:
        """All settings at a step, of `total`, for a model whose own settings are `own`."""
        current = own
        for phase in self.phases:
            first = self._first_step(phase, total)
            if first > step:
                break
            share = min((step - first + 1) / (phase.ramp + 1), 1.0)
            current = Phase(
                start=phase.start,
                rank=current.rank if phase.rank is None else phase.rank,
                alpha=_between(current.alpha, phase.alpha, share),
                eps=_between(current.eps, phase.eps, share, geometric=True),
                bayesian=current.bayesian if phase.bayesian is None else phase.bayesian,
            )
        return current

    @staticmethod
    def _first_step(phase: Phase, total: float) -> int:
        return round(phase.start * total) if phase.start < 1 else int(phase.start)


def _between(old: float | None, new: float | None, share: float, geometric: bool = False) -> float | None:
    if new is None or old is None:
        return old if new is None else new
    if geometric and old > 0 and new > 0:
        return float(old ** (1 - share) * new**share)
    return old + share * (new - old)
