"""Calibration of the sum over a region, whose predicted variance depends on the correlations."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import lrd_kernels as lrd

NINETY_PERCENT = 1.6448536269514722  # half-width of the central 90 % interval of a standard normal


class Calibration(NamedTuple):
    """Calibration of standardised errors; 1 and 0.9 are ideal."""

    rms: float
    coverage: float  # share inside the central 90 % interval


def standardised_sum(gaussian: lrd.LowRankMultivariateNormal, target: Tensor, mask: Tensor) -> Tensor:
    """Error of the sum over the outputs where `mask` [B, S] is True, divided by its predicted deviation: [B]."""
    weights = mask.double()
    error = torch.where(mask, target - gaussian.loc, 0).double().sum(-1)
    through_factor = (weights[:, None].to(gaussian.cov_factor.dtype) @ gaussian.cov_factor).double()  # [B, 1, R]
    variance = (weights * gaussian.cov_diag.double()).sum(-1) + through_factor.square().sum((-2, -1))
    return error / variance.sqrt()


def calibration(z: Tensor) -> Calibration:
    return Calibration(float(z.square().mean().sqrt()), float((z.abs() <= NINETY_PERCENT).double().mean()))
