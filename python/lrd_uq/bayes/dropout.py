"""Monte Carlo dropout: dropout stays active for predictions, so that every forward pass is a draw of the weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from lrd_uq.bayes.base import Method, eval_mode
from lrd_uq.heads import Gaussian


class Dropout(Method):
    """Uses the dropout layers of the network. The expected weights are those of evaluation mode.

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

    def activate(self, net: nn.Module, on: bool) -> None:
        for layer in layers(net):
            if on and layer in self._rates:
                layer.p = self._rates.pop(layer)
            elif not on and layer not in self._rates:
                self._rates[layer], layer.p = layer.p, 0.0

    @torch.no_grad()
    def sample_predictions(
        self, net: nn.Module, x: Tensor, T: int, *, mask: Tensor | None = None, chunk: int = 1
    ) -> Iterator[Gaussian]:
        (member,) = self.members(net)
        if not any(layer.p > 0 for layer in layers(net)):
            raise ValueError("the network has no dropout layer with a rate above 0: all predictions would be the same")
        B = len(x)
        for begin in range(0, T, chunk):
            count = min(chunk, T - begin)
            with eval_mode(net):
                for layer in layers(net):
                    layer.training = True
                # Every item of a batch has its own dropout mask, so one pass over copies gives several draws.
                repeated = x.repeat(count, *(1,) * (x.dim() - 1))
                together = member.gaussian(repeated, None if mask is None else mask.repeat(count, 1))
            for i in range(count):
                yield Gaussian(*(t[i * B : (i + 1) * B] for t in together))


def layers(net: nn.Module) -> list[_DropoutNd]:
    return [module for module in net.modules() if isinstance(module, _DropoutNd)]
