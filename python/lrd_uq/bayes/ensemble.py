"""Deep ensembles: several networks that differ by their first weights, each a draw."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from lrd_uq.bayes.base import Method, NoExpectedWeights, Predict, quietly
from lrd_uq.heads import Gaussian, Output
from lrd_uq.nets import GaussianNet


class EnsembleNet(nn.Module):
    """Members side by side: made by `Ensemble`, or of networks that were trained apart."""

    def __init__(self, members: Sequence[GaussianNet]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, x: Tensor) -> list[Output]:
        return [member(x) for member in self.members]


class Ensemble(Method):
    """Independent networks, trained side by side on the same batches: no gradient goes from one to another.

    Args:
        size: how many.
    """

    def __init__(self, size: int = 5) -> None:
        if size < 2:
            raise ValueError(f"size must be at least 2; got {size}")
        self.size = size

    def prepare(self, net: GaussianNet) -> nn.Module:
        return EnsembleNet([net, *(fresh(net) for _ in range(self.size - 1))])

    def members(self, net: nn.Module) -> Sequence[GaussianNet]:
        assert isinstance(net, EnsembleNet)
        return list(net.members)  # type: ignore[arg-type]

    def sample_predictions(
        self, net: nn.Module, x: Tensor, T: int, *, mask: Tensor | None = None, chunk: int = 1
    ) -> Iterator[Gaussian]:
        """One prediction of each member: an ensemble has no others, so at most its size, whatever T."""
        for member in self.members(net)[:T]:
            yield quietly(member)(x, mask)

    def expected(self, net: nn.Module) -> Predict:
        raise NoExpectedWeights(
            "an ensemble has no expected weights: its members lie in different minima, and the mean of their weights"
            " is the weights of no network that was ever trained"
        )


def fresh(net: GaussianNet) -> GaussianNet:
    """A copy with first weights of its own."""
    other = copy.deepcopy(net)
    with torch.no_grad():
        for module in reversed(list(other.modules())):  # a parent after its children, whose weights it may scale
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
    for (name, ours), theirs in zip(other.named_parameters(), net.parameters(), strict=True):
        constant = ours.numel() == 0 or bool((ours == ours.flatten()[0]).all())  # such as a bias of zeros
        if not constant and torch.equal(ours, theirs):
            raise ValueError(f"{name} has no reset_parameters: all members of the ensemble would share its first value")
    return other
