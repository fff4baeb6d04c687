"""The training objective: `L_I + alpha L_lrd` and a penalty on the factor.

`L_I = -log N(y | mu, I)` keeps the mean from being neglected where the predicted variance is large; `L_lrd` is the
negative log-likelihood of the low-rank Gaussian. Both are divided by the number of outputs, so that a value of alpha
means the same at every image size.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lrd_uq.checks import check_weights
from lrd_uq.heads import MeanHead, Output, existing


class Losses(NamedTuple):
    """The result of `Objective`: scalar losses per output, averaged over the batch.

    Attributes:
        total: what is minimised.
        identity: `L_I`
        low_rank: `L_lrd`
        factor_loss: the term for the factor, before its weight: the mean over outputs of `sum_r P_sr^2`.
    """

    total: Tensor
    identity: Tensor
    low_rank: Tensor
    factor_loss: Tensor


class Objective:
    """The loss of a training step, from the output of a head.

        L_I + alpha L_lrd + factor_penalty * mean_s sum_r P_sr^2
        L_I = -log N(target; mean, I) / S,    L_lrd = -log N(target; mean, diag(D) + P P^T) / S

    Args:
        alpha: weight of the likelihood; may change during training (`own_alpha` is the value given here).
        factor_penalty: weight of the penalty on the factor. A factor that explodes in one direction costs the
            likelihood only a few nats, but makes the predicted variance of sums over regions far too large.
        separate_mean: detach the mean in the likelihood, so that only `L_I` trains it (see `SplitNet`).

    Raises:
        ValueError: if a weight is negative or not finite.

    Examples:
        >>> from lrd_uq.heads import LowRankHead
        >>> from lrd_uq.objectives import Objective
        >>> head = LowRankHead(channels=4, rank=2)
        >>> losses = Objective(alpha=0.125)(head, head(torch.zeros(5, 4, 8, 8)), torch.zeros(5, 64))
        >>> losses.total.shape
        torch.Size([])
    """

    step = 0  # of the training; `JointUncertainty` sets it

    def __init__(self, alpha: float = 0.125, factor_penalty: float = 0.01, separate_mean: bool = False) -> None:
        check_weights(alpha=alpha, factor_penalty=factor_penalty)
        self.own_alpha = self.alpha = alpha
        self.factor_penalty, self.separate_mean = factor_penalty, separate_mean

    def __call__(self, head: MeanHead, output: Output, target: Tensor, mask: Tensor | None = None) -> Losses:
        """Losses, each a scalar, for `target` [B, S]; `mask` [B, S] is True where an output exists."""
        identity = self.identity(output, target, mask)
        if output.raw_diag is None:
            return Losses(identity, identity, identity, torch.zeros_like(identity))
        output = head.settle(output, mask)
        if self.separate_mean:
            output = output._replace(mean=output.mean.detach())
        low_rank = head.nll(output, target, mask).mean()
        factor_loss = mean_over_outputs(head.low_rank_variance(output), mask).mean()
        total = identity + self.alpha * low_rank + self.factor_penalty * factor_loss
        return Losses(total, identity, low_rank, factor_loss)

    @staticmethod
    def identity(output: Output, target: Tensor, mask: Tensor | None) -> Tensor:
        """The term `L_I`, a scalar: the squared error of the mean, for `target` and `mask` [B, S]."""
        residual = existing(target - output.mean, mask)
        return 0.5 * mean_over_outputs(residual.square(), mask).mean() + 0.5 * math.log(2 * math.pi)


def mean_over_outputs(values: Tensor, mask: Tensor | None) -> Tensor:
    """Mean over the outputs that exist: [B, S] -> [B]."""
    if mask is None:
        return values.mean(-1)
    return existing(values, mask).sum(-1) / mask.sum(-1).clamp(min=1)
