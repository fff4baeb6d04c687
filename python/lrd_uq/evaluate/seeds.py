"""Comparison of two methods that were each trained with several seeds and scored on the same items."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

LEVEL = 0.95
RESAMPLES = 4999
Interval = tuple[float, float]


class SeedDifference(NamedTuple):
    """Difference in log-likelihood of two methods, paired over seeds and items, in nats per item.

    The two intervals answer different questions: `over_seeds`, how the mean over these items would come out with other
    seeds; `over_items`, how it would with other items for these seeds. None where there are too few to say.

    Attributes:
        per_seed: mean over the items, for each seed.
        mean: mean of these.
        over_seeds: 95 % interval over seeds, by Student's t of `per_seed`.
        over_items: 95 % interval over items, by bootstrap (BCa) of the differences averaged over the seeds.
        share_gaining: share of the items whose difference, averaged over the seeds, is positive.

    Examples:
        >>> from lrd_uq.evaluate import SeedDifference
        >>> SeedDifference((2.0, -1.0), 0.5, None, None, 0.5).in_favour
        1
    """

    per_seed: tuple[float, ...]
    mean: float
    over_seeds: Interval | None
    over_items: Interval | None
    share_gaining: float

    @property
    def in_favour(self) -> int:
        """Number of seeds with a positive difference."""
        return sum(seed > 0 for seed in self.per_seed)


def over_seeds(better: Sequence[Tensor], worse: Sequence[Tensor]) -> SeedDifference:
    """Compares log-likelihoods, one tensor [N] for each seed, of the same items in the same order.

    Examples:
        >>> from lrd_uq.evaluate import over_seeds
        >>> found = over_seeds([torch.tensor([3.0, 5.0])] * 2, [torch.tensor([2.0, 2.0]), torch.tensor([4.0, 2.0])])
        >>> found.per_seed, found.mean, found.in_favour
        ((2.0, 1.0), 1.5, 2)
    """
    differences = np.stack([(a - b).double().numpy() for a, b in zip(better, worse, strict=True)])  # [seeds, N]
    per_seed, per_item = differences.mean(1), differences.mean(0)
    return SeedDifference(
        per_seed=tuple(float(seed) for seed in per_seed),
        mean=float(per_seed.mean()),
        over_seeds=student_interval(per_seed),
        over_items=bootstrap_interval(per_item),
        share_gaining=float((per_item > 0).mean()),
    )


def student_interval(values: np.ndarray) -> Interval | None:
    """The 95 % interval of the mean of a few values, by Student's t. None for less than two, or for NaN."""
    from scipy import stats

    if len(values) < 2 or not np.isfinite(values).all():
        return None
    half = stats.t.ppf((1 + LEVEL) / 2, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values))
    return float(values.mean() - half), float(values.mean() + half)


def bootstrap_interval(values: np.ndarray) -> Interval | None:
    """The 95 % interval of the mean of many values, by bootstrap (BCa) with a fixed seed. None for less than two, or
    for NaN."""
    from scipy import stats

    if len(values) < 2 or not np.isfinite(values).all():
        return None
    if np.ptp(values) == 0:
        return float(values[0]), float(values[0])
    found = stats.bootstrap(
        (values,), np.mean, n_resamples=RESAMPLES, confidence_level=LEVEL, batch=500, rng=np.random.default_rng(0)
    )
    return float(found.confidence_interval.low), float(found.confidence_interval.high)
