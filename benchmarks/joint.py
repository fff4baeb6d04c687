"""From T sampled predictions to a joint Gaussian that is scored and sampled: this package and plain torch.

One image of 256 x 256 x 3, T = 64 predictions of rank 8, joint rank 64. Timed are the truncated joint, log p, entropy,
16 samples and 8 modes; and the same with the aleatoric and epistemic parts, which the plain version does not compute.
Each contestant and layout runs in a fresh process. The time is the least of a few consecutive calls. The memory is the
peak beyond the predictions.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

import lrd_kernels as lrd
from benchmarks import commands, fresh, machine
from benchmarks.measure import memory_and_times
from benchmarks.registry import LAYOUTS

CONTESTANTS = ("lrd", "lrd+parts", "torch")
SAMPLES, MODES = 16, 8


def predictions(S: int, T: int, R: int, layout: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A value, means [T, S], factors [T, S, R] and diagonals [T, S]."""
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(S, generator=generator)
    means = common + 0.1 * torch.randn(T, S, generator=generator)
    shape = (T, S, R) if layout == "row" else (T, R, S)
    factors = 0.3 * torch.randn(shape, generator=generator)
    diags = 0.05 + torch.rand(T, S, generator=generator)
    return common, means, factors if layout == "row" else factors.mT, diags


def ours(
    value: Tensor, means: Tensor, factors: Tensor, diags: Tensor, rank: int, parts: bool = False
) -> tuple[Tensor, ...]:
    joint = lrd.joint(means, factors, diags, rank=rank, parts=parts, validate_args=False)
    return joint.log_prob(value), joint.entropy(), joint.variance, joint.sample((SAMPLES,)), joint.modes(MODES).vectors


def plain(value: Tensor, means: Tensor, factors: Tensor, diags: Tensor, rank: int) -> tuple[Tensor, ...]:
    T = means.shape[0]
    mean, diag = means.mean(0), diags.mean(0)
    stacked = torch.cat([*(factors / math.sqrt(T)), ((means - mean) / math.sqrt(T - 1)).T], 1)
    U, s, _ = torch.linalg.svd(stacked, full_matrices=False)
    kept = U[:, :rank] * s[:rank]
    folded = diag + (stacked.square().sum(1) - kept.square().sum(1)).clamp(min=0)
    model = torch.distributions.LowRankMultivariateNormal(mean, kept, folded, validate_args=False)
    return model.log_prob(value), model.entropy(), model.variance, model.sample((SAMPLES,)), U[:, :MODES]


def measure(contestant: str, layout: str, S: int, T: int, R: int, rank: int, repeats: int) -> dict:
    inputs = predictions(S, T, R, layout)
    function = {"lrd": ours, "lrd+parts": partial(ours, parts=True), "torch": plain}[contestant]
    function(*predictions(512, 4, 2, layout), 4)  # starts the threads and touches the code
    measured, (log_p, entropy, variance, *_) = memory_and_times(lambda: function(*inputs, rank), repeats)
    checks = {"log_prob": float(log_p), "entropy": float(entropy), "variance": float(variance.double().sum())}
    return {**measured, **checks}


def main(argv: Sequence[str] | None = None) -> int:
    parser = commands.parser("benchmarks.joint", __doc__, "joint.json")
    parser.add_argument("--outputs", type=int, default=256 * 256 * 3, help="number of outputs S")
    parser.add_argument("--predictions", type=int, default=64, help="number of predictions T")
    parser.add_argument("--factor-rank", type=int, default=8, help="rank of each prediction")
    parser.add_argument("--rank", type=int, default=64, help="rank of the joint Gaussian")
    commands.add_repeats(parser, 3)
    options = parser.parse_args(argv)
    document = commands.begin(options)
    print(f"{'layout':6}{'':10}{'seconds':>10}{'extra MB':>10}{'log p':>14}{'entropy':>14}")
    for layout in LAYOUTS:
        for contestant in CONTESTANTS:
            sizes = (options.outputs, options.predictions, options.factor_rank, options.rank, options.repeats)
            found = fresh.call(measure, contestant, layout, *sizes)
            document["results"][f"{contestant} {layout}"] = found
            print(
                f"{layout:6}{contestant:10}{found['seconds']:10.3f}{found['extra_bytes'] / 1e6:10.0f}"
                f"{found['log_prob']:14.2f}{found['entropy']:14.2f}",
                flush=True,
            )
        *both, b = (document["results"][f"{c} {layout}"] for c in CONTESTANTS)
        for a, what in zip(both, ("", ", with parts"), strict=True):
            faster, smaller = b["seconds"] / a["seconds"], a["extra_bytes"] / max(b["extra_bytes"], 1)
            print(f"{layout:8}{faster:.1f} times as fast, {smaller:.2f} of the memory{what}", flush=True)
    machine.write_json(options.output, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
