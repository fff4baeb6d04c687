"""One point of one curve, in a process of its own: memory first, then times.

`python -m benchmarks.scaling.point CURVE VARIABLES DEVICE SECONDS` prints one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys

import torch

from benchmarks import machine, measure, memory
from benchmarks.registry import DIRECTIONS, Prepared
from benchmarks.scaling import methods
from benchmarks.scaling.methods import Curve

REPEATS = 100  # of a time, at the most
WARM_VARIABLES, WARM_RANK = 64, 512  # at most, of the call that starts the threads and touches the code


def measure_point(curve: Curve, S: int, device: str, seconds: float) -> dict:
    """Bytes of the parameters, and for each direction the working memory beyond them and the times."""
    if not curve.method.startswith(("compile", "jax")):  # which compile for the very sizes
        small = curve._replace(rank=curve.rank and min(curve.rank, WARM_RANK))
        run(methods.prepare(small, max(WARM_VARIABLES, small.rank or 0), device)())
    with Used(device) as parameters:
        ready = methods.prepare(curve, S, device)
    prepared = ready()
    record: dict = {"parameter_bytes": parameters.held}
    if curve.method.startswith(("compile", "jax")):
        run(prepared)
    directions = [direction for direction in DIRECTIONS if getattr(prepared, direction)]
    for direction in directions:
        with Used(device) as working:
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


def synchronised(call, device: str):
    if device == "cpu":
        return call

    def wait() -> None:
        call()
        torch.cuda.synchronize()

    return wait


class Used:
    """Memory that is held after the `with`, and the most inside it, beyond what was held before: of the process, or of
    torch's allocator on a GPU."""

    held = peak = 0

    def __init__(self, device: str) -> None:
        self.on_gpu = device != "cpu"

    def __enter__(self) -> Used:
        memory.release()
        if self.on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        else:
            memory.CLEAR_REFS.write_text("5")
        self._before = self._held()
        return self

    def __exit__(self, *_: object) -> None:
        self.peak = max(self._peak() - self._before, 0)
        gc.collect()
        self.held = max(self._held() - self._before, 0)

    def _held(self) -> int:
        return torch.cuda.memory_allocated() if self.on_gpu else memory.resident("VmRSS")

    def _peak(self) -> int:
        return torch.cuda.max_memory_allocated() if self.on_gpu else memory.resident("VmHWM")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling.point", description=__doc__)
    parser.add_argument("curve", type=Curve.parse)
    parser.add_argument("variables", type=int)
    parser.add_argument("device")
    parser.add_argument("seconds", type=float)
    options = parser.parse_args()
    try:
        print(json.dumps(measure_point(options.curve, options.variables, options.device, options.seconds)))
    except (MemoryError, torch.OutOfMemoryError) as error:
        sys.exit(f"out of memory: {error}")


if __name__ == "__main__":
    main()
