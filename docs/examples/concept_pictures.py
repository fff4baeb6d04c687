"""Draws docs/pictures/joint.png and condition.png: `python docs/examples/concept_pictures.py`. Takes a few seconds."""

import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import torch
from front_picture import BLUE, ORANGE, RANK, digits
from matplotlib import pyplot as plt

import lrd_kernels as lrd

PICTURES = Path(__file__).parents[1] / "pictures"
GREEN = "#3a8f4d"
SIDE = 28


def ellipse(mean: torch.Tensor, covariance: torch.Tensor) -> torch.Tensor:
    """Points one standard deviation away from the mean, [2, 200]."""
    angle = torch.linspace(0, 2 * math.pi, 200)
    values, vectors = torch.linalg.eigh(covariance)
    circle = torch.stack([angle.cos(), angle.sin()])
    return mean[:, None] + vectors @ (values.clamp(min=0).sqrt()[:, None] * circle)


def draw_joint() -> None:
    """Three predictions of two outputs, and the covariance that `lrd.joint` makes of them, with its two parts."""
    means = torch.tensor([[-1.0, -0.8], [0.2, 0.1], [1.1, 0.9]])  # [T, S]
    factors = torch.tensor([[[0.9], [0.5]], [[1.0], [0.7]], [[0.8], [0.9]]])  # [T, S, 1]
    diags = torch.full((3, 2), 0.06)
    variances = diags + factors.square().sum(-1)
    low_rank, diagonal = lrd.joint(means, factors, diags), lrd.joint(means, None, variances)
    figure, rows = plt.subplots(2, 4, figsize=(9, 4.6), dpi=160, sharex=True, sharey=True, layout="constrained")
    titles = ("three predictions", "aleatoric part", "epistemic part", "joint")
    for axes, joint, name in zip(rows, (diagonal, low_rank), ("variances\nalone", "with\ncorrelations"), strict=True):
        independent = joint is diagonal
        for t in range(3):
            covariance = torch.diag(variances[t]) if independent else torch.diag(diags[t]) + factors[t] @ factors[t].mT
            axes[0].plot(*ellipse(means[t], covariance), color="0.45")
            axes[0].plot(*means[t], "o", color="0.25", markersize=4)
        parts = (joint.aleatoric, joint.epistemic, joint)
        for each, part, colour in zip(axes[1:], parts, (BLUE, ORANGE, GREEN), strict=True):
            covariance = torch.diag(part.cov_diag) + part.cov_factor @ part.cov_factor.mT
            covariance = torch.diag(covariance.diagonal()) if independent else covariance
            points = ellipse(joint.loc, covariance)
            each.fill(*points, color=colour, alpha=0.25)
            each.plot(*points, color=colour)
        axes[0].set_ylabel(name, rotation=0, ha="right", va="center")
    for each, title in zip(rows[0], titles, strict=True):
        each.set_title(title, fontsize=10.5)
    for each in rows.flat:
        each.set(xlim=(-2.4, 2.4), ylim=(-2.4, 2.4), xticks=[], yticks=[], aspect="equal")
    rows[1, 0].set_xlabel("first output", fontsize=9)
    figure.savefig(PICTURES / "joint.png")
    plt.close(figure)


def draw_condition() -> None:
    """Samples of the lower half of four digits, given the upper half."""
    fitted, held_out = digits()
    model = lrd.LowRankMultivariateNormal.from_samples(fitted, diag=1e-3, rank=RANK)
    upper = torch.arange(SIDE * SIDE) < SIDE * SIDE // 2
    generator = torch.Generator().manual_seed(0)
    chosen, names = (0, 3, 6, 9), ("truth", "seen", "expected", "sample", "sample", "sample", "standard\ndeviation")
    figure, rows = plt.subplots(len(chosen), len(names), figsize=(7, 4.2), dpi=160, layout="constrained")
    for axes, digit in zip(rows, chosen, strict=True):
        truth = held_out[1, digit]
        one = lrd.LowRankMultivariateNormal(model.loc[digit], model.cov_factor[digit], model.cov_diag[digit])
        rest = one.condition(upper, truth[upper])  # the Gaussian of the 392 lower pixels
        seen = torch.where(upper, truth, torch.nan)
        lower = [rest.mean, *rest.sample((3,), generator=generator)]
        pictures = [truth, seen, *(torch.where(upper, truth, 0).index_put((~upper,), half) for half in lower)]
        for each, picture in zip(axes, pictures, strict=False):
            each.imshow(picture.reshape(SIDE, SIDE), cmap="gray", vmin=0, vmax=1)
        spread = torch.full((SIDE * SIDE,), torch.nan).index_put((~upper,), rest.stddev)
        axes[-1].imshow(spread.reshape(SIDE, SIDE), cmap="magma", vmin=0)
        for each in axes:
            each.set(xticks=[], yticks=[], facecolor="#ffe9c4")
            each.spines[:].set_visible(False)
    for each, name in zip(rows[0], names, strict=True):
        each.set_title(name, fontsize=10.5)
    figure.savefig(PICTURES / "condition.png")
    plt.close(figure)


if __name__ == "__main__":
    draw_joint()
    draw_condition()
