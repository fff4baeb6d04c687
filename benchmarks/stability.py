"""Trains a small network on real digits with several ranks and floors of the diagonal, and counts the lost steps.

The task is inpainting: 8 of the 28 rows of a digit are given, and the network predicts a Gaussian over the 560 pixels
of the others. Each setting is trained twice from the same initial weights on the same digits: with this package, and
with the class of torch.distributions in float32, both without safeguards around the loss. A step is lost if its loss
raises, or if its loss or a gradient is not finite; the weights are then left unchanged.

Then the lower and upper bounds on the condition number of the covariance are compared with its exact value in float64,
for predictions of the trained networks and for random covariances, and plotted.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import lrd_kernels as lrd
from benchmarks import commands, machine
from lrd_uq.data.digits import SIDE, load_digits

RANKS = (4, 8, 16, 20, 32, 64)
FLOORS = (1e-2, 1e-3, 1e-4)
SEEN = slice(10, 18)  # rows of the picture
OUTPUTS = SIDE * (SIDE - 8)
BATCH, ALPHA, TRAIN = 32, 0.125, 1000


class Inpainter(nn.Module):
    """Maps a picture and its mask to mean [B, S], raw diagonal [B, S] and factor [B, S, R] of the masked rows."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.enter = nn.Conv2d(2, 24, 4, stride=2, padding=1)
        self.down = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(24, 48, 3, padding=1), nn.ReLU())
        self.middle = nn.Sequential(nn.Conv2d(48, 48, 3, padding=1), nn.ReLU(), nn.Conv2d(48, 48, 3, padding=1))
        self.up = nn.Sequential(nn.Conv2d(72, 48, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(48, 24, 2, stride=2))
        self.mean, self.raw_diag = nn.Conv2d(24, 1, 1), nn.Conv2d(24, 1, 1)
        self.factor = nn.Conv2d(24, rank, 1, bias=False)
        nn.init.constant_(self.raw_diag.bias, -3.0)  # type: ignore[arg-type]
        with torch.no_grad():
            self.factor.weight.mul_(0.1)

    def forward(self, pictures: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        seen = torch.zeros_like(pictures)
        seen[:, SEEN] = 1
        skip = self.enter(torch.stack([pictures * seen, seen], 1)).relu()
        low = self.down(skip)
        low = (low + self.middle(low)).relu()
        high = self.up(torch.cat([nn.functional.interpolate(low, scale_factor=2.0), skip], 1)).relu()
        parts = (masked(head(high)) for head in (self.mean, self.raw_diag, self.factor))
        mean, raw_diag, factor = parts
        return mean[:, 0], raw_diag[:, 0], factor.mT


def masked(maps: Tensor) -> Tensor:
    """The rows that the network does not see: [..., 28, 28] -> [..., 560]."""
    return torch.cat([maps[..., : SEEN.start, :], maps[..., SEEN.stop :, :]], -2).flatten(-2)


def ours(mean: Tensor, raw_diag: Tensor, factor: Tensor, target: Tensor, eps: float) -> Tensor:
    return lrd.nll_loss(mean, raw_diag, factor, target, eps=eps)


def torchs(mean: Tensor, raw_diag: Tensor, factor: Tensor, target: Tensor, eps: float) -> Tensor:
    model = torch.distributions.LowRankMultivariateNormal(mean, factor, eps + raw_diag.exp())
    return -model.log_prob(target).mean() / target.shape[-1]


LOSSES = {"lrd": ours, "torch": torchs}


def train(digits: Tensor, rank: int, eps: float, steps: int, loss_of: str, seed: int) -> tuple[Inpainter, dict]:
    """A network trained for `steps` steps, and the numbers of lost steps by cause."""
    torch.manual_seed(seed)
    net = Inpainter(rank)
    optimizer = torch.optim.AdamW(net.parameters(), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=steps, pct_start=0.1)
    raised = not_finite = 0
    last = float("nan")
    for _ in range(steps):
        batch = digits[torch.randint(len(digits), (BATCH,))]
        mean, raw_diag, factor = net(batch)
        target = masked(batch)
        optimizer.zero_grad()
        try:
            loss = (mean - target).square().mean() / 2 + ALPHA * LOSSES[loss_of](mean, raw_diag, factor, target, eps)
            loss.backward()
        except (torch.linalg.LinAlgError, ValueError):  # a failed Cholesky, and torch's argument checks
            raised += 1
            optimizer.zero_grad()
        else:
            if lrd.filter_gradients(net.parameters(), "skip") or not loss.isfinite():
                not_finite += 1
                optimizer.zero_grad()
            else:
                last = loss.item()
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
        schedule.step()
    return net, {"raised": raised, "not_finite": not_finite, "last_loss": last}


def exact_condition(factor: Tensor, diag: Tensor) -> Tensor:
    """Condition numbers of the dense matrices, in float64."""
    wide = factor.double()
    values = torch.linalg.eigvalsh(torch.diag_embed(diag.double()) + wide @ wide.mT)
    return values[..., -1] / values[..., 0]


def compare_bounds(factor: Tensor, diag: Tensor) -> dict[str, list[float]]:
    """Bounds and exact values of a batch, sorted by the exact values."""
    lower, upper = lrd.condition_bounds(factor, diag)
    exact = torch.cat([exact_condition(f, d) for f, d in zip(factor.split(50), diag.split(50), strict=True)])
    order = exact.argsort()
    return {name: t[order].tolist() for name, t in (("lower", lower), ("exact", exact), ("upper", upper))}


def random_covariances(count: int) -> tuple[Tensor, Tensor]:
    """Covariances of rank 8 whose column and diagonal scales span several orders of magnitude."""
    generator = torch.Generator().manual_seed(0)
    factor = torch.randn(count, OUTPUTS, 8, generator=generator)
    factor = factor * 10 ** (2 * torch.rand(count, 1, 8, generator=generator) - 2)
    diag = 10 ** (-4 * torch.rand(count, 1, generator=generator) * torch.rand(count, OUTPUTS, generator=generator))
    return factor, diag


def enclosed(found: dict[str, list[float]]) -> int:
    slack = 1 + 1e-9  # the exact value has rounding errors too
    rows = zip(found["lower"], found["exact"], found["upper"], strict=True)
    return sum(low <= exact * slack and exact <= high * slack for low, exact, high in rows)


def draw(path: Path, bounds: dict[str, dict[str, list[float]]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, len(bounds), figsize=(10, 6), layout="constrained", sharex=True)
    for column, (name, found) in zip(axes.T, bounds.items(), strict=True):
        rank = range(1, len(found["exact"]) + 1)
        for axis, unit in zip(column, ([1.0] * len(rank), found["exact"]), strict=True):
            for what, color in (("upper", "tab:red"), ("exact", "black"), ("lower", "tab:green")):
                label = "exact, float64" if what == "exact" else f"{what} bound"
                values = [v / u for v, u in zip(found[what], unit, strict=True)]
                axis.plot(rank, values, color=color, linewidth=1, label=label)
        column[0].set(yscale="log", title=f"{len(rank)} {name} covariances")
        column[1].set(xlabel="covariances, by exact value")
    axes[0, 0].set_ylabel("condition number of the covariance")
    axes[1, 0].set_ylabel("as a multiple of the exact value")
    axes[0, 0].legend(frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def table(document: dict) -> str:
    """Lost steps of each setting: this package / torch's class."""
    steps = document["settings"]["steps"]
    lines = [f"lost steps of {steps}: lrd / torch's class in float32", ""]
    lines.append("| rank | " + " | ".join(f"eps {eps:g}" for eps in document["settings"]["floors"]) + " |")
    lines.append("|---|" + "---|" * len(document["settings"]["floors"]))
    for rank in document["settings"]["ranks"]:
        cells = []
        for eps in document["settings"]["floors"]:
            runs = {
                r["loss"]: r["raised"] + r["not_finite"]
                for r in document["runs"]
                if (r["rank"], r["eps"]) == (rank, eps)
            }
            cells.append(f"{runs.get('lrd', '-')} / {runs.get('torch', '-')}")
        lines.append(f"| {rank} | " + " | ".join(cells) + " |")
    for name, count in document["enclosed"].items():
        lines.append(f"\nbounds enclose the exact condition number of {count[0]} of {count[1]} {name} covariances")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = commands.parser("benchmarks.stability", __doc__, "stability")
    parser.add_argument("--ranks", nargs="+", type=int, default=list(RANKS), help="ranks of the factor")
    parser.add_argument("--floors", nargs="+", type=float, default=list(FLOORS), help="eps, the smallest variance")
    parser.add_argument("--steps", type=int, default=300, help="training steps")
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial weights and of the batches")
    parser.add_argument("--count", type=int, default=1000, help="covariances of each kind whose bounds are compared")
    options = parser.parse_args(argv)
    pictures = load_digits().images.reshape(-1, SIDE, SIDE)
    training, held_out = pictures[:TRAIN], pictures[TRAIN : TRAIN + options.count]

    settings = [(rank, eps) for rank in options.ranks for eps in options.floors]
    runs, predicted = [], []
    start = time.monotonic()
    for done, (rank, eps) in enumerate(settings):
        for loss_of in LOSSES:
            net, counts = train(training, rank, eps, options.steps, loss_of, options.seed)
            runs.append({"rank": rank, "eps": eps, "loss": loss_of, **counts})
            if loss_of == "lrd":  # each network predicts its share of the digits
                with torch.no_grad():
                    _, raw_diag, factor = net(held_out[done :: len(settings)])
                predicted.append((factor, lrd.positive_diag(raw_diag, eps)))
        left = (time.monotonic() - start) * (len(settings) - done - 1) / (done + 1)
        lost = " / ".join(str(run["raised"] + run["not_finite"]) for run in runs[-2:])
        what = f"rank {rank}, eps {eps:g}: {lost} steps lost (about {left:.0f} s left)"
        print(f"[{done + 1}/{len(settings)}] {what}", file=sys.stderr, flush=True)
    pieces = [compare_bounds(factor, diag) for factor, diag in predicted]
    joined = {name: [v for piece in pieces for v in piece[name]] for name in ("lower", "exact", "upper")}
    ranking = sorted(range(len(joined["exact"])), key=joined["exact"].__getitem__)
    bounds = {
        "trained": {name: [values[i] for i in ranking] for name, values in joined.items()},
        "random": compare_bounds(*random_covariances(options.count)),
    }
    document = {
        "machine": machine.facts(),
        "settings": {name: getattr(options, name) for name in ("ranks", "floors", "steps", "seed", "count")},
        "runs": runs,
        "enclosed": {name: [enclosed(found), len(found["exact"])] for name, found in bounds.items()},
        "bounds": {
            name: {k: [float(f"{v:.5g}") for v in values] for k, values in found.items()}
            for name, found in bounds.items()
        },
    }
    machine.write_json(options.output / "stability.json", document)
    draw(options.output / "condition_bounds.png", bounds)
    print(table(document))
    lost = sum(run["raised"] + run["not_finite"] for run in runs if run["loss"] == "lrd")
    return 1 if lost or any(inside != total for inside, total in document["enclosed"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
