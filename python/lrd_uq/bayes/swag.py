"""SWAG (Maddox et al. 2019): a Gaussian over all weights, from snapshots taken during the last steps of training.

Its mean is the mean of the snapshots. One half of its covariance is the diagonal of their variances, the other half is
the low-rank covariance of the last K. With z ~ N(0, I),

    w = mean + (sqrt(variance) z_1 + A z_2 / sqrt(K - 1)) / sqrt(2)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lrd_uq.bayes.base import Method, Predict, keep_precision, predict_with
from lrd_uq.bayes.noise import generator
from lrd_uq.checks import check_positive
from lrd_uq.heads import Gaussian, Output
from lrd_uq.nets import GaussianNet


class SwagNet(nn.Module):
    """A network and the moments of its snapshots, saved with the weights."""

    mean: Tensor  # [n], over all trainable weights
    square: Tensor  # [n], mean of the squares
    deviations: Tensor  # [K, n], last snapshots minus the mean at that time
    count: Tensor  # number of snapshots so far

    def __init__(self, net: GaussianNet, columns: int) -> None:
        super().__init__()
        self.net = net
        n = len(self.weights())
        for name, shape in (("mean", (n,)), ("square", (n,)), ("deviations", (columns, n)), ("count", ())):
            self.register_buffer(name, torch.zeros(shape))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        return keep_precision(self, super()._apply, fn, recurse)

    def forward(self, x: Tensor) -> Output:
        return self.net(x)

    def trainable(self) -> dict[str, Tensor]:
        return {name: p for name, p in self.net.named_parameters() if p.requires_grad}

    def weights(self) -> Tensor:
        """All trainable weights, concatenated: [n]."""
        return torch.cat([p.detach().flatten() for p in self.trainable().values()])

    def by_name(self, weights: Tensor) -> dict[str, Tensor]:
        """Concatenated weights [n] as parameters of the network."""
        parts = weights.split([p.numel() for p in self.trainable().values()])
        return {
            name: part.view_as(p).to(p.dtype) for (name, p), part in zip(self.trainable().items(), parts, strict=True)
        }

    @torch.no_grad()
    def snapshot(self) -> None:
        """Adds the current weights to the moments."""
        weights, count = self.weights(), float(self.count)
        self.mean.mul_(count / (count + 1)).add_(weights / (count + 1))
        self.square.mul_(count / (count + 1)).add_(weights.square() / (count + 1))
        self.deviations[int(count) % len(self.deviations)] = weights - self.mean
        self.count += 1

    def draw(self, generator: torch.Generator) -> Tensor:
        """A draw of all trainable weights: [n]."""
        used = min(int(self.count), len(self.deviations))
        spread = (self.square - self.mean.square()).clamp(min=0).sqrt()
        options: dict[str, Any] = {"device": self.mean.device, "dtype": self.mean.dtype}
        noise = torch.randn(used, generator=generator, **options)
        along = noise @ self.deviations[:used] / math.sqrt(max(used - 1, 1))
        own = spread * torch.randn(len(spread), generator=generator, **options)
        return self.mean + (own + along) / math.sqrt(2)


class Swag(Method):
    """Takes snapshots of the weights during the last part of training, at a constant learning rate.

    Args:
        start: fraction of the steps after which snapshots are taken.
        snapshots: number of snapshots, evenly spaced.
        columns: rank of the low-rank part: the number of snapshots, counted from the end, that it is built from.
        rate: the constant learning rate, as a fraction of the peak. A higher rate gives a wider distribution.

    Raises:
        ValueError: if an argument is out of range. Also for networks with batch normalisation, and when predictions are
            sampled before there are two snapshots.

    Examples:
        >>> from lrd_uq.bayes import Swag
        >>> from lrd_uq.heads import LowRankHead
        >>> from lrd_uq.nets import DigitsUNet, GaussianNet
        >>> method = Swag(start=0.5, snapshots=2, columns=2)
        >>> net = method.prepare(GaussianNet(DigitsUNet(), LowRankHead(24, rank=8)))
        >>> for step in range(1, 5):  # JointUncertainty does this after every step
        ...     method.after_step(net, step, 4)
        >>> predictions = method.sample_predictions(net, torch.zeros(1, 2, 28, 28), T=2)
        >>> [tuple(prediction.mean.shape) for prediction in predictions]
        [(1, 784), (1, 784)]
    """

    def __init__(self, start: float = 0.6, snapshots: int = 40, columns: int = 20, rate: float = 0.2) -> None:
        if not 0 < start < 1 or snapshots < 2 or columns < 2:
            raise ValueError(
                f"start must be between 0 and 1, snapshots and columns at least 2; got {start}, {snapshots}, {columns}"
            )
        check_positive(rate=rate)
        self.start, self.snapshots, self.columns = start, snapshots, columns
        self.constant_from, self.constant_rate = start, rate

    def prepare(self, net: GaussianNet) -> nn.Module:
        if any(isinstance(module, _BatchNorm) and module.track_running_stats for module in net.modules()):
            raise ValueError(
                "SWAG does not support batch normalisation with running statistics: they do not match drawn weights"
            )
        return SwagNet(net, self.columns)

    def members(self, net: nn.Module) -> Sequence[GaussianNet]:
        return [_of(net).net]

    def after_step(self, net: nn.Module, step: int, steps: float) -> None:
        first = self.start * steps
        every = (steps - first) / self.snapshots

        def due(step: int) -> int:  # snapshots up to a step; a quotient may be a rounding below a whole number
            return max(math.floor((step - first) / every + 1e-9), 0)

        if due(step) > due(step - 1):
            _of(net).snapshot()

    def is_ready(self, net: nn.Module) -> bool:
        return bool(_of(net).count >= 2)

    def sample_predictions(
        self, net: nn.Module, x: Tensor, T: int, *, mask: Tensor | None = None, chunk: int = 1, seed: int = 0
    ) -> Iterator[Gaussian]:
        own = self._with_snapshots(net)
        for t in range(T):
            yield predict_with(own.net, own.by_name(own.draw(generator(x.device, seed, t))), x, mask)

    def expected(self, net: nn.Module) -> Predict:
        own = self._with_snapshots(net)

        def predict(x: Tensor, mask: Tensor | None = None) -> Gaussian:
            return predict_with(own.net, own.by_name(own.mean), x, mask)

        return predict

    def _with_snapshots(self, net: nn.Module) -> SwagNet:
        if not self.is_ready(net):
            raise ValueError("SWAG has no snapshots yet: train to the end first")
        return _of(net)


def _of(net: nn.Module) -> SwagNet:
    assert isinstance(net, SwagNet)
    return net
