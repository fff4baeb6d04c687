"""The folder of a training run: config.yaml, last.ckpt and metrics.csv. `fit` writes it, the other commands read it."""

from __future__ import annotations

import csv
import os
import platform
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import lrd_kernels as lrd
from lrd_kernels.info import cpu_model
from lrd_uq.extra import lightning as L

CHECKPOINT = "last.ckpt"
METRICS = "metrics.csv"


def callbacks(folder: Path, seed: int) -> list[L.pytorch.Callback]:
    """The callbacks of every run: a seed for every epoch, and a checkpoint after it (written atomically)."""
    from lrd_uq.data.order import EpochSeeds

    keep = L.pytorch.callbacks.ModelCheckpoint(
        dirpath=folder,
        filename=Path(CHECKPOINT).stem,
        every_n_epochs=1,
        save_on_train_epoch_end=True,
        enable_version_counter=False,
    )
    return [EpochSeeds(seed), keep]


def logger(folder: Path) -> L.pytorch.loggers.CSVLogger:
    """Writes metrics.csv. The file of a resumed run is renamed first, because lightning would overwrite it."""
    present = folder / METRICS
    if present.exists():
        earlier = len(list(folder.glob(f"earlier-*-{METRICS}")))
        present.rename(folder / f"earlier-{earlier}-{METRICS}")
    return L.pytorch.loggers.CSVLogger(folder, name="", version="", flush_logs_every_n_steps=10)


def checkpoint(folder: Path) -> Path | None:
    """The checkpoint to resume from, if there is one."""
    path = folder / CHECKPOINT
    return path if path.exists() else None


def load_weights(module: L.pytorch.LightningModule, folder: Path) -> None:
    path = checkpoint(folder)
    if path is None:
        raise FileNotFoundError(f"{folder} has no {CHECKPOINT}: run `lrd-uq fit --run {folder}` first")
    module.load_state_dict(torch.load(path, map_location="cpu", weights_only=False)["state_dict"])


def read_metrics(folder: Path) -> dict[str, tuple[list[float], list[float]]]:
    """Name -> steps and values, over all parts of a resumed run; for a step in two of them, the later one counts."""
    found: dict[str, dict[float, float]] = {}
    for file in (*sorted(folder.glob(f"earlier-*-{METRICS}")), folder / METRICS):
        if not file.exists():
            continue
        with file.open(newline="") as lines:
            for record in csv.DictReader(lines):
                for name, text in record.items():
                    if name not in ("step", "epoch") and text:
                        found.setdefault(name, {})[float(record["step"])] = float(text)
    return {name: (sorted(points), [points[step] for step in sorted(points)]) for name, points in found.items()}


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
