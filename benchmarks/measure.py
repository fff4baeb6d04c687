"""Compares results and times calls. A contestant is timed only after its results were found to be right."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import memory
from benchmarks.registry import DIFFERENTIATED, Contestant, Prepared
from lrd_kernels import reference, testing
from lrd_kernels.testing import Inputs

LEAST_ROUNDS = 3
SAMPLE_SECONDS = 2e-3  # a sample is the mean over as many calls as fill this time


def truth(inputs: Inputs) -> list[Tensor]:
    """log p and the gradients of its sum with respect to loc, cov_factor and cov_diag: the reference in float64."""
    result, _, *gradients = testing.value_and_grads(reference.log_prob, [t.double() for t in inputs])
    return [result, *gradients]


def admit(contestant: Contestant, inputs: Inputs, wanted: Sequence[Tensor]) -> tuple[Prepared | None, dict]:
    """Prepares a contestant and compares its results with the truth.

    Returns (None, record) if it must not be timed; the record holds the reason.
    """
    if reason := contestant.available():
        return None, {"status": "skipped", "reason": reason}
    try:
        prepared = contestant.prepare(inputs)
        # The forward call can take another route than the one with gradients, so its result is checked as well.
        forward = torch.tensor(np.asarray(prepared.forward()))
        results = [forward, *prepared.tensors(prepared.forward_backward())]
        errors = compare(results, [wanted[0], *wanted])
    except Exception as error:  # a peer may fail in any way; the others continue
        return None, {"status": "failed", "reason": f"{type(error).__name__}: {str(error).strip()[:500]}"}
    record = {"tolerance": contestant.tolerance, "errors": errors}
    bad = {what: error for what, error in errors.items() if not error <= contestant.tolerance}  # catches NaN too
    if bad:
        deviations = ", ".join(f"{what} by {error:.2g}" for what, error in bad.items())
        reason = f"off by more than {contestant.tolerance:g} of the largest entry: {deviations}"
        return None, {"status": "disagrees", "reason": reason, **record}
    return prepared, {"status": "ok", **record}


def compare(actual: Sequence[Tensor], wanted: Sequence[Tensor]) -> dict[str, float]:
    """Largest deviation of each quantity, relative to its largest entry."""
    errors = {}
    for what, a, t in zip(("log_prob_forward", "log_prob", *DIFFERENTIATED), actual, wanted, strict=True):
        if a.shape != t.shape:
            raise ValueError(f"{what} has shape {tuple(a.shape)}, not {tuple(t.shape)}")
        errors[what] = testing.relative_error(a, t)
    return errors


def interleave(calls: Mapping[Hashable, Callable[[], Any]], repeats: int, seconds: float) -> dict[Hashable, dict]:
    """Times all calls in turn, round after round, so that a temporary disturbance of the machine affects them all.

    Stops after `repeats` rounds, or after the first round that ends later than `seconds`, but not before the third
    round (or `repeats`, if that is less). The time of a call includes freeing its result. Before each sample the call
    is made once without timing, because caches, threads and freed memory are as another contestant left them.
    """
    start = time.perf_counter()
    estimates = {key: time_calls(call, 1) for key, call in calls.items()}
    numbers = {key: max(1, math.ceil(SAMPLE_SECONDS / estimate)) for key, estimate in estimates.items()}
    samples: dict[Hashable, list[float]] = {key: [] for key in calls}
    gc.collect()
    gc.disable()
    try:
        for done in range(repeats):
            if done >= LEAST_ROUNDS and time.perf_counter() - start > seconds:
                break
            for key, call in calls.items():
                call()
                samples[key].append(time_calls(call, numbers[key]))
    finally:
        gc.enable()
    return {key: summarise(samples[key], numbers[key]) for key in calls}


def memory_and_times(call: Callable[[], Any], repeats: int) -> tuple[dict, Any]:
    """Peak memory of the first call, the times of `repeats` further ones, and the last result."""
    with memory.Usage() as usage:
        result = call()
    times = []
    for _ in range(repeats):
        del result
        start = time.perf_counter()
        result = call()
        times.append(time.perf_counter() - start)
    return {"seconds": min(times), "samples": times, "extra_bytes": usage.peak}, result


def time_calls(call: Callable[[], Any], number: int) -> float:
    start = time.perf_counter()
    for _ in range(number):
        call()
    return (time.perf_counter() - start) / number


def summarise(samples: Sequence[float], calls_per_sample: int) -> dict:
    return {
        "min": min(samples),
        "median": statistics.median(samples),
        "calls_per_sample": calls_per_sample,
        "samples": [float(f"{s:.4g}") for s in samples],
    }
