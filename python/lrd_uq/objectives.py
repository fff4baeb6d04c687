"""The loss: `L_I + alpha L_lrd`, a penalty on the factor, and what the weights cost.

`L_I = -log N(y | mu, I)` keeps the mean from being neglected where the predicted variance is large, `L_lrd` is the
likelihood of the low-rank Gaussian. Both are per output, so that alpha means the same at every size.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lrd_uq.heads import MeanHead, Output, existing


class Losses(NamedTuple):
    """Scalars, means over the batch, per output."""

    total: Tensor
    identity: Tensor  # L_I
    low_rank: Tensor  # L_lrd
    penalty: Tensor  # mean over outputs of sum_r P^2, before its weight


class Objective:
    """`L_I + alpha L_lrd + factor_penalty * mean_s sum_r P_sr^2`.

    Args:
        alpha: weight of the likelihood. It may change while training.
        factor_penalty: the likelihood alone hardly sees a factor that explodes in one direction: it costs a few nats,
            while sums over regions become absurdly uncertain. This makes it cost something.
        separate_mean: the likelihood has no say in the mean, which its own error alone trains (see `SplitNet`).
    """

    def __init__(self, alpha: float = 0.125, factor_penalty: float = 0.01, separate_mean: bool = False) -> None:
        self.alpha, self.factor_penalty, self.separate_mean = alpha, factor_penalty, separate_mean

    def __call__(self, head: MeanHead, output: Output, target: Tensor, mask: Tensor | None = None) -> Losses:
        """Of `target` [B, S]; `mask` [B, S] is True where an output exists."""
        identity = self.identity(output, target, mask)
        if output.raw_diag is None:
            return Losses(identity, identity, identity, torch.zeros_like(identity))
        output = head.settle(output, mask)
        if self.separate_mean:
            output = output._replace(mean=output.mean.detach())
        low_rank = head.nll(output, target, mask).mean()
        penalty = mean_over_outputs(head.low_rank_variance(output), mask).mean()
        total = identity + self.alpha * low_rank + self.factor_penalty * penalty
        return Losses(total, identity, low_rank, penalty)

    @staticmethod
    def identity(output: Output, target: Tensor, mask: Tensor | None) -> Tensor:
        """L_I."""
        residual = existing(target - output.mean, mask)
        return 0.5 * mean_over_outputs(residual.square(), mask).mean() + 0.5 * math.log(2 * math.pi)


def mean_over_outputs(values: Tensor, mask: Tensor | None) -> Tensor:
    """[B, S] -> [B], over the outputs that exist."""
    if mask is None:
        return values.mean(-1)
    return existing(values, mask).sum(-1) / mask.sum(-1).clamp(min=1)
