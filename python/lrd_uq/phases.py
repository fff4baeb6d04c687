"""Training in phases, such as diagonal, low rank, Bayesian, with a schedule for alpha, rank and eps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from lrd_uq.extra import lightning as L
from lrd_uq.heads import DiagonalHead
from lrd_uq.module import JointUncertainty


@dataclass(frozen=True)
class Phase:
    """Settings that apply from a step on.

    Args:
        start: first step; a number below 1 is a fraction of all steps.
        rank: number of factor columns in use: 0 for a diagonal Gaussian; None for all columns of the head.
        alpha: weight of the likelihood; None keeps the value of the previous phase, or of the objective.
        eps: smallest value of the diagonal; None keeps the value of the previous phase, or of the head.
        bayesian: whether training samples the weights (dropout, variational layers); None keeps the value of the
            previous phase; it is true at first.
        ramp: number of steps over which alpha (linearly) and eps (geometrically) reach their new values.

    Raises:
        ValueError: if a number is negative or not finite, or if there is a ramp without alpha and eps.

    Examples:
        >>> from lrd_uq.phases import Phase
        >>> Phase(start=0.15, alpha=1 / 16).alpha
        0.0625
    """

    start: float = 0
    rank: int | None = None
    alpha: float | None = None
    eps: float | None = None
    bayesian: bool | None = None
    ramp: int = 0

    def __post_init__(self) -> None:
        for name in ("start", "rank", "alpha", "eps", "ramp"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} of a phase must be a finite number, 0 or above; got {value}")
        if self.ramp and self.alpha is None and self.eps is None:
            raise ValueError(f"a phase has a ramp of {self.ramp} steps, but neither alpha nor eps to change over them")


class Phases(L.pytorch.Callback):
    """Applies the settings of the current phase before every step. They depend only on the step and on the settings
    that the model was built with, so a resumed run goes on exactly, in the middle of a ramp too.

    Args:
        phases: in the order of their starts; the first one starts at 0.

    Raises:
        ValueError: if the first phase does not start at 0. At the start of training, if two phases start at one step,
            and for a setting that this model cannot follow: a rank above that of the head, eps for a head without a
            diagonal, bayesian for a method that does not sample weights in training, a ramp to the value that was there
            before.

    Examples:
        >>> from lrd_uq.phases import Phase, Phases
        >>> callback = Phases([Phase(start=0, rank=0), Phase(start=0.15)])  # for a Trainer's callbacks
        >>> len(callback.phases)
        2
    """

    def __init__(self, phases: list[Phase]) -> None:
        starts = [phase.start for phase in phases]
        if not phases or starts[0] != 0:
            raise ValueError(f"the first of at least one phase must start at 0; got {starts}")
        self.phases = phases

    def on_fit_start(self, trainer: L.pytorch.Trainer, pl_module: L.pytorch.LightningModule) -> None:
        assert isinstance(pl_module, JointUncertainty)
        total = trainer.estimated_stepping_batches
        starts = [self._first_step(phase, total) for phase in self.phases]
        if starts != sorted(set(starts)):
            raise ValueError(f"phases must start one after the other; of {total} steps they start at {starts}")
        own = settings_of(pl_module)
        head = pl_module.heads[0]
        ignores = not pl_module.method.noisy_training
        for number, phase in enumerate(self.phases):
            where = f"the phase that starts at {phase.start}"
            if phase.rank is not None and phase.rank > head.rank:
                raise ValueError(f"{where} has rank {phase.rank}, but the head has {head.rank} columns")
            if phase.eps is not None and own.eps is None:
                raise ValueError(f"{where} has eps {phase.eps}, but a {type(head).__name__} has no diagonal to bound")
            if phase.bayesian is not None and ignores:
                raise ValueError(
                    f"{where} has bayesian {phase.bayesian}, but {type(pl_module.method).__name__} does not sample the"
                    " weights in training"
                )
            before = own if number == 0 else self.at(starts[number] - 1, total, own)
            same = all(new is None or new == old for new, old in ((phase.alpha, before.alpha), (phase.eps, before.eps)))
            if phase.ramp and same:
                raise ValueError(f"{where} has a ramp of {phase.ramp} steps to the values that were there before")

    def on_train_batch_start(self, trainer: L.pytorch.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        total = trainer.estimated_stepping_batches
        now = self.at(trainer.global_step, total, settings_of(pl_module))
        pl_module.configure_phase(rank=now.rank, alpha=now.alpha, eps=now.eps, bayesian=now.bayesian)

    def at(self, step: int, total: float, own: Phase) -> Phase:
        """All settings at a step, of `total`, for a model that was built with the settings `own`."""
        current = own
        for phase in self.phases:
            first = self._first_step(phase, total)
            if first > step:
                break
            share = min((step - first + 1) / (phase.ramp + 1), 1.0)
            current = Phase(
                start=phase.start,
                rank=own.rank if phase.rank is None else phase.rank,
                alpha=_between(current.alpha, phase.alpha, share),
                eps=_between(current.eps, phase.eps, share, geometric=True),
                bayesian=current.bayesian if phase.bayesian is None else phase.bayesian,
            )
        return current

    @staticmethod
    def _first_step(phase: Phase, total: float) -> int:
        return round(phase.start * total) if phase.start < 1 else int(phase.start)


def settings_of(module: JointUncertainty) -> Phase:
    """The settings that a model was built with, whatever they are at this step."""
    head = module.heads[0]
    eps = head.own_eps if isinstance(head, DiagonalHead) else None
    return Phase(0, head.rank, module.objective.own_alpha, eps, bayesian=True)


def _between(old: float | None, new: float | None, share: float, geometric: bool = False) -> float | None:
    if new is None or old is None:
        return old if new is None else new
    if share == 1:
        return new
    if geometric and old > 0 and new > 0:
        return float(old ** (1 - share) * new**share)
    return old + share * (new - old)
