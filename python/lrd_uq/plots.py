"""Figures: panels of predictions, training curves, condition numbers, and the sweep over kept columns."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import lrd_kernels as lrd
from lrd_uq.data.batch import Batch
from lrd_uq.storage import replacing
from lrd_uq.styles import Style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MODES = 8
Series = Mapping[str, tuple[Sequence[float], Sequence[float]]]  # name -> steps and values


class Subject(NamedTuple):
    """One item of a panel."""

    input: Tensor  # [C_in, H, W]
    target: Tensor  # [C, H, W]; all NaN if the truth is not known
    mask: Tensor  # bool [C, H, W], True where outputs exist
    joint: lrd.JointNormal  # of one item, S = C H W
    style: Style


def subject(item: Batch, joint: lrd.JointNormal, style: Style | None) -> Subject:
    """A subject from an item with outputs [C, H, W] and its joint Gaussian."""
    if style is None or item.target.dim() != 3:
        raise ValueError("only tasks whose outputs are pictures can be drawn")
    mask = torch.ones_like(item.target, dtype=torch.bool) if item.mask is None else item.mask
    return Subject(item.input, item.target, mask, joint, style)


def item_of(joint: lrd.JointNormal, number: int = 0) -> lrd.JointNormal:
    """The joint Gaussian of one item of a batch, with its parts, on the CPU."""

    def one(d: lrd.LowRankMultivariateNormal) -> tuple[Tensor, Tensor, Tensor]:
        return d.loc[number].cpu(), d.cov_factor[number].cpu(), d.cov_diag[number].cpu()

    parts = (
        lrd.LowRankMultivariateNormal(*one(joint.aleatoric), validate_args=False),
        lrd.SemidefiniteNormal(*one(joint.epistemic), validate_args=False),
    )
    return lrd.JointNormal(*one(joint), parts, validate_args=False)


def panel(subjects: Sequence[Subject]) -> Figure:
    """Draws three rows per subject: input, truth and prediction with the modes of the joint covariance; total, diagonal
    and low-rank variance with the aleatoric modes; and the epistemic modes. Each mode has its own colour scale, and its
    share of the variance as its title."""
    figure = _figure(1.15 * (3 + MODES) + 0.5, 3.75 * len(subjects) + 0.4)
    grid = figure.subplots(3 * len(subjects), 3 + MODES, squeeze=False)
    for axes in grid.flat:
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_color("0.8")
    for i, subject in enumerate(subjects):
        _draw_subject(figure, list(grid[3 * i : 3 * i + 3]), subject)
    return figure


def _draw_subject(figure: Figure, rows: Sequence[Sequence[Axes]], subject: Subject) -> None:
    joint, mask, style = subject.joint, subject.mask, subject.style
    elsewhere = subject.target if style.fills else torch.full_like(subject.target, torch.nan)
    prediction = torch.where(mask, joint.loc.view(mask.shape), elsewhere)
    truth = subject.target if style.fills else torch.where(mask, subject.target, torch.nan)
    style = style.like(truth)
    shown = {"input": style.seen(subject.input), "truth": style.picture(truth), "prediction": style.picture(prediction)}
    for axes, (title, image) in zip(rows[0], shown.items(), strict=False):
        if title == "truth" and bool(subject.target.isnan().all()):
            axes.set_axis_off()
            continue
        axes.imshow(image, interpolation="nearest")
        axes.set_title(title, fontsize=9)
    low_rank = joint.cov_factor.square().sum(-1)
    variances = {"total var.": joint.variance, "diagonal D": joint.cov_diag, "low-rank var.": low_rank}
    most = joint.variance[mask.flatten()].max().item()
    for axes, (title, variance) in zip(rows[1], variances.items(), strict=False):
        drawn = axes.imshow(_as_picture(variance, mask).mean(0).numpy(), cmap="viridis", vmin=0, vmax=most)
        axes.set_title(title, fontsize=9)
    bar = figure.colorbar(drawn, ax=list(rows[1][:3]), location="bottom", fraction=0.08, pad=0.02, aspect=35)
    bar.ax.tick_params(labelsize=7)
    for axes in rows[2][:3]:
        axes.set_axis_off()
    parts = (("joint", joint), ("aleatoric", joint.aleatoric), ("epistemic", joint.epistemic))
    for row, (name, part) in zip(rows, parts, strict=True):
        _draw_modes(row[3:], name, part, mask, style)


def _draw_modes(
    tiles: Sequence[Axes], name: str, part: lrd.LowRankMultivariateNormal, mask: Tensor, style: Style
) -> None:
    modes = part.modes(min(MODES, part.cov_factor.shape[-1]))
    columns = modes.vectors  # [S, k]
    for number, axes in enumerate(tiles):
        if number >= columns.shape[-1]:
            axes.set_axis_off()
            continue
        column = columns[:, number]
        column = -column if column.sum() < 0 else column  # the sign of a mode is arbitrary: make its sum positive
        axes.imshow(style.mode(_as_picture(column, mask)), interpolation="nearest")
        share = (modes.singular_values[number].square() / part.variance[mask.flatten()].sum()).item()
        axes.set_title(f"{share:.0%}" if share >= 0.005 else "< 1%", fontsize=8)
    tiles[0].set_ylabel(name, fontsize=9)


def _as_picture(values: Tensor, mask: Tensor) -> Tensor:
    """[S] as [C, H, W], with NaN where there is no output."""
    return torch.where(mask, values.view(mask.shape), torch.nan)


def running_sums(items: Sequence[tuple[Tensor, lrd.LowRankMultivariateNormal]], outputs: int) -> Figure:
    """Draws running sums for targets [S] and their Gaussians: the sum of the first k outputs over all positions for
    k = 1, 2, ..., with 90 % intervals of the joint Gaussian and of its variances alone."""
    figure = _figure(3.6 * len(items) + 0.6, 3.2)
    for axes, (target, joint) in zip(figure.subplots(1, len(items), squeeze=False)[0], items, strict=True):
        weights = torch.ones(outputs, outputs).tril().repeat_interleave(len(target) // outputs, 1)  # [outputs, S]
        found, steps = joint.aggregate(weights), range(1, outputs + 1)
        alone = 1.645 * (weights @ joint.variance).sqrt()
        width = 1.645 * found.covariance.diagonal(dim1=-2, dim2=-1).sqrt()
        axes.fill_between(steps, found.mean - width, found.mean + width, color="C0", alpha=0.25, label="90 %, joint")
        for sign in (-1, 1):
            label = "90 %, variances alone" if sign > 0 else None
            axes.plot(steps, found.mean + sign * alone, color="C1", linewidth=1, linestyle="--", label=label)
        axes.plot(steps, found.mean, color="C0", linewidth=1, label="prediction")
        axes.plot(steps, weights @ target, color="black", linewidth=1.3, label="truth")
        _finish(axes, "sum of the first outputs", "how many")
    axes.legend(frameon=False, fontsize=7)
    return figure


def curves(path: Path, runs: Mapping[str, Sequence[Series]], about: Mapping[str, Any] | None = None) -> None:
    """Draws validation log-likelihood, loss and trace of the low-rank part over the steps, one line for each seed of a
    run."""
    wanted = {
        "val_log_prob": "validation log-likelihood, nats per image (expected weights)",
        "loss": "training loss, per output",
        "trace_ratio": "trace of the low-rank part over the squared residuals",
    }
    figure = _figure(11, 3.6)
    for axes, (name, title) in zip(figure.subplots(1, 3), wanted.items(), strict=True):
        for number, (run, seeds) in enumerate(runs.items()):
            found = [series[name] for series in seeds if name in series and any(series[name][1])]
            for seed, points in enumerate(found):
                axes.plot(*points, label=run if seed == 0 else None, linewidth=1, color=f"C{number}")
        _finish(axes, title)
        if name == "val_log_prob":
            # The first epochs lie far below the others: leave them out of the axis.
            values = [v for seeds in runs.values() for series in seeds for v in series.get(name, ((), ()))[1]]
            if values:
                top = max(values)
                axes.set_ylim(top - 0.35 * abs(top), top + 0.03 * abs(top))
            axes.legend(frameon=False, fontsize=8)
    save(figure, path, about)


def condition_numbers(path: Path, runs: Mapping[str, Sequence[Series]], about: Mapping[str, Any] | None = None) -> None:
    """Draws condition numbers over the steps, one line for each seed of a run: an upper bound for the covariance, and
    that of the capacitance matrix."""
    figure = _figure(9, 3.4)
    titles = {
        "condition_upper": "condition of the covariance (upper bound)",
        "capacitance_condition": "condition of the capacitance matrix",
    }
    for axes, (name, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        for number, (run, seeds) in enumerate(runs.items()):
            for seed, series in enumerate(seeds):
                if name in series:
                    axes.semilogy(*series[name], label=run if seed == 0 else None, linewidth=1, color=f"C{number}")
        _finish(axes, f"{title}, worst of the batch")
        if name == "condition_upper":
            axes.legend(frameon=False, fontsize=8)
    save(figure, path, about)


def sweep(
    path: Path,
    ranks: Sequence[int],
    means: Mapping[str, Sequence[Sequence[float]]],
    sds: Mapping[str, Sequence[Sequence[float]]],
    lines: Mapping[str, float],
) -> None:
    """Draws log-likelihood and its spread over images, [seeds][ranks], against the number of kept columns, and
    reference `lines`."""
    figure = _figure(9, 3.6)
    left, right = figure.subplots(1, 2)
    for axes, values in ((left, means), (right, sds)):
        for number, (name, seeds) in enumerate(values.items()):
            for one in seeds if len(seeds) > 1 else []:
                axes.plot(ranks, one, color=f"C{number}", linewidth=0.7, alpha=0.5)
            mean = [sum(column) / len(seeds) for column in zip(*seeds, strict=True)]
            axes.plot(ranks, mean, marker="o", color=f"C{number}", label=name)
    for (name, level), style in zip(lines.items(), (":", "--", "-."), strict=False):
        left.axhline(level, color="black", linestyle=style, linewidth=1, label=f"{name}: {level:.1f}")
    for axes, title in ((left, "mean log-likelihood, nats per image"), (right, "its standard deviation over images")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ranks, [str(rank) for rank in ranks])
        axes.minorticks_off()
        _finish(axes, title, "columns kept of the joint factor")
        axes.legend(frameon=False, fontsize=8)
    save(figure, path)


def save(figure: Figure, path: Path, about: Mapping[str, Any] | None = None) -> None:
    """Writes a figure. PNG, SVG and PDF files carry `about`, what they are of, as a description in JSON."""
    key = {".png": "Description", ".svg": "Description", ".pdf": "Subject"}.get(path.suffix.lower())
    metadata = {key: json.dumps(about)} if key and about is not None else None
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=130, metadata=metadata)


def pixels(figure: Figure) -> np.ndarray:
    """The figure as a picture: uint8 [H, W, 3]."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def _finish(axes: Axes, title: str, xlabel: str = "step") -> None:
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(xlabel, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'lrd-kernels[train]'") from error
    return Figure(figsize=(width, height), layout="constrained")
