"""Stochastic variational inference: a Gaussian for every weight of the backbone's convolutions and linear layers.

Training uses local reparameterisation: noise is added to the activations, whose variance is the convolution of the
squared input with the variances of the weights. Predictions draw the weights themselves, once per forward pass, so that
the differences between predictions have the correlations that the weights cause.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.conv import _ConvNd

from lrd_uq.bayes.base import Method, Predict, eval_mode, eval_predictor
from lrd_uq.bayes.noise import generator
from lrd_uq.checks import check_positive, check_weights
from lrd_uq.heads import Gaussian, MeanHead, density_dtype, full_precision
from lrd_uq.nets import GaussianNet, SplitNet

NOISES = ("none", "activations", "weights")


class VariationalLayer(nn.Module):
    """A convolution or linear layer with independent Gaussian weights and a deterministic bias.

    Args:
        layer: the layer to convert; its weight becomes the mean, its options are kept.
        prior_std: standard deviation of the prior `N(0, prior_std^2)` of every weight.
        initial_std: initial standard deviation of every weight.
    """

    def __init__(self, layer: nn.Module, prior_std: float, initial_std: float) -> None:
        super().__init__()
        self.layer, self.prior_std = layer, prior_std
        self.initial_std = initial_std
        self.raw_std = nn.Parameter(torch.empty_like(self.mean))
        self.noise = "activations"  # evaluation mode adds no noise, except for "weights"
        self.generator: torch.Generator | None = None  # of drawn weights; None for torch's own
        self.reset_parameters()
        self.train(layer.training)

    def reset_parameters(self) -> None:
        """Resets the standard deviations; the inner layer resets the means."""
        nn.init.constant_(self.raw_std, math.log(self.initial_std))

    @property
    def mean(self) -> Tensor:
        return self.layer.weight  # type: ignore[return-value]

    @property
    def std(self) -> Tensor:
        return self.raw_std.exp()

    def forward(self, x: Tensor) -> Tensor:
        if self.noise == "weights":
            options: dict[str, Any] = {"dtype": self.mean.dtype, "device": self.mean.device}
            noise = torch.randn(self.mean.shape, generator=self.generator, **options)
            return functional_call(self.layer, {"weight": self.mean + self.std * noise}, (x,))
        out = self.layer(x)
        if self.noise == "none" or not self.training:
            return out
        return out + (self._variance(x).sqrt() * torch.randn_like(out)).to(out.dtype)

    def _variance(self, x: Tensor) -> Tensor:
        """The variance of the output, in float32 at least: in 16 bits, the squares of small numbers vanish."""
        with full_precision(x):
            dtype = density_dtype(self.mean.dtype)
            parameters: dict[str, Any] = {"weight": self.std.to(dtype).square()}
            if self.layer.bias is not None:
                parameters["bias"] = torch.zeros_like(self.layer.bias, dtype=dtype)  # type: ignore[arg-type]
            variance = functional_call(self.layer, parameters, (x.to(dtype).square(),))
        # An input of zeros has variance 0, where the derivative of the square root is infinite.
        return variance.clamp(min=1e-16)

    def kl(self) -> Tensor:
        """KL divergence of the weights from their prior, in nats."""
        ratio = (self.std / self.prior_std).square()
        return 0.5 * (ratio + (self.mean / self.prior_std).square() - 1 - ratio.log()).sum()


def to_variational(module: nn.Module, prior_std: float = 0.1, initial_std: float = 0.01) -> nn.Module:
    """Gives every convolution (including transposed ones) and linear layer of a network Gaussian weights, in place.

    Returns the module, or its replacement if the module is itself such a layer.
    """
    if isinstance(module, (_ConvNd, nn.Linear)):
        return VariationalLayer(module, prior_std, initial_std)
    for name, child in module.named_children():
        if not isinstance(child, VariationalLayer):
            setattr(module, name, to_variational(child, prior_std, initial_std))
    return module


class Variational(Method):
    """Variational layers in the backbone; the head stays deterministic.

    Args:
        prior_std: prior standard deviation of every weight.
        kl_weight: weight of the KL divergence; None for the alpha of the objective at every step, by which the two have
            the proportions of the evidence lower bound. With 1, the prior outweighs the data of the digits configs.
        initial_std: initial standard deviation of every weight.

    It raises ValueError for numbers out of range, and for a backbone without convolutions and linear layers.

    Examples:
        >>> from lrd_uq.bayes import Variational
        >>> from lrd_uq.heads import LowRankHead
        >>> from lrd_uq.nets import DigitsUNet, GaussianNet
        >>> method = Variational(prior_std=0.1)
        >>> net = method.prepare(GaussianNet(DigitsUNet(), LowRankHead(24, rank=8)))
        >>> predictions = method.sample_predictions(net, torch.zeros(1, 2, 28, 28), T=2)
        >>> [tuple(prediction.mean.shape) for prediction in predictions]
        [(1, 784), (1, 784)]
    """

    def __init__(self, prior_std: float = 0.1, kl_weight: float | None = None, initial_std: float = 0.01) -> None:
        check_positive(prior_std=prior_std, initial_std=initial_std)
        check_weights(**({} if kl_weight is None else {"kl_weight": kl_weight}))
        self.prior_std, self.kl_weight, self.initial_std = prior_std, kl_weight, initial_std

    def prepare(self, net: GaussianNet) -> nn.Module:
        for name, part in list(net.named_children()):
            frozen = isinstance(net, SplitNet) and net.is_frozen and name == "mean_backbone"
            if not isinstance(part, MeanHead) and not frozen:  # all backbones that are trained: a SplitNet has two
                setattr(net, name, to_variational(part, self.prior_std, self.initial_std))
        if not layers(net):
            raise ValueError("the backbone has no convolution or linear layer that could be made variational")
        return net

    def activate(self, net: nn.Module, on: bool) -> None:
        for layer in layers(net):
            layer.noise = "activations" if on else "none"

    def kl(self, net: nn.Module, alpha: float) -> Tensor | None:
        active = [layer.kl() for layer in layers(net) if layer.noise != "none"]
        weight = alpha if self.kl_weight is None else self.kl_weight
        return weight * torch.stack(active).sum() if active else None

    @torch.no_grad()
    def sample_predictions(
        self, net: nn.Module, x: Tensor, T: int, *, mask: Tensor | None = None, chunk: int = 1, seed: int = 0
    ) -> Iterator[Gaussian]:
        (member,) = self.members(net)
        for t in range(T):  # one draw of the weights per pass: `chunk` has no effect
            before = [(layer, layer.noise) for layer in layers(net)]
            source = generator(x.device, seed, t)
            with eval_mode(net):
                for layer, _ in before:
                    layer.noise, layer.generator = "weights", source
                try:
                    prediction = member.gaussian(x, mask)
                finally:
                    for layer, noise in before:
                        layer.noise, layer.generator = noise, None
            yield prediction

    def expected(self, net: nn.Module) -> Predict:
        (member,) = self.members(net)
        return eval_predictor(member)  # in evaluation mode the layers use their means


def layers(net: nn.Module) -> list[VariationalLayer]:
    return [module for module in net.modules() if isinstance(module, VariationalLayer)]
