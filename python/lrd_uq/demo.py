"""`lrd-uq demo`: MNIST inpainting with diagonal and low-rank U-Nets, deterministic and with Monte Carlo dropout.

20 of 28 rows are hidden and predicted as one Gaussian. Prints and writes the held-out log-likelihood of every way to
predict, whether the expected ordering holds, the calibration of the sum over the hidden region, and pictures. Settings
were chosen on validation digits; the test digits are only scored.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shlex
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lrd_uq import demo_report, plots, runs
from lrd_uq.bayes import Dropout, Method
from lrd_uq.data.inpainting import DigitInpainting
from lrd_uq.evaluate import Evaluation, evaluate
from lrd_uq.extra import lightning as L
from lrd_uq.heads import DiagonalHead, LowRankHead
from lrd_uq.module import JointUncertainty
from lrd_uq.monitors import CovarianceMonitor, GradientFilter
from lrd_uq.nets import DigitsUNet, wrap
from lrd_uq.phases import Phase, Phases
from lrd_uq.predict import predict_item

CHANNELS, RANK = 24, 8
SWEEP = (8, 16, 32, 64, 128)
SUBJECTS = 3  # digits of the panel
PANEL_RANK = 64


@dataclass(frozen=True)
class Spec:
    """One network of the demo, and all it needs to be trained anywhere."""

    name: str
    low_rank: bool
    dropout: float
    output: Path
    steps: int
    seed: int
    samples: int
    images: int
    parametrisation: str = "plain"
    ranks: tuple[int, ...] = ()

    @property
    def folder(self) -> Path:
        return self.output / "runs" / self.name

    def data(self) -> DigitInpainting:
        return DigitInpainting(test=self.images, steps_per_epoch=min(50, self.steps), seed=self.seed)

    def module(self) -> JointUncertainty:
        torch.manual_seed(self.seed)
        backbone = DigitsUNet(channels=CHANNELS, dropout=self.dropout)
        low_rank = LowRankHead(CHANNELS, RANK, parametrisation=self.parametrisation)
        head = low_rank if self.low_rank else DiagonalHead(CHANNELS)
        return JointUncertainty(wrap(backbone, head), Dropout() if self.dropout else Method())


class Scored(NamedTuple):
    """A trained network's scores, and what it cost."""

    evaluation: Evaluation
    validation: float  # log-likelihood with expected weights
    training_seconds: float
    evaluation_seconds: float
    filtered_steps: int


def specs(output: Path, steps: int, seed: int, samples: int, images: int) -> list[Spec]:
    """The longest first, so that two workers end together."""
    common: dict[str, Any] = {
        "output": output,
        "steps": steps,
        "seed": seed,
        "samples": samples,
        "images": images,
    }
    return [
        Spec("low_rank_dropout", True, 0.2, ranks=SWEEP, **common),
        Spec("low_rank_dropout_scaled", True, 0.2, parametrisation="scaled", **common),
        Spec("diagonal_dropout", False, 0.2, **common),
        Spec("low_rank", True, 0.0, **common),
        Spec("diagonal", False, 0.0, **common),
    ]


