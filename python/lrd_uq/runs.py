"""The folder of a training run. `fit` writes it, the other commands read it.

config.yaml has the settings, last.ckpt and previous.ckpt are the two newest checkpoints, metrics.csv is the log.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import lrd_kernels as lrd
from lrd_kernels.info import cpu_model
from lrd_uq import checkpoints, metrics, storage
from lrd_uq.extra import lightning as L
from lrd_uq.lock import locked


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[None]:
    """Makes the folder of a run this process's own to write, and removes what a killed process left in it.

    In distributed training, lightning's first process does it for the others.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if getattr(L.pytorch.utilities.rank_zero_only, "rank", 0):
        yield
        return
    with locked(folder):
        storage.remove_unfinished(folder)
        yield


def callbacks(folder: Path, seed: int) -> list[L.pytorch.Callback]:
    """The callbacks of every run: a seed for every epoch, and a checkpoint after it."""
    from lrd_uq.data.order import EpochSeeds

    return [EpochSeeds(seed), KeepLast(folder)]


class KeepLast(L.pytorch.callbacks.ModelCheckpoint):
    """Saves last.ckpt after every epoch; needs the trainer plugin `checkpoints.CheckpointFiles`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(
            dirpath=folder,
            filename=Path(checkpoints.LAST).stem,
            every_n_epochs=1,
            save_on_train_epoch_end=True,
            enable_version_counter=False,
        )

    def on_load_checkpoint(self, trainer: L.pytorch.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Drops the time that is used up: `max_time` limits a process, or a run that it stopped could not go on."""
        checkpoint.get("callbacks", {}).pop("Timer", None)


def start_over(folder: Path) -> None:
    """Removes the checkpoints and metrics of an earlier training."""
    kept = (checkpoints.LAST, checkpoints.PREVIOUS, metrics.METRICS)
    for file in (*(folder / name for name in kept), *metrics.earlier_parts(folder)):
        file.unlink(missing_ok=True)


def has_checkpoint(folder: Path) -> bool:
    return any((folder / name).exists() for name in (checkpoints.LAST, checkpoints.PREVIOUS))


def load_weights(module: L.pytorch.LightningModule, folder: Path) -> None:
    found = checkpoints.newest(folder)
    if found is None:
        raise FileNotFoundError(f"{folder} has no {checkpoints.LAST}: run `lrd-uq fit --run {folder}` first")
    try:
        module.load_state_dict(found.content["state_dict"])
    except (KeyError, RuntimeError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{found.path} does not fit the network of this run: {reason}") from error


def facts() -> dict[str, Any]:
    """What measurements depend on: date, machine, kernels, versions, allocator."""
    statuses = lrd.backends()
    backend = "cpu" if statuses["cpu"].available else "reference"
    preloaded = os.environ.get("LD_PRELOAD")
    return {
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
        "machine": f"{cpu_model()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads in use",
        "kernels": f"{backend} ({statuses[backend].detail})",
        "versions": f"lrd-kernels {lrd.__version__}, torch {torch.__version__}, lightning {L.__version__},"
        f" Python {platform.python_version()}",
        "allocator": f"LD_PRELOAD={preloaded}" if preloaded else f"malloc of {' '.join(platform.libc_ver())}",
    }
