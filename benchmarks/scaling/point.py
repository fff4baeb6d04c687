"""Measures one point of a curve: memory first, then times. Called in a fresh process for each point."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks import machine, measure, memory
from benchmarks.registry import DIRECTIONS, Prepared
from benchmarks.scaling import methods
from benchmarks.scaling.methods import Curve

REPEATS = 100  # at most
WARM_VARIABLES, WARM_RANK = 64, 512  # at most, of the warm-up call


def measure_point(parts: Sequence, S: int, device: str, seconds: float) -> dict:
    """Bytes of the parameters, and for each direction the working memory beyond them and the times.

    `parts` are the fields of a `Curve`.
    """
    curve = Curve(*parts)
    if not curve.method.startswith(("compile", "jax")):  # those compile for the exact sizes
        small = curve._replace(rank=curve.rank and min(curve.rank, WARM_RANK))
        run(methods.prepare(small, max(WARM_VARIABLES, small.rank or 0), device)())
    with memory.Usage(device) as parameters:
        ready = methods.prepare(curve, S, device)
    prepared = ready()
    record: dict = {"parameter_bytes": parameters.held}
    if curve.method.startswith(("compile", "jax")):
        run(prepared)
    directions = [direction for direction in DIRECTIONS if getattr(prepared, direction)]
    for direction in directions:
        with memory.Usage(device) as working:
            result = getattr(prepared, direction)()
        record[direction] = {"working_bytes": working.peak}
    record["log_prob"] = float(prepared.tensors(result)[0].sum())
    del result
    other_work = machine.OtherWork()
    calls = {direction: synchronised(getattr(prepared, direction), device) for direction in directions}
    for direction, timing in measure.interleave(calls, REPEATS, seconds).items():
        record[direction] |= timing
    return record | {"cores_busy_with_other_work": other_work.cores()}


def run(prepared: Prepared) -> None:
    for direction in DIRECTIONS:
        if call := getattr(prepared, direction):
            call()


def synchronised(call: Callable[[], Any], device: str) -> Callable[[], Any]:
    if device == "cpu":
        return call

    def wait() -> None:
        call()
        torch.cuda.synchronize()

    return wait
