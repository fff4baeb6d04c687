"""Arguments of the distribution's methods that select outputs or weigh them."""

from __future__ import annotations

import torch
from torch import Tensor

from lrd_kernels.ops import dispatch

MOST_EMPTY_REGIONS = 1024  # more regions than outputs, and than this, are taken for a mistake

Index = int | slice | list[int] | Tensor


def positions(index: Index, S: int, device: torch.device) -> Tensor:
    """Converts an index to positions [n], each of another output."""
    every = torch.arange(S, device=device)
    if isinstance(index, slice):
        return every[index]
    try:
        chosen = torch.as_tensor(index, device=device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise TypeError(f"index must be a slice, integer positions or a bool mask; got {index!r}") from error
    if chosen.dtype == torch.bool and chosen.shape != (S,):
        raise ValueError(f"a bool index must have shape [{S}]; got {tuple(chosen.shape)}")
    if chosen.numel() and (chosen.is_floating_point() or chosen.is_complex()):
        raise TypeError(f"index must be a slice, integer positions or a bool mask; got {chosen.dtype}")
    positions = every[chosen if chosen.dtype == torch.bool else chosen.long()].reshape(-1)
    if len(positions.unique()) != len(positions):
        raise ValueError("index must not name an output twice")
    return positions


def measurement_noise(noise: float | Tensor, value: Tensor) -> Tensor:
    """Variances of the errors of measured values, in float64."""
    wide = torch.as_tensor(noise, dtype=torch.float64, device=value.device)
    if wide.dim() and wide.shape[-1:] != value.shape[-1:]:
        raise ValueError(f"noise must be a number, or have shape [..., {value.shape[-1]}]; got {tuple(wide.shape)}")
    if dispatch.may_inspect(wide) and not bool(((wide > 0) & wide.isfinite()).all()):
        raise ValueError("noise must be a positive and finite variance; leave it out for exact values")
    return wide.expand(torch.broadcast_shapes(wide.shape, value.shape[-1:]))


def region_weights(labels: Tensor, reduction: str) -> Tensor:
    """Weights [K, S] for the sum or mean over the regions given by labels [S]."""
    if reduction not in ("sum", "mean"):
        raise ValueError(f"reduction must be 'sum' or 'mean'; got {reduction!r}")
    regions = int(labels.max()) + 1 if labels.numel() else 0
    if regions > max(len(labels), MOST_EMPTY_REGIONS):
        raise ValueError(f"labels must be numbers of regions from 0 on; got {regions - 1} for {len(labels)} outputs")
    weights = (labels == torch.arange(max(regions, 0), device=labels.device)[:, None]).double()
    return weights / weights.sum(-1, keepdim=True).clamp(min=1) if reduction == "mean" else weights
