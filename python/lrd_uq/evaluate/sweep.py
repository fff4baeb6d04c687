"""Joint Gaussians truncated to fewer columns, with the dropped variance folded into the diagonal or discarded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import lrd_kernels as lrd


def kept_columns(
    joint: lrd.LowRankMultivariateNormal, ranks: Sequence[int]
) -> Iterator[tuple[str, lrd.LowRankMultivariateNormal]]:
    """Key and Gaussian for each rank below that of the joint, folded and not folded.

    Examples:
        >>> from lrd_uq.evaluate import kept_columns
        >>> joint = lrd.LowRankMultivariateNormal(torch.zeros(1, 9), torch.randn(1, 9, 4), torch.ones(1, 9))
        >>> {key: gaussian.cov_factor.shape[-1] for key, gaussian in kept_columns(joint, [1, 2, 8])}
        {'joint 1': 1, 'joint 1 unfolded': 1, 'joint 2': 2, 'joint 2 unfolded': 2}
    """
    ranks = [rank for rank in ranks if rank < joint.cov_factor.shape[-1]]
    if not ranks:
        return
    # The columns are orthogonal and sorted by length, so one truncation serves all ranks.
    columns, folded, _ = lrd.truncate(joint.cov_factor, joint.cov_diag, max(ranks))
    for rank in ranks:
        kept, diag = columns[..., :rank], folded + columns[..., rank:].square().sum(-1)
        for key, variances in ((key_of(rank, True), diag), (key_of(rank, False), joint.cov_diag)):
            yield key, lrd.LowRankMultivariateNormal(joint.loc, kept, variances, validate_args=False)


def key_of(rank: int, folded: bool) -> str:
    """The key of the row for the joint Gaussian truncated to `rank` columns.

    Examples:
        >>> from lrd_uq.evaluate import key_of
        >>> key_of(64, folded=False)
        'joint 64 unfolded'
    """
    return f"joint {rank}" if folded else f"joint {rank} unfolded"
