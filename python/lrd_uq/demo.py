"""`python -m lrd_uq.demo`: fits a low-rank and a diagonal Gaussian to handwritten digits, draws and compares them."""

from __future__ import annotations

import argparse
import math
import os
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import lrd_kernels as lrd
from lrd_uq.data.digits import SIDE, load_digits

TRAIN = 4000  # of 5,000 digits; the rest is held out
BATCH = 256
EPS = 0.01  # bounds the variance of a pixel from below: many at the border are black in every digit
TILES = 10  # pictures in a row


class Curve(NamedTuple):
    """Log-likelihoods while fitting, nats per digit."""

    steps: list[int]
    train: list[float]  # mean over the minibatches since the last entry
    held_out: list[float]


class Fit(NamedTuple):
    """A fitted Gaussian and what it cost."""

    model: lrd.LowRankMultivariateNormal
    curve: Curve
    seconds: float


class Score(NamedTuple):
    """A row of the report's table: log-likelihoods in nats per digit."""

    name: str
    numbers: int  # that describe the model
    train: float
    held_out: float
    error: float  # standard error of `held_out`
    seconds: float | None  # of the fit; None where it is in closed form


class Results(NamedTuple):
    """What the demo found and where it wrote it."""

    low_rank: Score
    diagonal: Score
    closed_form: Score
    picture: Path
    report: Path


