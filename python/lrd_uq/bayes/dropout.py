"""Monte Carlo dropout: dropout stays active for predictions, so that every forward pass is a draw of the weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from lrd_uq.bayes.base import Method, eval_mode
from lrd_uq.bayes.noise import OtherLayout, contents, dropout_layers, dropout_masks, generator
from lrd_uq.heads import Gaussian
from lrd_uq.nets import GaussianNet


class Dropout(Method):
    """Uses the dropout layers of the network. The expected weights are those of evaluation mode.

    Every item has dropout masks of its own. Layers that do not see the items as their first dimension are served by
    predicting one item at a time, which is slower.

    Sampling raises ValueError if the network has no dropout layer with a rate above 0.

    Examples:
        >>> from lrd_uq.bayes import Dropout
        >>> from lrd_uq.heads import LowRankHead
        >>> from lrd_uq.nets import DigitsUNet, GaussianNet
        >>> net = GaussianNet(DigitsUNet(dropout=0.2), LowRankHead(24, rank=8))
        >>> predictions = Dropout().sample_predictions(net, torch.zeros(1, 2, 28, 28), T=4, chunk=2)
        >>> [tuple(prediction.mean.shape) for prediction in predictions]
        [(1, 784), (1, 784), (1, 784), (1, 784)]
    """

    def __init__(self) -> None:
        self._rates: dict[nn.Module, float] = {}  # of the layers that are turned off

    def check(self, net: nn.Module) -> None:
        if not any(layer.p > 0 for layer in dropout_layers(net)):
            raise ValueError("the network has no dropout layer with a rate above 0: all predictions would be the same")

    def activate(self, net: nn.Module, on: bool) -> None:
        for layer in dropout_layers(net):
            if on and layer in self._rates:
                layer.p = self._rates.pop(layer)
            elif not on and layer not in self._rates:
                self._rates[layer], layer.p = layer.p, 0.0

    @torch.no_grad()
    def sample_predictions(
        self, net: nn.Module, x: Tensor, T: int, *, mask: Tensor | None = None, chunk: int = 1, seed: int = 0
    ) -> Iterator[Gaussian]:
        (member,) = self.members(net)
        self.check(net)
        B, items = len(x), contents(x)
        for begin in range(0, T, chunk):
            draws = range(begin, min(begin + chunk, T))
            # Every row of a batch has its own dropout mask, so one pass over copies gives several draws.
            repeated = x.repeat(len(draws), *(1,) * (x.dim() - 1))
            masks = None if mask is None else mask.repeat(len(draws), 1)
            with eval_mode(net):
                together = _draw(member, repeated, masks, seed, [(t, item) for t in draws for item in items])
            for i in range(len(draws)):
                yield Gaussian(*(t[i * B : (i + 1) * B] for t in together))


def _draw(net: GaussianNet, x: Tensor, mask: Tensor | None, seed: int, keys: Sequence[tuple[int, bytes]]) -> Gaussian:
    """Predicts each row of `x` with the dropout masks that belong to its key."""
    try:
        with dropout_masks(net, [generator(x.device, seed, *key) for key in keys]):
            return net.gaussian(x, mask)
    except OtherLayout:  # such as [time, items, channels]: one row at a time
        rows = [
            _draw(net, x[i : i + 1], None if mask is None else mask[i : i + 1], seed, keys[i : i + 1])
            for i in range(len(keys))
        ]
        return Gaussian(*map(torch.cat, zip(*rows, strict=True)))
