"""`lrd.JointAccumulator`, which sees predictions one at a time: memory, variances, and held-out log p.

Memory and variances are measured for one image of 256 x 256 x 3. log p is compared with the joint of all predictions at
once, for fewer outputs, because that joint holds all predictions and has T (R + 1) columns. There are two kinds of
predictions: "structured" ones share 12 directions, as those of a network do; "flat" ones share none, the worst case.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

import lrd_kernels as lrd
from benchmarks import commands, fresh, machine, memory

KINDS = ("structured", "flat")
DIRECTIONS, HELD_OUT = 12, 32


def predictions(kind: str, S: int, T: int, R: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields T predictions: mean [S], factor [S, R] and diagonal [S]."""
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
    """Peak memory, seconds for each prediction, and the largest relative error of the variances."""
    accumulator = lrd.JointAccumulator(rank)
    mean = scatter = diag = torch.zeros(S, dtype=torch.float64)
    seconds = 0.0
    with memory.Usage() as usage:
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
        "extra_bytes": usage.peak,
        "seconds_each": seconds / T,
        "seconds_finalize": finish,
        "variance_error": float(off.abs().max()),
    }


def held_out(kind: str, S: int, T: int, R: int, rank: int) -> dict:
    """Mean log p of held-out draws, by the streamed joint and by the joint of all predictions at once."""
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
    parser = commands.parser("benchmarks.accumulator", __doc__, "accumulator.json")
    parser.add_argument("--outputs", type=int, default=256 * 256 * 3, help="number of outputs S")
    parser.add_argument("--exact-outputs", type=int, default=8192, help="number of outputs where log p is compared")
    parser.add_argument("--predictions", type=int, nargs="+", default=[64, 256, 1024], help="numbers of predictions T")
    parser.add_argument("--factor-rank", type=int, default=8, help="rank of each prediction")
    parser.add_argument("--rank", type=int, default=64, help="rank of the joint Gaussian")
    options = parser.parse_args(argv)
    document = commands.begin(options)
    print(f"{'':12}{'T':>6}{'extra MB':>10}{'ms each':>9}{'variance off':>14}{'log p':>12}{'exact':>12}{'off':>9}")
    for kind in KINDS:
        for T in options.predictions:
            tail = (T, options.factor_rank, options.rank)
            found = fresh.call(streamed, kind, options.outputs, *tail)
            found |= fresh.call(held_out, kind, options.exact_outputs, *tail)
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