class Progress(L.pytorch.Callback):
    """A line now and then: several networks may be training at once."""

    def __init__(self, name: str, steps: int) -> None:
        self.name, self.steps, self.start = name, steps, time.monotonic()

    def on_validation_end(self, trainer: L.pytorch.Trainer, pl_module: L.pytorch.LightningModule) -> None:
        step = trainer.global_step
        if trainer.sanity_checking or (step % max(self.steps // 4, 1) and step != self.steps):
            return
        spent = time.monotonic() - self.start
        print(
            f"  {self.name}: step {step} of {self.steps}, validation"
            f" {float(trainer.callback_metrics['val_log_prob']):.1f} nats, {spent:.0f} s",
            flush=True,
        )


def train_and_score(spec: Spec) -> Scored:
    """All that one network costs: in a process of its own, with one thread."""
    torch.set_num_threads(1)
    quiet()
    spec.folder.mkdir(parents=True, exist_ok=True)
    module, data = spec.module(), spec.data()
    gradient_filter = GradientFilter()
    callbacks = [gradient_filter, CovarianceMonitor(), Progress(spec.name, spec.steps)]
    if spec.low_rank:
        callbacks.append(Phases([Phase(0, rank=0), Phase(0.15, rank=RANK)]))
    trainer = L.pytorch.Trainer(
        accelerator="cpu",
        max_steps=spec.steps,
        max_epochs=-1,
        gradient_clip_val=1.0,
        log_every_n_steps=10,
        logger=runs.logger(spec.folder),
        callbacks=[*callbacks, *runs.callbacks(spec.folder, spec.seed)],
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    start = time.monotonic()
    trainer.fit(module, datamodule=data)
    trained = time.monotonic()
    torch.manual_seed(spec.seed)  # of the dropout masks
    found = evaluate(module.method, module.net, data.part("test"), spec.samples, spec.ranks)
    validation = float(trainer.callback_metrics["val_log_prob"])
    return Scored(found, validation, trained - start, time.monotonic() - trained, gradient_filter.filtered)


def quiet() -> None:
    """lightning's advice is not the demo's."""
    import logging
    import warnings

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for module in ("lightning", "torch.jit"):
        warnings.filterwarnings("ignore", module=rf"{module}.*")


def draw_panel(spec: Spec, path: Path) -> None:
    """The first test digits under a trained network."""
    module, data = spec.module(), spec.data()
    runs.load_weights(module, spec.folder)
    torch.manual_seed(spec.seed)
    items = data.dataset("test")
    subjects = [
        predict_item(module, data, items[i], spec.samples, PANEL_RANK) for i in range(min(SUBJECTS, len(items)))
    ]
    plots.panel(path, subjects)


def main(arguments: Sequence[str] | None = None) -> dict[str, Scored]:
    parser = argparse.ArgumentParser(
        prog="lrd-uq demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--output", type=Path, default=Path("reports/demo"), help="where report and pictures go (reports/demo)")
    add("--steps", type=_positive, default=1000, help="training steps of each network (1000)")
    add("--samples", type=_positive, default=64, help="predictions of a network with dropout (64)")
    add("--images", type=_positive, default=200, help="test digits (200)")
    add("--workers", type=_positive, default=min(2, os.cpu_count() or 1), help="networks at a time (one per core, 2)")
    add("--seed", type=int, default=0, help="of split, first weights and dropout (0)")
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(words)
    if options.samples < 2 or options.images < 2:
        parser.error("--samples and --images must be at least 2")
    start = time.monotonic()
    facts = {**runs.facts(), "command": shlex.join(["lrd-uq", "demo", *words])}
    for name, fact in facts.items():
        print(f"{name}: {fact}")
    options.output.mkdir(parents=True, exist_ok=True)
    chosen = specs(options.output, options.steps, options.seed, options.samples, options.images)
    print(f"{len(chosen)} networks, {options.steps} steps each, {options.workers} at a time", flush=True)
    if options.workers == 1:
        scored = {spec.name: train_and_score(spec) for spec in chosen}
    else:
        with ProcessPoolExecutor(options.workers, multiprocessing.get_context("spawn")) as pool:
            scored = dict(zip([spec.name for spec in chosen], pool.map(train_and_score, chosen), strict=True))

    draw_panel(chosen[0], options.output / "panel.png")
    curves = {spec.name.replace("_", " "): runs.read_metrics(spec.folder) for spec in chosen}
    plots.curves(options.output / "curves.png", curves)
    plots.condition_numbers(options.output / "condition.png", curves)
    demo_report.draw_sweep(options.output / "sweep.png", scored["low_rank_dropout"].evaluation, SWEEP)
    facts["seconds in all"] = round(time.monotonic() - start)
    settings = {name: getattr(options, name) for name in ("steps", "samples", "images", "workers", "seed")}
    print("\n".join(demo_report.write(options.output, scored, facts, settings)))
    print(f"Wrote {options.output / 'report.md'} after {facts['seconds in all']} s")
    return scored


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


if __name__ == "__main__":
    main()
