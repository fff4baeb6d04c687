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
from lrd_uq.data.order import BatchSeeds
from lrd_uq.extra import lightning as L
from lrd_uq.lock import locked


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[None]:
    """Makes the folder of a run this process's own to write, and removes what a killed process left in it.

    In distributed training, lightning's first process does it for the others.
    """
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"a run is a folder; {folder} is a file")
    folder.mkdir(parents=True, exist_ok=True)
    if getattr(L.pytorch.utilities.rank_zero_only, "rank", 0):
        yield
        return
    with locked(folder):
        storage.remove_unfinished(folder)
        yield


def callbacks(folder: Path, seed: int) -> list[L.pytorch.Callback]:
    """The callbacks of every run: a seed for every batch, and a checkpoint after every epoch."""
    return [BatchSeeds(seed), KeepLast(folder)]


class KeepLast(L.pytorch.callbacks.ModelCheckpoint):
    """Saves last.ckpt after every epoch, and where `max_time` stops a run, so that resuming is exact; needs the trainer
    plugin `checkpoints.CheckpointFiles`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(
            dirpath=folder,
            filename=Path(checkpoints.LAST).stem,
            every_n_epochs=1,
            save_on_train_epoch_end=True,
            enable_version_counter=False,
        )

    def on_train_start(self, trainer: L.pytorch.Trainer, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        loop: Any = trainer.fit_loop
        if loop.is_resuming:  # worker processes may have been given their first batches before the position was known
            iter(loop._data_fetcher)

    def on_train_batch_start(self, trainer: L.pytorch.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        # The step under which metrics are logged; lightning counts one too many in some resumed runs.
        trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step

    def on_train_batch_end(
        self, trainer: L.pytorch.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if trainer.should_stop and trainer.fit_loop.epoch_loop._should_accumulate():
            trainer.should_stop = False  # max_time: stop after the batch that completes the step; the timer asks again

    def on_save_checkpoint(self, trainer: L.pytorch.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        _mark_position(checkpoint["loops"]["fit_loop"], trainer.num_training_batches)
        # The time that is used up: `max_time` limits a process, or a run that it stopped could not go on.
        checkpoint.get("callbacks", {}).pop("Timer", None)


def _mark_position(loop: dict[str, Any], batches: float) -> None:
    """Makes the state of lightning's loop that of a run between two batches.

    Lightning saves before it has counted the epoch. Depending on when the run is validated, it would train another
    batch of the old epoch after a restart.
    """
    progress = loop["epoch_loop.batch_progress"]
    place = progress["current"]["ready"]
    ended = place >= batches
    for name, count in loop["epoch_progress"].items():
        done = count["ready"] if ended else count["ready"] - 1
        loop["epoch_progress"][name] = {**count, "started": count["ready"], "processed": done, "completed": done}
    progress["is_last_batch"] = False
    progress["current"] = dict.fromkeys(progress["current"], 0 if ended else place)
    progress["total"] = dict.fromkeys(progress["total"], progress["total"]["ready"])
    validation = loop["epoch_loop.val_loop.batch_progress"]
    validation["is_last_batch"] = False
    for name in ("current", "total"):
        validation[name] = dict.fromkeys(validation[name], 0)


def start_over(folder: Path) -> None:
    """Removes the checkpoints and metrics of an earlier training."""
    kept = (checkpoints.LAST, checkpoints.PREVIOUS, metrics.METRICS)
    for file in (*(folder / name for name in kept), *metrics.earlier_parts(folder)):
        file.unlink(missing_ok=True)


def has_checkpoint(folder: Path) -> bool:
    return any((folder / name).exists() for name in (checkpoints.LAST, checkpoints.PREVIOUS))


def load_weights(module: L.pytorch.LightningModule, folder: Path) -> checkpoints.Found:
    """Loads the weights of a run, and returns the checkpoint that they are from."""
    found = checkpoints.newest(folder)
    if found is None:
        raise FileNotFoundError(f"{folder} has no {checkpoints.LAST}: run `lrd-uq fit --run {folder}` first")
    try:
        module.load_state_dict(found.content["state_dict"])
    except (KeyError, RuntimeError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{found.path} does not fit the network of this run: {reason}") from error
    return found


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
