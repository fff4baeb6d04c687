"""Held-out scores per image, for every Gaussian that can be formed from the predictions of a network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

import lrd_kernels as lrd
from lrd_uq.bayes.base import Method, NoExpectedWeights, eval_predictor
from lrd_uq.data.batch import Batch
from lrd_uq.evaluate.reconstruction import unexplained_error
from lrd_uq.evaluate.region_sum import standardised_sum
from lrd_uq.evaluate.sweep import kept_columns

MAX_NUMBERS = 1 << 28  # in the predictions held at once, about 1 GiB


class Row(NamedTuple):
    """One kind of prediction, scored on N images.

    Attributes:
        key: "single", "diagonal", "expected", "joint", "joint 64", "joint 64 unfolded" or "mixture".
        log_probs: [N], nats per image.
        z: [N], `standardised_sum` over the existing outputs; None for the mixture.
    """

    key: str
    log_probs: Tensor
    z: Tensor | None

    @property
    def mean(self) -> float:
        """Mean over images, in nats."""
        return float(self.log_probs.double().mean())

    @property
    def sd(self) -> float:
        """Standard deviation over images."""
        return float(self.log_probs.double().std())


class Evaluation(NamedTuple):
    """The scores of a network, the result of `evaluate`.

    Attributes:
        rows: the scores of each kind of prediction, by key.
        rmse: root mean square error of the mean.
        mae: mean absolute error of the mean.
        unexplained: `unexplained_error` of a single prediction, averaged over images.
        no_expected: the reason if there is no row for the expected weights.
    """

    rows: dict[str, Row]
    rmse: float
    mae: float
    unexplained: float
    no_expected: str | None


class Predictions(NamedTuple):
    """T predictions of B images."""

    means: Tensor  # [T, B, S]
    factors: Tensor  # [T, B, S, R]
    diags: Tensor  # [T, B, S]


def collect(method: Method, net: nn.Module, x: Tensor, T: int, mask: Tensor | None, seed: int = 0) -> Predictions:
    """Stacks T predictions for inputs `x` [B, ...], for scores that need all of them at once."""
    means, factors, diags = zip(*method.sample_predictions(net, x, T, mask=mask, seed=seed), strict=True)
    stacked = torch.stack([factor.mT for factor in factors]).mT  # stays rank-major
    return Predictions(torch.stack(means), stacked, torch.stack(diags))


@torch.no_grad()
def evaluate(
    method: Method,
    net: nn.Module,
    batch: Batch,
    T: int = 64,
    ranks: Sequence[int] = (),
    images_at_once: int | None = None,
    seed: int = 0,
) -> Evaluation:
    """Scores a network on a batch of N images, a few at a time: a row for each kind of prediction, with log p [N].

    Args:
        method: the distribution over the weights.
        net: the network that the method prepared and training filled.
        batch: inputs, targets and mask.
        T: number of predictions of a Bayesian method.
        ranks: also score the joint Gaussian truncated to these ranks, with the dropped variance folded into the
            diagonal and without.
        images_at_once: None for at most 25, limited so that their predictions hold at most `MAX_NUMBERS` numbers.
            The scores do not depend on it.
        seed: seed of the draws (see `Method.sample_predictions`).

    Examples:
        >>> from lrd_uq.bayes import Dropout
        >>> from lrd_uq.data import Batch
        >>> from lrd_uq.evaluate import evaluate
        >>> from lrd_uq.heads import LowRankHead
        >>> from lrd_uq.nets import DigitsUNet, GaussianNet
        >>> net = GaussianNet(DigitsUNet(dropout=0.2), LowRankHead(24, rank=2))
        >>> scores = evaluate(Dropout(), net, Batch(torch.zeros(3, 2, 28, 28), torch.zeros(3, 1, 28, 28), None), T=2)
        >>> list(scores.rows)
        ['joint', 'diagonal', 'mixture', 'expected']
    """
    head = method.members(net)[0].head
    if images_at_once is None:
        images_at_once = min(25, max(1, MAX_NUMBERS // (batch.target[0].numel() * T * (head.rank + 2))))
    scores: dict[str, list[Row]] = {}
    squares, absolute, count, reason = 0.0, 0.0, 0, None
    unexplained: list[Tensor] = []
    for begin in range(0, len(batch.target), images_at_once):
        x, target, mask = (None if t is None else t[begin : begin + images_at_once] for t in batch)
        assert x is not None
        assert target is not None
        target = head.flat(target)
        mask = torch.ones_like(target, dtype=torch.bool) if mask is None else head.flat(mask)
        predictions = collect(method, net, x, T, mask, seed)
        own = eval_predictor(method.members(net)[0])(x, mask)
        unexplained.append(unexplained_error(own.factor, torch.where(mask, target - own.mean, 0)))
        for row in _predictives(predictions, target, mask, ranks):
            scores.setdefault(row.key, []).append(row)
        if len(predictions.means) > 1:
            try:
                expected = method.expected(net)(x, mask)
                gaussian = lrd.joint(
                    predictions.means, None, None, aleatoric=(expected.factor, expected.diag), parts=False
                )
                scores.setdefault("expected", []).append(_score("expected", gaussian, target, mask))
            except NoExpectedWeights as error:
                reason = str(error)
        residual = (target - predictions.means.mean(0))[mask].double()
        squares, absolute = squares + float(residual.square().sum()), absolute + float(residual.abs().sum())
        count += residual.numel()
    rows = {
        key: Row(key, torch.cat([s.log_probs for s in some]), _cat([s.z for s in some])) for key, some in scores.items()
    }
    lost = float(torch.cat(unexplained).mean())
    return Evaluation(rows, (squares / count) ** 0.5, absolute / count, lost, reason)


def _predictives(predictions: Predictions, target: Tensor, mask: Tensor, ranks: Sequence[int]) -> Iterator[Row]:
    means, factors, diags = predictions
    T = len(means)
    joint = lrd.joint(means, factors, diags, parts=False, validate_args=False)
    yield _score("joint" if T > 1 else "single", joint, target, mask)
    if joint.cov_factor.shape[-1]:
        yield _score("diagonal", _without_factor(joint), target, mask)
    if T == 1:
        return
    for key, gaussian in kept_columns(joint, ranks):
        yield _score(key, gaussian, target, mask)
    # The joint Gaussian has the mean and covariance of this mixture.
    yield Row("mixture", lrd.mixture_log_prob(target, means, factors, diags, mask=mask), None)


def _without_factor(gaussian: lrd.LowRankMultivariateNormal) -> lrd.LowRankMultivariateNormal:
    """The same variances, without correlations."""
    nothing = gaussian.loc.new_zeros(*gaussian.loc.shape, 0)
    return lrd.LowRankMultivariateNormal(gaussian.loc, nothing, gaussian.variance, validate_args=False)


def _score(key: str, gaussian: lrd.LowRankMultivariateNormal, target: Tensor, mask: Tensor) -> Row:
    log_probs = lrd.log_prob(target, gaussian.loc, gaussian.cov_factor, gaussian.cov_diag, mask=mask, on_failure="nan")
    return Row(key, log_probs, standardised_sum(gaussian, target, mask))


def _cat(parts: list[Tensor | None]) -> Tensor | None:
    present = [part for part in parts if part is not None]
    return torch.cat(present) if present else None