def fit(name: str, train: Tensor, held_out: Tensor, rank: int, steps: int, generator: torch.Generator) -> Fit:
    """Fits a Gaussian of covariance `diag(EPS + exp(raw_diag)) + cov_factor cov_factor^T` by gradient descent.

    Args:
        train: [N, S]
        held_out: [M, S], looked at only for the curve
        rank: columns of the factor; 0 for a diagonal Gaussian
    """
    S = train.shape[1]
    # From a mean of zero the factor would learn the mean as a mode, and be slow to give it back.
    mean = train.mean(0).requires_grad_()
    cov_factor = (0.01 * torch.randn(S, rank, generator=generator)).requires_grad_()
    raw_diag = torch.full((S,), math.log(0.05), requires_grad=True)
    # The diagonal lives on a log scale, hence its larger steps.
    groups: list[dict[str, Any]] = [{"params": [mean, cov_factor], "lr": 0.01}, {"params": [raw_diag], "lr": 0.2}]
    optimizer = torch.optim.Adam(groups)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    def model() -> lrd.LowRankMultivariateNormal:
        return lrd.LowRankMultivariateNormal(mean.detach(), cov_factor.detach(), EPS + raw_diag.detach().exp())

    curve = Curve([], [], [])
    recent: list[float] = []
    start = time.monotonic()
    for step in range(1, steps + 1):
        batch = train[torch.randint(len(train), (BATCH,), generator=generator)]  # [BATCH, S]
        loss = lrd.nll_loss(mean, raw_diag, cov_factor, batch, eps=EPS)  # per pixel
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        recent.append(-S * loss.item())
        if step % max(steps // 100, 1) == 0 or step == steps:
            curve.steps.append(step)
            curve.train.append(sum(recent) / len(recent))
            curve.held_out.append(model().log_prob(held_out).mean().item())
            recent.clear()
            if len(curve.steps) % 10 == 0 or step == steps:
                spent = time.monotonic() - start
                print(
                    f"  {name}: step {step:>{len(str(steps))}} of {steps}, held out {curve.held_out[-1]:7.1f} nats,"
                    f" {spent:5.1f} s, about {spent * (steps - step) / step:.1f} s left",
                    flush=True,
                )
    return Fit(model(), curve, time.monotonic() - start)


def score(
    name: str,
    model: lrd.LowRankMultivariateNormal,
    train: Tensor,
    held_out: Tensor,
    seconds: float | None = None,
) -> Score:
    log_probs = model.log_prob(held_out).double()  # [M]
    return Score(
        name,
        numbers=model.loc.numel() + model.cov_factor.numel() + model.cov_diag.numel(),
        train=model.log_prob(train).double().mean().item(),
        held_out=log_probs.mean().item(),
        error=log_probs.std().item() / math.sqrt(len(log_probs)),
        seconds=seconds,
    )


def closed_form(train: Tensor) -> lrd.LowRankMultivariateNormal:
    """The best diagonal Gaussian with variances of at least EPS: what gradient descent must come near."""
    variance = train.var(0, correction=0).clamp(min=EPS)
    return lrd.LowRankMultivariateNormal(train.mean(0), train.new_zeros(train.shape[1], 0), variance)


def leading_modes(cov_factor: Tensor) -> Tensor:
    """The factor [S, R] turned to orthogonal columns, longest first, with the same `P P^T`.

    Its columns are the eigenvectors of `P P^T` times their singular values: one standard deviation along each.
    """
    _, rotation = torch.linalg.eigh(cov_factor.mT @ cov_factor)  # [R, R], ascending
    modes = cov_factor @ rotation.flip(-1)
    # Signs are free: let the heavier side be positive.
    return modes * torch.where(modes.sum(0) < 0, -1.0, 1.0)


def draw(path: Path, held_out: Tensor, low_rank: Fit, diagonal: Fit, best: Score, generator: torch.Generator) -> None:
    """Digits, samples of both models, the mean and modes of the low-rank one, and the curves of both fits."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    rank = low_rank.model.cov_factor.shape[-1]
    pictures = [
        ("Held-out digits", held_out[:TILES]),
        (f"Samples of the low-rank Gaussian (rank {rank})", low_rank.model.sample((TILES,), generator=generator)),
        ("Samples of the diagonal Gaussian", diagonal.model.sample((TILES,), generator=generator)),
    ]
    heights = [1.25, 1.25, 1.25, 1.45, 3.2]  # inches
    figure = Figure(figsize=(10, sum(heights)), layout=ConstrainedLayoutEngine(w_pad=0.06))
    rows = figure.subfigures(5, 1, height_ratios=heights, squeeze=False)[:, 0]
    for row, (title, images) in zip(rows, pictures, strict=False):
        row.suptitle(title, x=0.01, ha="left", fontsize=11)
        for axes, image in zip(row.subplots(1, TILES), images, strict=True):
            axes.imshow(image.view(SIDE, SIDE).numpy(), cmap="gray_r", vmin=0, vmax=1)
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_color("0.8")

    modes = leading_modes(low_rank.model.cov_factor)[:, : TILES - 1]  # [S, up to 9]
    limit = modes.abs().max().item()
    rows[3].suptitle(
        "Low-rank Gaussian: mean, and one standard deviation along its leading modes (red adds ink, blue removes it)",
        x=0.01,
        ha="left",
        fontsize=11,
    )
    tiles = rows[3].subplots(1, TILES)
    for axes in tiles:
        axes.set_axis_off()
    tiles[0].imshow(low_rank.model.mean.view(SIDE, SIDE).numpy(), cmap="gray_r", vmin=0, vmax=1)
    tiles[0].set_title("mean", fontsize=9)
    for number, (axes, mode) in enumerate(zip(tiles[1:], modes.T, strict=False), start=1):
        axes.imshow(mode.view(SIDE, SIDE).numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit)
        axes.set_title(f"mode {number}", fontsize=9)

    rows[4].suptitle(
        "Log-likelihood of held-out digits while fitting (faint: of the minibatches)", x=0.01, ha="left", fontsize=11
    )
    axes = rows[4].subplots()
    for name, curve, colour in (
        (f"low rank ({rank})", low_rank.curve, "tab:red"),
        ("diagonal", diagonal.curve, "tab:blue"),
    ):
        axes.plot(curve.steps, curve.train, color=colour, alpha=0.35, linewidth=1)
        axes.plot(curve.steps, curve.held_out, color=colour, label=f"{name}: {curve.held_out[-1]:.1f}")
    label = f"diagonal in closed form: {best.held_out:.1f}"
    axes.axhline(best.held_out, color="black", linestyle=":", linewidth=1, label=label)
    axes.set(xlabel="step", ylabel="nats per digit", xlim=(0, diagonal.curve.steps[-1]))
    # The first steps lie far below all that follows.
    axes.set_ylim(bottom=min(best.held_out, diagonal.curve.held_out[-1]) - 50)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="best")
    figure.savefig(path, dpi=150)


def facts() -> dict[str, str]:
    """Machine, kernels and versions, as printed and reported."""
    statuses = lrd.backends()
    backend = "cpu" if statuses["cpu"].available else "reference"  # all tensors here are on the CPU
    return {
        "machine": f"{cpu_model()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads in use",
        "backend": f"{backend} ({statuses[backend].detail})",
        "versions": f"lrd-kernels {lrd.__version__}, torch {torch.__version__}, Python {platform.python_version()}",
    }


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def table(scores: Sequence[Score]) -> list[str]:
    """The scores as lines of a Markdown table, columns aligned to be read as plain text too."""
    cells = [("model", "numbers", "training digits", "held-out digits", "seconds")]
    for s in scores:
        seconds = "closed form" if s.seconds is None else f"{s.seconds:.1f}"
        cells.append((s.name, f"{s.numbers:,}", f"{s.train:.1f}", f"{s.held_out:.1f} ± {s.error:.1f}", seconds))
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = ["| " + " | ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) + " |" for row in cells]
    rule = "|" + "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]) + "|"
    return [lines[0], rule, *lines[1:]]


def findings(low_rank: Score, diagonal: Score, best: Score) -> list[str]:
    return [
        f"The low-rank Gaussian gives a held-out digit {low_rank.held_out - diagonal.held_out:.1f} nats more than the"
        " diagonal one.",
        "Gradient descent brings the diagonal one to within"
        f" {abs(best.held_out - diagonal.held_out):.1f} nats of its closed form.",
    ]


def report(
    command: str, settings: str, machine: dict[str, str], scores: Sequence[Score], found: Sequence[str], picture: str
) -> str:
    """The report as Markdown."""
    return "\n".join(
        [
            "# Gaussians fitted to handwritten digits",
            "",
            settings,
            "",
            f"![Digits, samples, modes and training curves]({picture})",
            "",
            "## Log-likelihood, nats per digit",
            "",
            *table(scores),
            "",
            *found,
            "",
            "Higher is better. These are densities of 784 pixels in [0, 1], so they may be positive. ± is one standard"
            " error over the held-out digits. The closed form is the mean and the variance of the training digits, the"
            f" variance raised to {EPS} where it is smaller. Seconds include the points of the curves."
            f" The grain of the samples is the diagonal's: no pixel has a variance below {EPS}.",
            "",
            "## How it was made",
            "",
            f"- date: {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
            f"- command: `{command}`",
            *(f"- {name}: {fact}" for name, fact in machine.items()),
            "",
        ]
    )


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def main(arguments: Sequence[str] | None = None) -> Results:
    parser = argparse.ArgumentParser(
        prog="python -m lrd_uq.demo", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("reports/demo"), help="where the picture and report go")
    parser.add_argument("--steps", type=positive, default=1000, help="gradient steps of each fit")
    parser.add_argument("--rank", type=positive, default=16, help="columns of the covariance factor")
    parser.add_argument("--seed", type=int, default=0, help="of the split, the fits and the samples")
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(arguments)
    try:
        import matplotlib  # noqa: F401  (missing, it should show before the fits)
    except ImportError as error:
        raise ImportError("the picture needs matplotlib: pip install 'lrd-kernels[demo]'") from error
    machine = facts()
    for name, fact in machine.items():
        print(f"{name}: {fact}")

    images = load_digits(options.seed).images  # [5000, S]
    train, held_out = images[:TRAIN], images[TRAIN:]
    settings = (
        f"{len(train):,} digits to train on, {len(held_out):,} held out, {images.shape[1]} pixels each."
        f" Rank {options.rank}, {options.steps:,} steps of Adam on minibatches of {BATCH}, seed {options.seed}."
    )
    print(settings, flush=True)
    generator = torch.Generator().manual_seed(options.seed)
    low_rank = fit("low rank", train, held_out, options.rank, options.steps, generator)
    diagonal = fit("diagonal", train, held_out, 0, options.steps, generator)

    scores = (
        score(f"low rank ({options.rank})", low_rank.model, train, held_out, low_rank.seconds),
        score("diagonal", diagonal.model, train, held_out, diagonal.seconds),
        score("diagonal, mean and variance", closed_form(train), train, held_out),
    )
    found = findings(*scores)
    print("Log-likelihood, nats per digit:", *table(scores), *found, sep="\n")

    options.output.mkdir(parents=True, exist_ok=True)
    results = Results(*scores, options.output / "digits.png", options.output / "report.md")
    draw(results.picture, held_out, low_rank, diagonal, results.closed_form, generator)
    command = shlex.join(["python", "-m", "lrd_uq.demo", *arguments])
    results.report.write_text(report(command, settings, machine, scores, found, results.picture.name), encoding="utf-8")
    print(f"Wrote {results.picture} and {results.report}")
    return results


if __name__ == "__main__":
    main()
