"""Columns as principal components of the error (NPPC, Nehme et al. 2024), beside a diagonal learnt by likelihood.

The factor's columns are orthogonal, and each is to be as long as the error's standard deviation along it. The error
`e` is taken as given; with `p_r` a column and `q_r` its direction, the two losses are

    direction   1 - |Q^T e|^2 / |e|^2                                  the share of the error that they leave
    variance    sum_r (|p_r|^2 - (q_r^T e)^2)^2 / |e|^4

The diagonal gets the likelihood with mean and factor as given, `-log N(y | mu, D + P P^T)`. The paper prints this term
without the minus sign, and the direction loss without its division by `|e|^2`: minimised as printed, the one would make
the data unlikely, and the other would count items by the size of their error. The variance loss is divided by `|e|^4`,
as the paper says of NPPC's own implementation.
"""

from __future__ import annotations

from torch import Tensor

from lrd_uq.heads import LowRankHead, MeanHead, Output, existing
from lrd_uq.objectives import Losses, Objective


class NppcObjective(Objective):
    """`L_I + alpha L_lrd* + beta (direction + variance)`. Wants a head with orthogonal columns, and is stable where the
    mean has a network of its own (`SplitNet`).

    Args:
        alpha: weight of the likelihood, which trains the diagonal alone.
        beta: weight of each of the two losses of the factor.
    """

    def __init__(self, alpha: float = 0.125, beta: float = 1.0) -> None:
        super().__init__(alpha, 0.0, separate_mean=True)
        self.beta = beta

    def __call__(self, head: MeanHead, output: Output, target: Tensor, mask: Tensor | None = None) -> Losses:
        """`penalty` of the result is direction plus variance, before its weight."""
        if not isinstance(head, LowRankHead) or not head.orthogonal or head.is_scaled:
            raise ValueError("NPPC wants a LowRankHead(orthogonal=True) with the plain parametrisation")
        output = head.settle(output, mask)
        if output.factor.shape[-1] == 0:  # a phase of rank 0
            return super().__call__(head, output, target, mask)
        identity = self.identity(output, target, mask)
        given = output._replace(mean=output.mean.detach(), factor=output.factor.detach())
        likelihood = head.nll(given, target, mask).mean()
        penalty = nppc_losses(output.factor, existing(target - output.mean, mask).detach()).mean()
        return Losses(identity + self.alpha * likelihood + self.beta * penalty, identity, likelihood, penalty)


def nppc_losses(factor: Tensor, error: Tensor) -> Tensor:
    """Direction plus variance loss of orthogonal columns [B, S, R] and errors [B, S]: [B]."""
    lengths = factor.square().sum(-2).clamp(min=1e-12)  # [B, R], squared
    along = (factor.mT @ error[..., None])[..., 0].square() / lengths  # (q_r^T e)^2
    size = error.square().sum(-1).clamp(min=1e-12)  # |e|^2
    return (1 - along.sum(-1) / size) + (lengths - along).square().sum(-1) / size.square()
