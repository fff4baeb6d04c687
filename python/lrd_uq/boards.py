"""TensorBoard and Weights & Biases: the metrics of a run, and pictures of the modes, while it trains."""

from __future__ import annotations

import os
import secrets
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

import lrd_kernels as lrd
from lrd_uq import plots, predict
from lrd_uq.bayes.base import eval_predictor, predict_joint
from lrd_uq.data.batch import Batch, as_batch
from lrd_uq.data.task import Items
from lrd_uq.extra import lightning as L
from lrd_uq.metrics import FolderLog
from lrd_uq.module import JointUncertainty
from lrd_uq.nets import batch_for

Board = Literal["tensorboard", "wandb"]
Boards = Board | list[Board] | None
rank_zero_only = L.pytorch.utilities.rank_zero_only
WANDB_ID = "wandb_id"  # file in a run's folder, so that a resumed run goes on in the same curves


def loggers(boards: Boards, folder: Path, config: Mapping[str, Any]) -> list[L.pytorch.loggers.Logger]:
    """The loggers of the boards that the option `--log` names."""
    return [
        TensorBoard(folder / "tensorboard") if name == "tensorboard" else weights_and_biases(folder, config)
        for name in dict.fromkeys(named(boards))
    ]


def named(boards: Boards) -> list[Board]:
    """The value of the option `--log` as a list."""
    return [] if boards is None else boards if isinstance(boards, list) else [boards]


def missing(package: Board, error: ImportError) -> ImportError:
    return ImportError(f"--log {package} needs the package {package}, pip install {package}: {error}")


class TensorBoard(FolderLog):
    """Writes files for TensorBoard. A resumed run adds a file, and TensorBoard drops what the earlier ones say of the
    steps that are trained again.

    Raises:
        ImportError: without the package tensorboard.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        try:
            import torch.utils.tensorboard  # noqa: F401
        except ImportError as error:
            raise missing("tensorboard", error) from error
        self._writer: Any = None

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        for name, value in metrics.items():
            self._at(step).add_scalar(name, value, step)

    @rank_zero_only
    def log_image(self, key: str, images: Sequence[np.ndarray], step: int | None = None) -> None:
        """Pictures uint8 [H, W, 3]."""
        for image in images:
            self._at(step).add_image(key, image, step, dataformats="HWC")

    def _at(self, step: int | None) -> Any:
        """The writer, which is opened at the first step of this process."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self.folder), purge_step=step)
        return self._writer

    @rank_zero_only
    def save(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def weights_and_biases(folder: Path, config: Mapping[str, Any]) -> L.pytorch.loggers.Logger:
    """Lightning's logger for Weights & Biases. The project is lrd-uq, unless WANDB_PROJECT names another."""
    try:
        import wandb  # noqa: F401
    except ImportError as error:
        raise missing("wandb", error) from error
    saved = folder / WANDB_ID
    if not saved.exists():
        saved.write_text(secrets.token_hex(6), encoding="utf-8")
    project = os.environ.get("WANDB_PROJECT", "lrd-uq")
    return L.pytorch.loggers.WandbLogger(
        name=folder.resolve().name,
        save_dir=folder,
        id=saved.read_text(encoding="utf-8"),
        project=project,
        resume="allow",
        config=dict(config),
    )


class ModePictures(L.pytorch.Callback):
    """Draws the first items of the validation data, with the modes of their joint Gaussian, while a network trains.

    A picture is that of `lrd-uq panel`, and goes to every logger that takes pictures (`log_image`). It needs the
    validation to have run, and changes neither weights nor random numbers.

    Args:
        items: number of items.
        times: number of pictures in the course of the training, at most one per epoch.
        samples: number of predictions of a Bayesian method.
        rank: columns of the joint Gaussian.

    Examples:
        >>> from lrd_uq.boards import ModePictures
        >>> ModePictures(items=2, times=10).times  # for a Trainer's callbacks
        10
    """

    def __init__(self, items: int = 2, times: int = 10, samples: int = 16, rank: int = 16) -> None:
        if min(items, times, samples, rank) < 1:
            raise ValueError(f"items, times, samples and rank must be at least 1; got {items, times, samples, rank}")
        self.items, self.times, self.samples, self.rank = items, times, samples, rank
        self._batch: Batch | None = None  # on the CPU
        self._drawn = 0  # pictures that are due up to this step

    def on_train_start(self, trainer: L.pytorch.Trainer, pl_module: Any) -> None:
        self._drawn = self._due(trainer)

    def on_validation_batch_start(
        self, trainer: L.pytorch.Trainer, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self._batch is None:
            first = (None if part is None else part[: self.items].cpu() for part in as_batch(batch))
            self._batch = Batch(*first)  # type: ignore[arg-type]

    def on_train_epoch_end(self, trainer: L.pytorch.Trainer, pl_module: L.pytorch.LightningModule) -> None:
        """Comes after the validation of the epoch."""
        assert isinstance(pl_module, JointUncertainty)
        due, last = self._due(trainer), trainer.global_step >= trainer.estimated_stepping_batches
        if self._batch is None or (due == self._drawn and not last):
            return
        self._drawn = due
        try:
            joint = joint_now(pl_module, self._batch, self.samples, self.rank)  # everywhere: weights may be sharded
        except (ValueError, lrd.NotPositiveDefiniteError) as error:  # numbers that no Gaussian can have
            warnings.warn(f"step {trainer.global_step}: no picture of the modes: {error}", stacklevel=1)
            return
        if not trainer.is_global_zero:
            return
        joints = [plots.item_of(joint, number) for number in range(len(self._batch.target))]
        items = [Items(self._batch)[number] for number in range(len(joints))]
        style = getattr(getattr(trainer, "datamodule", None), "style", None)
        picture = plots.pixels(predict.drawn(pl_module, items, joints, style))
        for logger in trainer.loggers:
            log_image = getattr(logger, "log_image", None)
            if log_image is not None:
                log_image("modes", [picture], step=trainer.global_step - 1)  # as validation: steps count from 0

    def _due(self, trainer: L.pytorch.Trainer) -> int:
        return int(trainer.global_step * self.times // trainer.estimated_stepping_batches)


@torch.no_grad()
def joint_now(module: JointUncertainty, batch: Batch, T: int, rank: int) -> lrd.JointNormal:
    """The joint Gaussian of a batch in the middle of training. A method whose weights cannot be drawn yet predicts with
    the current ones."""
    x, _, mask = batch_for(module.net, batch)
    mask = None if mask is None else module.heads[0].flat(mask)
    if module.method.is_ready(module.net):
        return predict_joint(module.method, module.net, x, T, rank, mask=mask)
    joint = lrd.JointAccumulator(rank)
    for member in module.method.members(module.net):
        joint.update(*eval_predictor(member)(x, mask))
    return joint.finalize(validate_args=False)
