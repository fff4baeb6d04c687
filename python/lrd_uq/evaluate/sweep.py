"""Joint Gaussians truncated to fewer columns, with the dropped variance folded into the diagonal or discarded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import lrd_kernels as lrd


def kept_columns(
    joint: lrd.LowRankMultivariateNormal, ranks: Sequence[int]
) -> Iterator[tuple[str, lrd.LowRankMultivariateNormal]]:
    """Key and Gaussian for each rank below that of the joint, folded and not folded."""
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
    return f"joint {rank}" if folded else f"joint {rank} unfolded"
