"""Whole pipelines as further curves: from T predictions to a joint Gaussian that is scored, sampled and looked at."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from benchmarks import joint
from benchmarks.registry import Prepared

T, R, KEPT = 64, 8, 64


class Pipeline(NamedTuple):
    """One that is measured as a whole, at one rank."""

    rank: int
    parameters: Callable[[int], int]  # numbers that go in, by the variables
    prepare: Callable[[int, str], Callable[[], Prepared]]


def _joint(function: Callable[..., tuple[Tensor, ...]]) -> Pipeline:
    def prepare(S: int, layout: str) -> Callable[[], Prepared]:
        inputs = joint.predictions(S, T, R, layout)
        return lambda: Prepared(lambda: function(*inputs, min(KEPT, S)), None, lambda result: result)

    return Pipeline(R, lambda S: T * S * (R + 2), prepare)


PIPELINES = {"joint lrd": _joint(joint.ours), "joint torch": _joint(joint.plain)}
