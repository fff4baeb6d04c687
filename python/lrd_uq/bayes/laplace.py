"""Last-layer Laplace approximation: a Gaussian over the weights of the mean, centred at the trained weights.

Its precision is that of the prior plus the sum of `J^T Sigma^-1 J` over the training items. J is the Jacobian of the
mean with respect to these weights, that is, the features; Sigma is the predicted covariance with all correlations,
whose inverse is applied by `lrd.solve`. The mean is linear in these weights, so the Jacobian is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

import lrd_kernels as lrd
from lrd_uq.bayes.base import Method, Predict, eval_mode, eval_predictor, keep_precision, predict_with
from lrd_uq.bayes.noise import generator
from lrd_uq.checks import check_positive
from lrd_uq.data.batch import Batch
from lrd_uq.heads import Gaussian, Output
from lrd_uq.nets import GaussianNet, SplitNet


class LaplaceNet(nn.Module):
    """A network and the Cholesky factor of the posterior precision of its last layer, saved with the weights."""

    tril: Tensor  # [n, n] in float64, n = outputs (channels + 1); all zeros before the end of training

    def __init__(self, net: GaussianNet) -> None:
        super().__init__()
        self.net = net
        n = net.head.outputs * (net.head.channels + 1)
        self.register_buffer("tril", torch.zeros(n, n, dtype=torch.float64))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        return keep_precision(self, super()._apply, fn, recurse)

    def forward(self, x: Tensor) -> Output:
        return self.net(x)

    def draw(self, generator: torch.Generator) -> dict[str, Tensor]:
        """A draw of the weights and biases of the mean, by name."""
        head, tril = self.net.head, self.tril
        noise = torch.randn(len(tril), 1, dtype=tril.dtype, device=tril.device, generator=generator)
        step = torch.linalg.solve_triangular(tril.mT, noise, upper=True).view(head.outputs, -1)
        step = step.to(head.mean_weight)
        return {"head.mean_weight": head.mean_weight + step[:, :-1], "head.mean_bias": head.mean_bias + step[:, -1]}


class Laplace(Method):
    """Laplace approximation of the last layer of the mean.

    Args:
        prior_std: prior standard deviation of the weights.
        temperature: values above 1 widen the posterior, which is too narrow if outputs are more strongly correlated
            than the predicted covariance says.

    It raises ValueError for numbers that are not above 0, for a `SplitNet`, and when predictions are sampled before the
    end of training.

    Examples:
        >>> from lrd_uq.bayes import Laplace
        >>> from lrd_uq.data import Batch
        >>> from lrd_uq.heads import LowRankHead
        >>> from lrd_uq.nets import DigitsUNet, GaussianNet
        >>> method = Laplace()
        >>> net = method.prepare(GaussianNet(DigitsUNet(), LowRankHead(24, rank=8)))
        >>> x, target = torch.zeros(5, 2, 28, 28), torch.zeros(5, 1, 28, 28)
        >>> method.after_training(net, lambda: [Batch(x, target, None)])  # JointUncertainty does this
        >>> [tuple(prediction.mean.shape) for prediction in method.sample_predictions(net, x, T=2)]
        [(5, 784), (5, 784)]
    """

    def __init__(self, prior_std: float = 1.0, temperature: float = 1.0) -> None:
        check_positive(prior_std=prior_std, temperature=temperature)
        self.prior_std, self.temperature = prior_std, temperature

    def prepare(self, net: GaussianNet) -> nn.Module:
        if isinstance(net, SplitNet):
            raise ValueError("Laplace does not support a SplitNet: its mean is not predicted by its head")
        return LaplaceNet(net)

    def members(self, net: nn.Module) -> Sequence[GaussianNet]:
        return [_of(net).net]

    @torch.no_grad()
    def after_training(self, net: nn.Module, batches: Callable[[], Iterable[Batch]]) -> None:
        own = _of(net)
        precision = torch.eye(len(own.tril), dtype=own.tril.dtype, device=own.tril.device) / self.prior_std**2
        with eval_mode(own.net):
            for batch in batches():
                precision += curvature(own.net, batch)
        own.tril.copy_(torch.linalg.cholesky(precision / self.temperature))

    def is_ready(self, net: nn.Module) -> bool:
        return bool(_of(net).tril.any())

    def sample_predictions(
        self, net: nn.Module, x: Tensor, T: int, *, mask: Tensor | None = None, chunk: int = 1, seed: int = 0
    ) -> Iterator[Gaussian]:
        own = _of(net)
        if not self.is_ready(net):
            raise ValueError("the last layer has no posterior yet: train to the end first")
        for t in range(T):
            yield predict_with(own.net, own.draw(generator(x.device, seed, t)), x, mask)

    def expected(self, net: nn.Module) -> Predict:
        return eval_predictor(_of(net).net)


def curvature(net: GaussianNet, batch: Batch) -> Tensor:
    """Sum of `J^T Sigma^-1 J` over a batch, in float64: [n, n], ordered by output, then channels and bias."""
    head = net.head
    features = net.backbone(batch.input)
    mask = None if batch.mask is None else head.flat(batch.mask)
    _, factor, diag = head.gaussian(head(features), mask)
    features = head.positions_last(features).to(diag)  # [B, C, positions]
    B, _, positions = features.shape
    columns = torch.cat([features, torch.ones_like(features[:, :1])], 1)  # [B, C + 1, positions]
    jacobian = columns.new_zeros(head.outputs, columns.shape[1], B, head.outputs, positions)
    for output in range(head.outputs):
        jacobian[output, :, :, output] = columns.movedim(1, 0)
    jacobian = jacobian.flatten(0, 1).flatten(2)  # [n, B, S]
    if mask is not None:
        jacobian = torch.where(mask, jacobian, 0)
    solved = lrd.solve(jacobian, factor, diag)
    return torch.einsum("nbs,mbs->nm", jacobian.double(), solved.double())


def _of(net: nn.Module) -> LaplaceNet:
    assert isinstance(net, LaplaceNet)
    return net
