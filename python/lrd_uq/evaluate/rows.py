"""Held-out scores of a network: a row for every Gaussian that can be formed from its predictions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lrd_uq.bayes.base import Method, NoExpectedWeights
from lrd_uq.checks import check_counts
from lrd_uq.evaluate.scores import ItemScores, joined, stream
from lrd_uq.evaluate.shares import Share


class Row(NamedTuple):
    """One kind of prediction, scored on N images.

    Attributes:
        key: "single", "diagonal", "expected", "joint", "joint 64", "joint 64 unfolded" or "mixture".
        log_probs: [N], nats per image.
        z: [N], `standardised_sum` over the existing outputs; None for the mixture.
        items: [N], the numbers of the images in the data; None for 0 ... N - 1.
    """

    key: str
    log_probs: Tensor
    z: Tensor | None
    items: Tensor | None = None

    @property
    def mean(self) -> float:
        """Mean over images, in nats; NaN if one of them has no finite log-likelihood."""
        return float(self.log_probs.double().mean()) if bool(self.log_probs.isfinite().all()) else math.nan

    @property
    def sd(self) -> float:
        """Standard deviation over images; NaN for a single one."""
        return float(self.log_probs.double().std()) if len(self.log_probs) > 1 else math.nan

    @property
    def failed(self) -> list[int]:
        """Numbers of the images without a finite log-likelihood."""
        return self.not_finite(self.log_probs)

    def not_finite(self, values: Tensor) -> list[int]:
        """Numbers of the images for which `values` [N] are not finite."""
        items = torch.arange(len(values)) if self.items is None else self.items
        return items[~values.isfinite()].tolist()


class Evaluation(NamedTuple):
    """The scores of a network, the result of `evaluate`.

    Attributes:
        rows: the scores of each kind of prediction, by key.
        rmse: root mean square error of the mean.
        mae: mean absolute error of the mean.
        unexplained: `unexplained_error` of a single prediction, averaged over images.
        no_expected: the reason if there is no row for the expected weights.
        scores: the scores of every item.
    """

    rows: dict[str, Row]
    rmse: float
    mae: float
    unexplained: float
    no_expected: str | None
    scores: ItemScores


@torch.no_grad()
def evaluate(
    method: Method,
    net: nn.Module,
    data: Any,
    T: int = 64,
    ranks: Sequence[int] = (),
    images_at_once: int | None = None,
    seed: int = 0,
) -> Evaluation:
    """Scores a network on N images, read as they are needed: a row for each kind of prediction, with log p [N].

    Everything happens in evaluation mode, without gradients, and on the device of the network.

    Args:
        method: the distribution over the weights.
        net: the network that the method prepared and training filled.
        data: a batch, a data set (a list is one), a DataLoader or another iterable of batches. A batch is a `Batch`,
            `(input, target)`, `(input, target, mask)` or a dict (see `lrd_uq.data.as_batch`). A `shares.Share` is
            evaluated together with the shares of the other processes.
        T: number of predictions of a Bayesian method.
        ranks: also score the joint Gaussian truncated to these ranks, with the dropped variance folded into the
            diagonal and without.
        images_at_once: None for at most 25, limited so that their predictions hold at most 2^28 numbers. The scores do
            not depend on it.
        seed: seed of the draws (see `Method.sample_predictions`).

    Raises:
        ValueError: if T or a rank is below 1, or if there are no items.

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
    if T < 1:
        raise ValueError(f"T must be at least 1; got {T}")
    check_counts(**{f"ranks[{i}]": rank for i, rank in enumerate(ranks)})
    found = joined(list(stream(method, net, data, T, ranks, images_at_once, seed)))
    if isinstance(data, Share):
        found = data.gathered(found)
    reason = None
    if "mixture" in found.log_probs and "expected" not in found.log_probs:
        try:
            method.expected(net)
        except NoExpectedWeights as error:
            reason = str(error)
    return evaluation_of(found, reason)


def evaluation_of(scores: ItemScores, no_expected: str | None = None) -> Evaluation:
    """The rows and means of the scores of items."""
    rows = {key: Row(key, log_probs, scores.z.get(key), scores.items) for key, log_probs in scores.log_probs.items()}
    outputs = float(scores.outputs.sum())
    totals = scores.squared_error, scores.absolute_error
    mse, mae = (float(total.sum()) / outputs if outputs else math.nan for total in totals)
    return Evaluation(rows, math.sqrt(mse), mae, float(scores.unexplained.mean()), no_expected, scores)
