"""Joint forecasts of several time series: the demand of regions with the same weather over the next hours."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lrd_uq.checks import check_counts
from lrd_uq.data.batch import Batch
from lrd_uq.data.task import Datasets, Items, Task

DAY = 24
WEATHERS = 3  # weather series, on which each region depends to a different degree


def regional_demand(hours: int, regions: int, seed: int) -> Tensor:
    """Demand [regions, hours]: daily and weekly cycles, slowly varying weather, and noise of each region.

    All regions depend on the same weather, so the errors of a forecast are correlated: the sum over regions is far less
    certain than with independent errors.
    """
    noise = torch.Generator().manual_seed(seed)
    time = torch.arange(hours, dtype=torch.float64)

    def wandering(count: int, memory: float, size: float) -> Tensor:
        steps = size * math.sqrt(1 - memory**2) * torch.randn(count, hours, generator=noise, dtype=torch.float64)
        values, current = torch.empty_like(steps), torch.zeros(count, dtype=torch.float64)
        for t in range(hours):
            current = memory * current + steps[:, t]
            values[:, t] = current
        return values

    phase, height = torch.rand(regions, 1, generator=noise), 0.6 + 0.4 * torch.rand(regions, 1, generator=noise)
    daily = height * torch.sin(2 * math.pi * (time / DAY - 0.25 - 0.1 * phase))
    weekly = -0.4 * ((time / DAY).floor() % 7 >= 5).double()
    shares = 0.3 + 0.7 * torch.rand(regions, WEATHERS, generator=noise, dtype=torch.float64)
    weather = shares @ wandering(WEATHERS, 0.97, 0.4)
    return (daily + weekly + weather + wandering(regions, 0.8, 0.15)).float()


class RegionalDemand(Task):
    """Input [regions, history + 2]: the last hours, and sine and cosine of the time of day. Target [regions, horizon].

    Regions are the positions of the head, and hours its outputs: use a head with `features_last=True`. Training,
    validation and test data follow one another in time.

    Args:
        regions: number of series, which are forecast together.
        history: hours in the input.
        horizon: hours to forecast.
        train, val, test: number of windows of each part.
        batch_size, steps_per_epoch, seed, split_seed: see `Task`.
    """

    def __init__(
        self,
        regions: int = 12,
        history: int = 48,
        horizon: int = 12,
        train: int = 2000,
        val: int = 200,
        test: int = 400,
        batch_size: int = 32,
        steps_per_epoch: int | None = None,
        seed: int = 0,
        split_seed: int = 0,
    ) -> None:
        super().__init__(batch_size, steps_per_epoch, seed, split_seed=split_seed)
        check_counts(regions=regions, history=history, horizon=horizon, train=train, val=val, test=test)
        self.regions, self.history, self.horizon, self.counts = regions, history, horizon, (train, val, test)

    def datasets(self) -> Datasets:
        span = self.history + self.horizon
        values = regional_demand(sum(self.counts) + 3 * span, self.regions, self.split_seed)
        found, begin = [], 0
        for count in self.counts:
            found.append(Items(self.windows(values, begin, count)))
            begin += count + span  # the parts do not overlap
        train, val, test = found
        return train, val, test

    def windows(self, values: Tensor, begin: int, count: int) -> Batch:
        """`count` windows, each one hour after the previous one."""
        part = values[:, begin : begin + count + self.history + self.horizon - 1]
        slices = part.unfold(1, self.history + self.horizon, 1).movedim(1, 0)  # [count, regions, history + horizon]
        hour = 2 * math.pi * (begin + self.history + torch.arange(count)) / DAY
        clock = torch.stack([hour.sin(), hour.cos()], -1)[:, None].expand(-1, self.regions, -1)
        return Batch(
            torch.cat([slices[..., : self.history], clock], -1), slices[..., self.history :].contiguous(), None
        )
