"""Columns as principal components of the error (NPPC, Nehme et al. 2024); the likelihood trains the diagonal.

The columns of the factor are orthogonal, and the length of each should equal the standard deviation of the error along
it. The error `e` is detached; with `p_r` a column and `q_r` its direction, the two losses are

    direction   1 - |Q^T e|^2 / |e|^2                                  the share of the error outside the columns
    variance    sum_r (|p_r|^2 - (q_r^T e)^2)^2 / |e|^4

The diagonal is trained by the likelihood with detached mean and factor, `-log N(y | mu, D + P P^T)`. The paper prints
this term without the minus sign, and the direction loss without the division by `|e|^2`: minimised as printed, the
first would make the data unlikely, and the second would weight items by the size of their error. The variance loss is
divided by `|e|^4`, as the paper says of NPPC's own implementation.
"""

from __future__ import annotations

from torch import Tensor

from lrd_uq.heads import LowRankHead, MeanHead, Output, existing
from lrd_uq.objectives import Losses, Objective, check_weights


class NppcObjective(Objective):
    """The loss that makes the columns principal components of the error (NPPC).

        L_I + alpha L_lrd* + beta (direction + variance)

    Requires a head with orthogonal columns. Training is stable when a separate network predicts the mean (`SplitNet`).

    Args:
        alpha: weight of the likelihood, which trains only the diagonal.
        beta: weight of each of the two losses of the factor.

    A call raises ValueError for a head without orthogonal columns.

    Examples:
        >>> from lrd_uq.heads import LowRankHead
        >>> from lrd_uq.nppc import NppcObjective
        >>> head = LowRankHead(channels=4, rank=2, orthogonal=True)
        >>> losses = NppcObjective()(head, head(torch.randn(5, 4, 8, 8)), torch.zeros(5, 64))
        >>> losses.total.shape
        torch.Size([])
    """

    def __init__(self, alpha: float = 0.125, beta: float = 1.0) -> None:
        super().__init__(alpha, 0.0, separate_mean=True)
        check_weights(beta=beta)
        self.beta = beta

    def __call__(self, head: MeanHead, output: Output, target: Tensor, mask: Tensor | None = None) -> Losses:
        """As `Objective`; `factor_loss` is direction plus variance loss, before its weight."""
        if not isinstance(head, LowRankHead) or not head.orthogonal or head.is_scaled:
            raise ValueError("NPPC needs a LowRankHead(orthogonal=True) with the plain parametrisation")
        output = head.settle(output, mask)
        if output.factor.shape[-1] == 0:  # a phase of rank 0
            return super().__call__(head, output, target, mask)
        identity = self.identity(output, target, mask)
        given = output._replace(mean=output.mean.detach(), factor=output.factor.detach())
        likelihood = head.nll(given, target, mask).mean()
        factor_loss = nppc_losses(output.factor, existing(target - output.mean, mask).detach()).mean()
        return Losses(identity + self.alpha * likelihood + self.beta * factor_loss, identity, likelihood, factor_loss)


def nppc_losses(factor: Tensor, error: Tensor) -> Tensor:
    """Direction plus variance loss for orthogonal columns [B, S, R] and errors [B, S]: [B]."""
    lengths = factor.square().sum(-2).clamp(min=1e-12)  # squared: [B, R]
    along = (factor.mT @ error[..., None])[..., 0].square() / lengths  # (q_r^T e)^2
    size = error.square().sum(-1).clamp(min=1e-12)  # |e|^2
    return (1 - along.sum(-1) / size) + (lengths - along).square().sum(-1) / size.square()
