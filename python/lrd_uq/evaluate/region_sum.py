"""Calibration of the sum over a region, whose predicted variance depends on the correlations."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import lrd_kernels as lrd

NINETY_PERCENT = 1.6448536269514722  # half-width of the central 90 % interval of a standard normal


class Calibration(NamedTuple):
    """Calibration of standardised errors, the result of `calibration`.

    Attributes:
        rms: their root mean square; 1 is ideal, more is overconfident.
        coverage: the share inside the central 90 % interval; 0.9 is ideal.
    """

    rms: float
    coverage: float


def standardised_sum(gaussian: lrd.LowRankMultivariateNormal, target: Tensor, mask: Tensor) -> Tensor:
    """Error of the sum over the outputs where `mask` [B, S] is True, divided by its predicted deviation: [B].

        z = sum_i (target_i - mu_i) / sqrt(sum_ij Sigma_ij)

    Examples:
        >>> from lrd_uq.evaluate import standardised_sum
        >>> d = lrd.LowRankMultivariateNormal(torch.zeros(1, 2), torch.ones(1, 2, 1), torch.zeros(1, 2) + 6)
        >>> standardised_sum(d, torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool))  # 2 / sqrt(6 + 6 + 4)
        tensor([0.5000], dtype=torch.float64)
    """
    weights = mask.double()
    error = torch.where(mask, target - gaussian.loc, 0).double().sum(-1)
    through_factor = (weights[:, None].to(gaussian.cov_factor.dtype) @ gaussian.cov_factor).double()  # [B, 1, R]
    variance = (weights * gaussian.cov_diag.double()).sum(-1) + through_factor.square().sum((-2, -1))
    return error / variance.sqrt()


def calibration(z: Tensor) -> Calibration:
    """Root mean square and coverage of standardised errors z [N], as those of `standardised_sum`; NaN if a z is.

    Examples:
        >>> from lrd_uq.evaluate import calibration
        >>> calibration(torch.tensor([1.0, -1.0, 1.0, -1.0]))
        Calibration(rms=1.0, coverage=1.0)
    """
    inside = torch.where(z.isnan(), torch.nan, (z.abs() <= NINETY_PERCENT).double())
    return Calibration(float(z.square().mean().sqrt()), float(inside.mean()))
