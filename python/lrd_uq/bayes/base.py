"""The interface of a Bayesian method, and the joint Gaussian of its predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.func import functional_call

import lrd_kernels as lrd
from lrd_uq.data.batch import Batch
from lrd_uq.data.loading import batches
from lrd_uq.heads import Gaussian
from lrd_uq.nets import GaussianNet, batch_for

Predict = Callable[[Tensor, Tensor | None], Gaussian]  # (input, mask of the outputs [B, S])

MAX_NUMBERS = 1 << 28  # in the joint Gaussians of a batch while predictions are streamed into them, about 1 GiB
MAX_COLUMNS = 256  # of one of them, meanwhile


class NoExpectedWeights(NotImplementedError):
    """Raised by methods without meaningful expected weights; the message gives the reason.

    Examples:
        >>> from lrd_uq.bayes import Ensemble, NoExpectedWeights
        >>> try:
        ...     Ensemble(2).expected(torch.nn.Identity())
        ... except NoExpectedWeights as error:
        ...     print(str(error).partition(":")[0])
        an ensemble has no expected weights
    """


class Method:
    """A distribution over the weights of a network. This base class stands for a deterministic network.

    Examples:
        >>> from lrd_uq.bayes import Method
        >>> from lrd_uq.heads import LowRankHead
        >>> from lrd_uq.nets import DigitsUNet, GaussianNet
        >>> method, net = Method(), GaussianNet(DigitsUNet(), LowRankHead(24, rank=8))
        >>> (prediction,) = method.sample_predictions(method.prepare(net), torch.zeros(1, 2, 28, 28), T=1)
        >>> prediction.factor.shape
        torch.Size([1, 784, 8])
    """

    constant_from: float | None = None  # fraction of the steps after which the learning rate is constant, if at all
    constant_rate = 0.0  # that constant, as a fraction of the peak

    def prepare(self, net: GaussianNet) -> nn.Module:
        """The network to train, for example with other layers or in several copies."""
        return net

    def members(self, net: nn.Module) -> Sequence[GaussianNet]:
        """The networks that are trained, each with its own loss."""
        assert isinstance(net, GaussianNet)
        return [net]

    @property
    def is_deterministic(self) -> bool:
        """Whether there is a single prediction, however many are asked for."""
        return type(self).sample_predictions is Method.sample_predictions

    @property
    def noisy_training(self) -> bool:
        """Whether training samples the weights, so that `activate` has something to turn off."""
        return type(self).activate is not Method.activate

    @property
    def needs_all_weights(self) -> bool:
        """Whether training computes with all weights of a network at once."""
        own = type(self)
        return any(getattr(own, name) is not getattr(Method, name) for name in ("kl", "after_step", "after_training"))

    def check(self, net: nn.Module) -> None:
        """Raises ValueError for a network whose weights cannot be drawn."""

    def activate(self, net: nn.Module, on: bool) -> None:
        """Turns the sampling of weights during training on or off."""

    def kl(self, net: nn.Module, alpha: float) -> Tensor | None:
        """Weighted KL divergence of the weights from their prior in nats, for the whole training set; None without.

        `alpha` is the weight of the likelihood in the objective at this step.
        """
        return None

    def after_step(self, net: nn.Module, step: int, steps: float) -> None:
        """Called after step number `step` (counted from 1) of `steps`."""

    def after_training(self, net: nn.Module, batches: Callable[[], Iterable[Batch]]) -> None:
        """Called once after the last step, with the training batches. Results must be stored in the network's state."""

    def is_ready(self, net: nn.Module) -> bool:
        """Whether predictions can be sampled yet: some methods learn the distribution late in training."""
        return True

    def sample_predictions(
        self, net: nn.Module, x: Tensor, T: int, *, mask: Tensor | None = None, chunk: int = 1, seed: int = 0
    ) -> Iterator[Gaussian]:
        """Yields T predictions for inputs `x` [B, ...], each with mean [B, S], from T draws of the weights.

        Args:
            mask: bool [B, S], True where an output exists.
            chunk: predictions per forward pass, if the method supports it; uses more memory.
            seed: seed of the draws. Prediction t of an item depends only on the seed, t and the item: not on T, `chunk`
                or the other items of the batch, nor on torch's random state.
        """
        yield self.expected(net)(x, mask)

    def expected(self, net: nn.Module) -> Predict:
        """Predicts with the expected weights; raises `NoExpectedWeights` if there are none."""
        (member,) = self.members(net)
        return eval_predictor(member)


def eval_predictor(net: GaussianNet) -> Predict:
    """Predicts in evaluation mode and without gradients; afterwards every module is in its previous mode."""

    @torch.no_grad()
    def predict(x: Tensor, mask: Tensor | None = None) -> Gaussian:
        with eval_mode(net):
            return net.gaussian(x, mask)

    return predict


