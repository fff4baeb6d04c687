"""Whole pipelines as additional curves: from T predictions to a joint Gaussian with its log p, samples and modes; and
one training step of a U-Net on a picture with three channels."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from benchmarks import joint
from benchmarks.registry import LAYOUTS, Prepared

T, R, KEPT = 64, 8, 64
GRID = 8  # the U-Net halves the size of its pictures three times


class Pipeline(NamedTuple):
    """A pipeline that is measured as a whole, at one rank."""

    rank: int
    parameters: Callable[[int], int]  # variables -> number of input entries
    products: Callable[[int], float]  # variables -> approximate number of multiplications
    prepare: Callable[[int, str], Callable[[], Prepared]]
    layouts: tuple[str, ...] = LAYOUTS
    needs: str | None = None  # name of a required package

    def unavailable(self) -> str | None:
        missing = self.needs is not None and importlib.util.find_spec(self.needs) is None
        return f"{self.needs} is not installed" if missing else None


def _joint(function: Callable[..., tuple[Tensor, ...]]) -> Pipeline:
    def prepare(S: int, layout: str) -> Callable[[], Prepared]:
        inputs = joint.predictions(S, T, R, layout)
        return lambda: Prepared(lambda: function(*inputs, min(KEPT, S)), None, lambda result: result)

    columns = T * (R + 1)
    return Pipeline(R, lambda S: T * S * (R + 2), lambda S: 4.0 * S * columns**2 + columns**3, prepare)


def side_of(S: int) -> int:
    """The side of a square picture with three channels and about S entries."""
    return max(GRID * round(math.sqrt(S / 3) / GRID), 2 * GRID)


def _step(contestant: str) -> Pipeline:
    def prepare(S: int, layout: str) -> Callable[[], Prepared]:
        from benchmarks import training

        step = training.training_step(contestant, *training.setting(side_of(S), 1, R))
        return lambda: Prepared(None, lambda: (step(),), lambda result: result)

    # the convolutions of the U-Net take about 2e4 multiplications per pixel, and twice that for the gradients
    products = lambda S: 6e4 * side_of(S) ** 2  # noqa: E731
    return Pipeline(R, lambda S: 2 * 3 * side_of(S) ** 2, products, prepare, layouts=("rank",), needs="monai")


PIPELINES = {
    "joint lrd": _joint(joint.ours),
    "joint torch": _joint(joint.plain),
    "training step lrd": _step("lrd"),
    "training step torch": _step("torch"),
}
