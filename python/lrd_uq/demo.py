"""`lrd-uq demo`: MNIST inpainting with diagonal and low-rank U-Nets, deterministic and with Monte Carlo dropout.

20 of 28 rows are hidden and predicted as one Gaussian. Every network is trained with several seeds. The report has the
held-out log-likelihood of every kind of prediction, in how many seeds they are ordered as expected, the calibration of
the sum over the hidden pixels, and pictures. Settings were chosen on validation digits; the test digits are only used
for the scores.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import shlex
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lrd_uq import demo_report, plots, runs, settings
from lrd_uq.evaluate import Evaluation, evaluate
from lrd_uq.extra import lightning as L
from lrd_uq.heads import DiagonalHead
from lrd_uq.metrics import read_metrics
from lrd_uq.predict import predict_item

if TYPE_CHECKING:
    from lightning.pytorch.cli import LightningCLI

SWEEP = (8, 16, 32, 64, 128)
SUBJECTS = 3  # number of digits in the panel
PANEL_RANK = 64


@dataclass(frozen=True)
class Spec:
    """One training of the demo: a shipped config and changes to it."""

    name: str
    config: str
    output: Path
    steps: int
    seed: int
    split_seed: int
    samples: int
    images: int
    diagonal: bool = False  # replace the low-rank head of the config by a DiagonalHead
    ranks: tuple[int, ...] = ()

    @property
    def folder(self) -> Path:
        return self.output / "runs" / f"{self.name}-seed{self.seed}"

    def configure(
        self, writes: contextlib.ExitStack | None = None, callbacks: Sequence[L.pytorch.Callback] = ()
    ) -> LightningCLI:
        """Model, data and trainer (see `settings.configure`)."""
        values = {
            "config": self.config,
            "run": str(self.folder),
            "seed_everything": self.seed,
            "data.init_args.seed": self.seed,
            "data.init_args.split_seed": self.split_seed,
            "data.init_args.test": self.images,
            "data.init_args.steps_per_epoch": min(50, self.steps),
            "trainer.max_steps": self.steps,
            "trainer.enable_progress_bar": "false",
            "trainer.num_sanity_val_steps": 0,
        }
        words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
        cli = settings.configure(words, writes=writes, callbacks=callbacks)
        if self.diagonal:
            cli.model.net.head = DiagonalHead(cli.model.net.head.channels)
        return cli


class Scored(NamedTuple):
    """Scores of a trained network, and the time that they took."""

    evaluation: Evaluation
    validation: float  # log-likelihood with expected weights
    training_seconds: float
    evaluation_seconds: float
    filtered_steps: int


def specs(output: Path, steps: int, seeds: Sequence[int], split_seed: int, samples: int, images: int) -> list[Spec]:
    """The trainings of the demo. The slowest come first, to keep several workers busy until the end."""
    common: dict[str, Any] = {
        "output": output,
        "steps": steps,
        "split_seed": split_seed,
        "samples": samples,
        "images": images,
    }
    networks: list[dict[str, Any]] = [
        {"name": "low_rank_dropout", "config": "digits_dropout", "ranks": SWEEP},
        {"name": "diagonal_dropout", "config": "digits_dropout", "diagonal": True},
        {"name": "low_rank", "config": "digits_lowrank"},
        {"name": "diagonal", "config": "digits_lowrank", "diagonal": True},
    ]
    return [Spec(**network, seed=seed, **common) for network in networks for seed in seeds]


class Progress(L.pytorch.Callback):
    """Prints a line four times per training, instead of a progress bar: several networks may train at once."""

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
    """Trains and scores one network with one thread; runs in a worker process."""
    torch.set_num_threads(1)
    silence_lightning()
    with contextlib.ExitStack() as held:
        cli = spec.configure(held, [Progress(spec.folder.name, spec.steps)])
        runs.start_over(spec.folder)
        module, data, trainer = cli.model, cli.datamodule, cli.trainer
        start = time.monotonic()
        trainer.fit(module, datamodule=data)
        trained = time.monotonic()
    found = evaluate(module.method, module.net, data.part("test"), spec.samples, spec.ranks, seed=spec.seed)
    validation = float(trainer.callback_metrics["val_log_prob"])
    filtered = int(trainer.callback_metrics["filtered_steps"])
    return Scored(found, validation, trained - start, time.monotonic() - trained, filtered)


def silence_lightning() -> None:
    """Hides log messages and warnings of lightning."""
    import logging
    import warnings

    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for module in ("lightning", "torch.jit"):
        warnings.filterwarnings("ignore", module=rf"{module}.*")


def draw_panel(spec: Spec, path: Path) -> None:
    """Draws the first test digits with the predictions of a trained network."""
    cli = spec.configure()
    module, data = cli.model, cli.datamodule
    runs.load_weights(module, spec.folder)
    torch.manual_seed(spec.seed)
    items = data.dataset("test")
    subjects = [
        predict_item(module, data, items[i], spec.samples, PANEL_RANK) for i in range(min(SUBJECTS, len(items)))
    ]
    plots.save(plots.panel(subjects), path)


def main(arguments: Sequence[str] | None = None) -> dict[str, list[Scored]]:
    parser = argparse.ArgumentParser(
        prog="lrd-uq demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--output", type=Path, default=Path("reports/demo"), help="folder of the report (default: reports/demo)")
    add("--steps", type=_positive, default=1000, help="training steps per network (default: 1000)")
    add("--samples", type=_positive, default=64, help="predictions per image with dropout (default: 64)")
    add("--images", type=_positive, default=200, help="number of test digits (default: 200)")
    add(
        "--workers",
        type=_positive,
        default=min(2, os.cpu_count() or 1),
        help="networks trained at the same time (default: 2, or 1 on a single core)",
    )
    add("--seeds", type=_positive, default=3, help="number of seeds that every network is trained with (default: 3)")
    add("--seed", type=int, default=0, help="the first seed, of initial weights, batches and dropout (default: 0)")
    add("--split-seed", type=int, default=0, help="seed of the split into training and test digits (default: 0)")
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(words)
    if options.samples < 2 or options.images < 2:
        parser.error("--samples and --images must be at least 2")
    start = time.monotonic()
    facts = {**runs.facts(), "command": shlex.join(["lrd-uq", "demo", *words])}
    for name, fact in facts.items():
        print(f"{name}: {fact}")
    options.output.mkdir(parents=True, exist_ok=True)
    seeds = range(options.seed, options.seed + options.seeds)
    chosen = specs(options.output, options.steps, seeds, options.split_seed, options.samples, options.images)
    print(
        f"{len(chosen) // len(seeds)} networks with {len(seeds)} seeds, {options.steps} steps each,"
        f" {options.workers} at a time",
        flush=True,
    )
    if options.workers == 1:
        found = list(map(train_and_score, chosen))
    else:
        with ProcessPoolExecutor(options.workers, multiprocessing.get_context("spawn")) as pool:
            found = list(pool.map(train_and_score, chosen))
    scored: dict[str, list[Scored]] = {}
    curves: dict[str, list[plots.Series]] = {}
    for spec, one in zip(chosen, found, strict=True):
        scored.setdefault(spec.name, []).append(one)
        curves.setdefault(spec.name.replace("_", " "), []).append(read_metrics(spec.folder))

    draw_panel(chosen[0], options.output / "panel.png")
    plots.curves(options.output / "curves.png", curves)
    plots.condition_numbers(options.output / "condition.png", curves)
    demo_report.draw_sweep(options.output / "sweep.png", [one.evaluation for one in scored["low_rank_dropout"]], SWEEP)
    facts["seconds in all"] = round(time.monotonic() - start)
    names = ("steps", "samples", "images", "workers", "seeds", "seed", "split_seed")
    settings = {name: getattr(options, name) for name in names}
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