@contextmanager
def eval_mode(net: nn.Module) -> Iterator[None]:
    """Evaluation mode inside the block; afterwards every module is in its previous mode."""
    modes = {module: module.training for module in net.modules()}
    net.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@overload
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
    seed: int = 0,
) -> lrd.JointNormal: ...


@overload
def predict_joint(
    method: Method,
    net: nn.Module,
    x: Iterable[Any],
    T: int,
    rank: int,
    *,
    chunk: int = 1,
    parts: bool = True,
    seed: int = 0,
) -> Iterator[lrd.JointNormal]: ...


@torch.no_grad()
def predict_joint(
    method: Method,
    net: nn.Module,
    x: Any,
    T: int,
    rank: int,
    *,
    mask: Tensor | None = None,
    chunk: int = 1,
    parts: bool = True,
    seed: int = 0,
) -> lrd.JointNormal | Iterator[lrd.JointNormal]:
    """One Gaussian from T predictions for inputs `x` [B, ...]: mean [B, S], factor [B, S, rank], diagonal [B, S].

        Sigma = mean_t (diag(D_t) + P_t P_t^T) + sum_t (mu_t - mu) (mu_t - mu)^T / (T - 1)

    The first term is the aleatoric part, the second the epistemic one. Predictions are streamed, so that memory does
    not grow with T.

    Args:
        method: the distribution over the weights.
        net: the network that the method prepared and training filled.
        x: inputs, as the network takes them. Or a DataLoader, a data set (a list is one) or another iterable of batches
            (see `lrd_uq.data.as_batch`), whose masks are used: then the result is an iterator, with a Gaussian for each
            batch.
        T: number of predictions.
        rank: columns of the result, and of each of its parts.
        mask: bool [B, S], True where an output exists; the others get mean 0, variance 1 and no correlation.
        chunk: predictions per forward pass (see `Method.sample_predictions`).
        parts: whether to compute the aleatoric and the epistemic part as well.
        seed: seed of the draws (see `Method.sample_predictions`).

    Examples:
        >>> from lrd_uq.bayes import Dropout, predict_joint
        >>> from lrd_uq.heads import LowRankHead
        >>> from lrd_uq.nets import DigitsUNet, GaussianNet
        >>> net = GaussianNet(DigitsUNet(dropout=0.2), LowRankHead(24, rank=8))
        >>> joint = predict_joint(Dropout(), net, torch.zeros(1, 2, 28, 28), T=4, rank=16)
        >>> joint.cov_factor.shape, joint.epistemic.variance.shape
        (torch.Size([1, 784, 16]), torch.Size([1, 784]))
    """
    if T < 1:
        raise ValueError(f"T must be at least 1; got {T}")
    if not isinstance(x, Tensor):
        if mask is not None:
            raise ValueError("the masks of several batches come with them: leave mask out")
        return _joints(method, net, x, T, rank, chunk=chunk, parts=parts, seed=seed)
    joint = lrd.JointAccumulator(rank)
    for prediction in method.sample_predictions(net, x, T, mask=mask, chunk=chunk, seed=seed):
        joint.update(*prediction)
    return joint.finalize(parts=parts, validate_args=False)


def _joints(method: Method, net: nn.Module, data: Any, T: int, rank: int, **options: Any) -> Iterator[lrd.JointNormal]:
    """A joint Gaussian for each batch of any data."""
    flat = method.members(net)[0].head.flat
    for batch in batches(data, lambda target: max(1, MAX_NUMBERS // (target.numel() * (MAX_COLUMNS + rank)))):
        x, _, mask = batch_for(net, batch)
        yield predict_joint(method, net, x, T, rank, mask=None if mask is None else flat(mask), **options)


@torch.no_grad()
def predict_with(net: GaussianNet, weights: Mapping[str, Tensor], x: Tensor, mask: Tensor | None) -> Gaussian:
    """The prediction in evaluation mode, with some parameters replaced by name."""
    with eval_mode(net):
        return net.head.gaussian(functional_call(net, dict(weights), (x,)), mask)


def keep_precision(
    module: nn.Module,
    apply: Callable[[Callable[[Tensor], Tensor], bool], nn.Module],
    fn: Callable[[Tensor], Tensor],
    recurse: bool,
) -> nn.Module:
    """Applies `nn.Module._apply`, such as a conversion to bfloat16, without rounding the module's own buffers."""
    before = dict(module.named_buffers(recurse=False))
    apply(fn, recurse)
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.dtype.itemsize < before[name].dtype.itemsize:
            setattr(module, name, before[name].to(buffer.device))
    return module
