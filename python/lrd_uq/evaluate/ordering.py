"""Paired comparison of two methods on the same images."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor


class Difference(NamedTuple):
    """Difference in log-likelihood, paired over images, in nats per image: the result of `paired`.

    Attributes:
        mean: mean over images.
        error: standard error of the mean.
        median: median over images.
        share_gaining: share of the images with a positive difference.
    """

    mean: float
    error: float
    median: float
    share_gaining: float

    def __str__(self) -> str:
        if not math.isfinite(self.mean):
            return "not comparable: not all images have a log-likelihood"
        error = f" ± {self.error:.1f}" if math.isfinite(self.error) else ""  # a single image has none
        gaining = f"{self.share_gaining:.0%} of the images gain"
        return f"{self.mean:+.1f}{error} nats, median image {self.median:+.1f}, {gaining}"


def paired(better: Tensor, worse: Tensor) -> Difference:
    """Compares the log-likelihoods [N] of two rows.

    Examples:
        >>> from lrd_uq.evaluate import paired
        >>> print(paired(torch.tensor([3.0, 5.0]), torch.tensor([2.0, 2.0])))
        +2.0 ± 1.0 nats, median image +1.0, 100% of the images gain
    """
    difference = (better - worse).double()
    error = float(difference.std()) / math.sqrt(len(difference)) if len(difference) > 1 else math.nan
    gaining = float((difference > 0).double().mean())
    return Difference(float(difference.mean()), error, float(difference.median()), gaining)
