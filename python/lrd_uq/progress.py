"""One progress bar for a whole training, with nats and the time that is left."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from lrd_uq.extra import lightning as L
from lrd_uq.module import JointUncertainty

LINES = 10  # that are printed instead of a bar where there is no terminal


class Progress(L.pytorch.callbacks.ProgressBar):
    """A bar over all steps of the training. Without a terminal, for example in a batch job, it prints lines instead.

    Log-likelihoods are in nats per item: that of the current training batch, and of the validation data.

    Args:
        lines: print this many lines in the course of the training; None for a bar on a terminal and 10 lines elsewhere.
        name: name of the run in these lines, if there are several.

    Examples:
        >>> from lrd_uq.progress import Progress
        >>> Progress(lines=4).is_enabled  # for a Trainer's callbacks
        True
    """

    def __init__(self, lines: int | None = None, name: str = "") -> None:
        super().__init__()
        self.lines, self.name = lines, name
        self.is_enabled = True
        self._bar: Any = None
        self._first, self._start = 0, 0.0  # step and time of the start of this process
        self._training: float | None = None

    def enable(self) -> None:
        self.is_enabled = True

    def disable(self) -> None:  # lightning does this on all processes but the first
        self.is_enabled = False

    def on_train_start(self, trainer: L.pytorch.Trainer, pl_module: L.pytorch.LightningModule) -> None:
        if not self.is_enabled:
            return
        self._first, self._start = trainer.global_step, time.monotonic()
        if self.lines is None and has_terminal():
            from tqdm import tqdm

            self._bar = tqdm(
                total=int(trainer.estimated_stepping_batches),
                initial=self._first,
                file=sys.stderr,
                dynamic_ncols=True,
                bar_format="{n_fmt} of {total_fmt} steps |{bar}| {remaining} left{postfix}",
            )

    def on_train_batch_end(
        self, trainer: L.pytorch.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self.is_enabled:
            return
        is_drawn = self._bar is not None and self._bar.update(trainer.global_step - self._bar.n)
        if is_drawn or batch_idx + 1 == trainer.num_training_batches:
            self._training = training_nats(trainer, pl_module)
            if self._bar is not None:
                self._bar.set_postfix_str(self._scores(trainer))

    def on_train_epoch_end(self, trainer: L.pytorch.Trainer, pl_module: L.pytorch.LightningModule) -> None:
        """Comes after the validation of the epoch."""
        if self._bar is not None:
            self._bar.set_postfix_str(self._scores(trainer))
        elif self.is_enabled:
            self._print_line(trainer)

    def _print_line(self, trainer: L.pytorch.Trainer) -> None:
        step, total = trainer.global_step, int(trainer.estimated_stepping_batches)
        lines = LINES if self.lines is None else self.lines
        before = max(step - int(trainer.num_training_batches), self._first)
        if step < total and step * lines // total == before * lines // total:
            return
        spent = time.monotonic() - self._start
        left = spent * (total - step) / max(step - self._first, 1)
        words = [f"step {step} of {total}", self._scores(trainer), f"{spent:.0f} s"]
        words += [f"{left:.0f} s left"] if step < total else []
        print(f"  {self.name}: " * bool(self.name) + ", ".join(filter(None, words)), flush=True)

    def _scores(self, trainer: L.pytorch.Trainer) -> str:
        validation = trainer.callback_metrics.get("val_log_prob")
        return ", ".join(
            f"{part} {float(nats):.1f} nats"
            for part, nats in (("training", self._training), ("validation", validation))
            if nats is not None
        )

    def on_train_end(self, trainer: L.pytorch.Trainer, pl_module: L.pytorch.LightningModule) -> None:
        self._close()

    def on_exception(
        self, trainer: L.pytorch.Trainer, pl_module: L.pytorch.LightningModule, exception: BaseException
    ) -> None:
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def has_terminal() -> bool:
    """Whether a bar can be seen: some terminals, such as those of containers, say that they have no columns."""
    try:
        return sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).columns > 0
    except OSError:  # a terminal without a file
        return sys.stderr.isatty()


def training_nats(trainer: L.pytorch.Trainer, module: JointUncertainty) -> float | None:
    """The log-likelihood of the current training batch, per item."""
    loss = trainer.callback_metrics.get("low_rank")  # a negative log-likelihood per output, the mean over members
    if not module.latest or module.latest[0].output.raw_diag is None or loss is None:
        return None
    step = module.latest[0]
    outputs = step.target.numel() if step.mask is None else int(step.mask.sum())
    return -float(loss) * outputs / len(step.target)
