"""Is the sum over a region as uncertain as the covariance says? Correlations decide."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import lrd_kernels as lrd

NINETY_PERCENT = 1.6448536269514722  # of a standard normal lie within plus or minus this


class Calibration(NamedTuple):
    """Of standardised errors: 1 and 0.9 are ideal."""

    rms: float
    coverage: float  # share inside the central 90 % interval


def standardised_sum(gaussian: lrd.LowRankMultivariateNormal, target: Tensor, mask: Tensor) -> Tensor:
    """[B]: error of the sum over the outputs where `mask` [B, S] is True, over its predicted standard deviation."""
    weights = mask.double()
    error = torch.where(mask, target - gaussian.loc, 0).double().sum(-1)
    through_factor = (weights[:, None].to(gaussian.cov_factor.dtype) @ gaussian.cov_factor).double()  # [B, 1, R]
    variance = (weights * gaussian.cov_diag.double()).sum(-1) + through_factor.square().sum((-2, -1))
    return error / variance.sqrt()


def calibration(z: Tensor) -> Calibration:
    return Calibration(float(z.square().mean().sqrt()), float((z.abs() <= NINETY_PERCENT).double().mean()))
