"""Columns as principal components of the error (NPPC, Nehme et al. 2024); the likelihood trains the diagonal.

The columns of the factor are orthogonal, and the length of each should equal the standard deviation of the error along
it. The error `e` is detached; with `p_r` a column, `q_r` its direction, and sg(.) what no gradient goes through,

    direction   1 - |Q^T e|^2 / |e|^2                                       the share of the error outside the columns
    variance    mean_r (|p_r|^2 - sg(q_r^T e)^2)^2 / |e|^4

As in the authors' published code (github.com/EliasNehme/NPPC):

- the mean comes from a network that was trained before and is frozen (`SplitNet(mean_run=)`);
- Gram-Schmidt passes no gradient through the directions of earlier columns, so that each column is trained for what the
  ones before it leave, and they come in the order of their importance;
- the variance loss does not train the directions, is a mean over columns, and is divided by `|e|^4`;
- its weight is 1e-6 for the first half of `grace` steps, rises linearly to 1 in the second half, and stays there.

What differs from that code: the diagonal, which NPPC does not have, is trained by `-log N(y | mu, D + P P^T)` with
detached mean and factor, as in the comparison of the paper that this package follows; AdamW with a one-cycle schedule
replaces Adam at a constant rate; inputs are not standardised. (That paper prints the likelihood without the minus sign,
the direction loss without the division by `|e|^2`, and the variance loss as a sum over columns.)
"""

from __future__ import annotations

from torch import Tensor

from lrd_uq.checks import check_weights
from lrd_uq.heads import LowRankHead, MeanHead, Output, existing, existing_rows, gram_schmidt
from lrd_uq.objectives import Losses, Objective


class NppcObjective(Objective):
    """The loss that makes the columns principal components of the error (NPPC).

        L_I + alpha L_lrd* + beta (direction + weight(step) variance)

    Requires a head with orthogonal columns, and is meant for a `SplitNet` with a mean that was trained before.

    Args:
        alpha: weight of the likelihood, which trains only the diagonal.
        beta: weight of the losses of the factor.
        grace: steps after which the variance loss has its full weight; 0 for all steps.

    Raises:
        ValueError: if a weight is negative or not finite, or if grace is negative.

    A call raises ValueError for a head without orthogonal columns.

    Examples:
        >>> from lrd_uq.heads import LowRankHead
        >>> from lrd_uq.nppc import NppcObjective
        >>> head = LowRankHead(channels=4, rank=2, orthogonal=True)
        >>> losses = NppcObjective()(head, head(torch.randn(5, 4, 8, 8)), torch.zeros(5, 64))
        >>> losses.total.shape
        torch.Size([])
    """

    def __init__(self, alpha: float = 0.125, beta: float = 1.0, grace: int = 1000) -> None:
        super().__init__(alpha, 0.0, separate_mean=True)
        check_weights(beta=beta, grace=grace)
        self.beta, self.grace = beta, grace

    @property
    def variance_weight(self) -> float:
        """Weight of the variance loss at the current step."""
        return 1.0 if self.grace == 0 else max(min(2 * self.step / self.grace - 1, 1.0), 1e-6)

    def __call__(self, head: MeanHead, output: Output, target: Tensor, mask: Tensor | None = None) -> Losses:
        """As `Objective`; `factor_loss` is direction loss plus weighted variance loss, before beta."""
        if not isinstance(head, LowRankHead) or not head.orthogonal or head.is_scaled:
            raise ValueError("NPPC needs a LowRankHead(orthogonal=True) with the plain parametrisation")
        if output.factor.shape[-1] == 0:  # a phase of rank 0
            return super().__call__(head, output, target, mask)
        identity = self.identity(output, target, mask)
        factor = gram_schmidt(existing_rows(output.factor, mask), detach_earlier=True)
        given = output._replace(mean=output.mean.detach(), factor=factor.detach())
        likelihood = head.nll(given, target, mask).mean()
        direction, variance = nppc_losses(factor, existing(target - output.mean, mask).detach())
        factor_loss = direction.mean() + self.variance_weight * variance.mean()
        return Losses(identity + self.alpha * likelihood + self.beta * factor_loss, identity, likelihood, factor_loss)


def nppc_losses(factor: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    """Direction and variance loss, each [B], for orthogonal columns [B, S, R] and errors [B, S]."""
    lengths = factor.square().sum(-2).clamp(min=1e-12)  # squared: [B, R]
    along = (factor.mT @ error[..., None])[..., 0].square() / lengths  # (q_r^T e)^2
    size = error.square().sum(-1).clamp(min=1e-12)  # |e|^2
    variance = (lengths - along.detach()).square().mean(-1) / size.square()
    return 1 - along.sum(-1) / size, variance
