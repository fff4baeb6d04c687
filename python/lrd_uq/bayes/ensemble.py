"""Deep ensembles: several networks with different initial weights; each of them is a draw."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from lrd_uq.bayes.base import Method, NoExpectedWeights, Predict, eval_predictor
from lrd_uq.heads import Gaussian, Output
from lrd_uq.nets import GaussianNet


class EnsembleNet(nn.Module):
    """The members of an ensemble, built by `Ensemble` or from separately trained networks."""

    def __init__(self, members: Sequence[GaussianNet]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, x: Tensor) -> list[Output]:
        return [member(x) for member in self.members]


class Ensemble(Method):
    """Independent networks, trained on the same batches at the same time.

    Args:
        size: number of networks.

    Raises:
        ValueError: if size is below 2.

    Examples:
        >>> from lrd_uq.bayes import Ensemble
        >>> from lrd_uq.heads import LowRankHead
        >>> from lrd_uq.nets import DigitsUNet, GaussianNet
        >>> method = Ensemble(size=3)
        >>> net = method.prepare(GaussianNet(DigitsUNet(), LowRankHead(24, rank=8)))
        >>> len(list(method.sample_predictions(net, torch.zeros(1, 2, 28, 28), T=64)))
        3
    """

    def __init__(self, size: int = 5) -> None:
        if size < 2:
            raise ValueError(f"size must be at least 2; got {size}")
        self.size = size

    def prepare(self, net: GaussianNet) -> nn.Module:
        return EnsembleNet([net, *(reinitialised(net) for _ in range(self.size - 1))])

    def members(self, net: nn.Module) -> Sequence[GaussianNet]:
        assert isinstance(net, EnsembleNet)
        return list(net.members)  # type: ignore[arg-type]

    def sample_predictions(
        self, net: nn.Module, x: Tensor, T: int, *, mask: Tensor | None = None, chunk: int = 1, seed: int = 0
    ) -> Iterator[Gaussian]:
        """One prediction per member: at most as many as there are members, even if T is larger; nothing is random."""
        for member in self.members(net)[:T]:
            yield eval_predictor(member)(x, mask)

    def expected(self, net: nn.Module) -> Predict:
        raise NoExpectedWeights(
            "an ensemble has no expected weights: its members lie in different minima, and the mean of their weights"
            " does not describe a trained network"
        )


def reinitialised(net: GaussianNet) -> GaussianNet:
    """A copy with new initial weights."""
    other = copy.deepcopy(net)
    with torch.no_grad():
        for module in reversed(list(other.modules())):  # children first: a parent may rescale their weights
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
    for (name, ours), theirs in zip(other.named_parameters(), net.parameters(), strict=True):
        constant = ours.numel() == 0 or bool((ours == ours.flatten()[0]).all())  # such as a bias of zeros
        if not constant and torch.equal(ours, theirs):
            raise ValueError(f"{name} has no reset_parameters: all members would start from the same value")
    return other
