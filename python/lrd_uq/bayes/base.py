"""What a Bayesian method must offer, and the joint Gaussian of its predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.func import functional_call

import lrd_kernels as lrd
from lrd_uq.data.batch import Batch
from lrd_uq.heads import Gaussian
from lrd_uq.nets import GaussianNet

Predict = Callable[[Tensor, Tensor | None], Gaussian]  # of an input and a mask [B, S] of the outputs


class NoExpectedWeights(NotImplementedError):
    """A method whose weights have no expectation says why."""


class Method:
    """A distribution over the weights of a network. This one has a single point: a deterministic network."""

    constant_from: float | None = None  # share of the steps from which on the learning rate is level; None for never
    constant_rate = 0.0  # its level there, as a share of the peak

    def prepare(self, net: GaussianNet) -> nn.Module:
        """The network to train: with other layers, or several times over."""
        return net

    def members(self, net: nn.Module) -> Sequence[GaussianNet]:
        """The networks inside, each with a loss of its own."""
        assert isinstance(net, GaussianNet)
        return [net]

    def activate(self, net: nn.Module, on: bool) -> None:
        """Turns the randomness of training on or off; a phase may begin without it."""

    def penalty(self, net: nn.Module) -> Tensor | None:
        """What the weights themselves cost, in nats, beside the likelihood of all training items."""
        return None

    def after_step(self, net: nn.Module, step: int, steps: float) -> None:
        """Called after step number `step` (from 1) of `steps`: what a method gathers while training."""

    def conclude(self, net: nn.Module, batches: Callable[[], Iterable[Batch]]) -> None:
        """Called once after the last step, with the training items: what a method makes of a trained network. What it
        keeps must be in the network's state."""

    def sample_predictions(
        self, net: nn.Module, x: Tensor, T: int, *, mask: Tensor | None = None, chunk: int = 1
    ) -> Iterator[Gaussian]:
        """T predictions for `x` from T draws of the weights, one after the other.

        Args:
            mask: bool [B, S], True where an output exists.
            chunk: forward passes to make at once, where the method can: memory for time.
        """
        yield self.expected(net)(x, mask)

    def expected(self, net: nn.Module) -> Predict:
        """Predicts with the expected weights; raises `NoExpectedWeights` where there are none."""
        (member,) = self.members(net)
        return quietly(member)


def quietly(net: GaussianNet) -> Predict:
    """Predicts in evaluation mode, without gradients, and leaves the network as it was."""

    @torch.no_grad()
    def predict(x: Tensor, mask: Tensor | None = None) -> Gaussian:
        with evaluation(net):
            return net.gaussian(x, mask)

    return predict


@contextmanager
def evaluation(net: nn.Module) -> Iterator[None]:
    """`net.eval()`, and afterwards every module's own mode again."""
    modes = {module: module.training for module in net.modules()}
    net.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@torch.no_grad()
def predict_joint(
    method: Method,
    net: nn.Module,
    x: Tensor,
    T: int,
    rank: int,
    *,
    mask: Tensor | None = None,
    chunk: int = 1,
    parts: bool = True,
) -> lrd.JointNormal:
    """One Gaussian from T predictions, streamed: memory does not grow with T.

    Args:
        rank: columns of the result, and of each of its parts.
        mask: bool [B, S], True where an output exists; the others get mean 0, variance 1 and no correlation.
        chunk: forward passes at once (see `Method.sample_predictions`).
        parts: whether the aleatoric and the epistemic part are made as well.
    """
    joint = lrd.JointAccumulator(rank)
    for prediction in method.sample_predictions(net, x, T, mask=mask, chunk=chunk):
        joint.update(*prediction)
    return joint.finalize(parts=parts, validate_args=False)


@torch.no_grad()
def predict_with(net: GaussianNet, weights: Mapping[str, Tensor], x: Tensor, mask: Tensor | None) -> Gaussian:
    """The prediction of a network in evaluation mode with some of its parameters replaced, by name."""
    with evaluation(net):
        return net.head.gaussian(functional_call(net, dict(weights), (x,)), mask)
