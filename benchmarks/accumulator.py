"""Predictions that arrive one at a time: memory, variances, and held-out log p beside the joint that saw all at once.

Memory and variances are those of one image of 256 x 256 x 3; log p is that of fewer outputs, because the exact joint
holds all predictions and has T (R + 1) columns. Two kinds of predictions: "structured", which share 12 directions, as a
network's do, and "flat", which share none, the worst that can come.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

import lrd_kernels as lrd
from benchmarks import machine, memory

OUTPUT = machine.ROOT / "benchmarks" / "results" / "accumulator.json"
KINDS = ("structured", "flat")
DIRECTIONS, HELD_OUT = 12, 32


def predictions(kind: str, S: int, T: int, R: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """T times mean [S], factor [S, R] and diagonal [S], made when they are asked for."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    common, shared = noise(S), noise(S, DIRECTIONS) * torch.linspace(1, 0.1, DIRECTIONS)
    for _ in range(T):
        mean, factor = common + 0.1 * noise(S), 0.1 * noise(S, R)
        if kind == "structured":
            mean, factor = mean + 0.3 * shared @ noise(DIRECTIONS), factor + shared @ noise(DIRECTIONS, R)
        yield mean, factor, 0.05 + torch.rand(S, generator=generator)


def streamed(kind: str, S: int, T: int, R: int, rank: int) -> dict:
    """Peak memory beyond the first prediction, seconds for each, and how far variances are off."""
    accumulator = lrd.JointAccumulator(rank)
    mean = scatter = diag = torch.zeros(S, dtype=torch.float64)
    seconds = 0.0
    with memory.Peak() as peak:
        for t, (m, P, D) in enumerate(predictions(kind, S, T, R), start=1):
            start = time.perf_counter()
            accumulator.update(m, P, D)
            seconds += time.perf_counter() - start
            d = m.double() - mean
            mean = mean + d / t
            scatter = scatter + d * (m.double() - mean)
            diag = diag + D.double() + P.double().square().sum(1)
        start = time.perf_counter()
        joint = accumulator.finalize(validate_args=False)
        finish = time.perf_counter() - start
    variance = diag / T + scatter / (T - 1)
    off = (joint.cov_diag.double() + joint.cov_factor.double().square().sum(1)) / variance - 1
    return {
        "extra_bytes": peak.extra_bytes,
        "seconds_each": seconds / T,
        "seconds_finalize": finish,
        "variance_error": float(off.abs().max()),
    }


def held_out(kind: str, S: int, T: int, R: int, rank: int) -> dict:
    """Mean log p of draws from the predictions, by the streamed joint and by the one that saw all at once."""
    accumulator = lrd.JointAccumulator(rank)
    means, factors, diags = [], [], []
    for m, P, D in predictions(kind, S, T + HELD_OUT, R):
        means.append(m), factors.append(P), diags.append(D)
    generator = torch.Generator().manual_seed(1)
    drawn = [
        lrd.rsample(m, P, D, generator=generator) for m, P, D in zip(means[T:], factors[T:], diags[T:], strict=True)
    ]
    for m, P, D in zip(means[:T], factors[:T], diags[:T], strict=True):
        accumulator.update(m, P, D)
    values = torch.stack(drawn)
    ours = accumulator.finalize(validate_args=False).log_prob(values).double().mean()
    stacked = (torch.stack(t[:T]) for t in (means, factors, diags))
    exact = lrd.joint(*stacked, rank=rank, validate_args=False).log_prob(values).double().mean()
    return {"log_prob": float(ours), "exact_log_prob": float(exact), "off": float((ours - exact).abs() / exact.abs())}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accumulator",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--outputs", type=int, default=256 * 256 * 3)
    parser.add_argument("--exact-outputs", type=int, default=8192, help="for log p (default: 8192)")
    parser.add_argument("--predictions", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--factor-rank", type=int, default=8)
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--output", type=Path, default=OUTPUT, help="(default: benchmarks/results/accumulator.json)")
    parser.add_argument("--one", nargs=6, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.one:
        part, kind, *numbers = options.one
        print(json.dumps((streamed if part == "streamed" else held_out)(kind, *map(int, numbers))))
        return 0
    document: dict = {"machine": machine.facts(), "results": {}}
    document["sizes"] = {k: v for k, v in vars(options).items() if k not in ("output", "one")}
    print(machine.summary(document["machine"]))
    print(f"{'':12}{'T':>6}{'extra MB':>10}{'ms each':>9}{'variance off':>14}{'log p':>12}{'exact':>12}{'off':>9}")
    for kind in KINDS:
        for T in options.predictions:
            tail = (T, options.factor_rank, options.rank)
            found = memory.fresh("benchmarks.accumulator", "--one", "streamed", kind, options.outputs, *tail)
            found |= memory.fresh("benchmarks.accumulator", "--one", "held_out", kind, options.exact_outputs, *tail)
            document["results"][f"{kind} {T}"] = found
            print(
                f"{kind:12}{T:6}{found['extra_bytes'] / 1e6:10.0f}{found['seconds_each'] * 1e3:9.1f}"
                f"{found['variance_error']:14.1e}{found['log_prob']:12.1f}{found['exact_log_prob']:12.1f}"
                f"{found['off']:9.2%}",
                flush=True,
            )
    machine.write_json(options.output, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
