"""Whole pipelines as further curves: from T predictions to a joint Gaussian that is scored, sampled and looked at; one
training step of a U-Net on a picture of three channels."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from benchmarks import joint
from benchmarks.registry import LAYOUTS, Prepared

T, R, KEPT = 64, 8, 64
GRID = 8  # the U-Net halves its pictures three times


class Pipeline(NamedTuple):
    """One that is measured as a whole, at one rank."""

    rank: int
    parameters: Callable[[int], int]  # numbers that go in, by the variables
    products: Callable[[int], float]  # multiplications, roughly, by the variables
    prepare: Callable[[int, str], Callable[[], Prepared]]
    layouts: tuple[str, ...] = LAYOUTS
    needs: str | None = None  # a package

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
    """Of a square picture of three channels with about S numbers."""
    return max(GRID * round(math.sqrt(S / 3) / GRID), 2 * GRID)


def _step(contestant: str) -> Pipeline:
    def prepare(S: int, layout: str) -> Callable[[], Prepared]:
        from benchmarks import training

        step = training.training_step(contestant, *training.setting(side_of(S), 1, R))
        return lambda: Prepared(None, lambda: (step(),), lambda result: result)

    # the convolutions of the U-Net multiply about 2e4 times a pixel, and twice that for the gradients
    products = lambda S: 6e4 * side_of(S) ** 2  # noqa: E731
    return Pipeline(R, lambda S: 2 * 3 * side_of(S) ** 2, products, prepare, layouts=("rank",), needs="monai")


PIPELINES = {
    "joint lrd": _joint(joint.ours),
    "joint torch": _joint(joint.plain),
    "training step lrd": _step("lrd"),
    "training step torch": _step("torch"),
}
