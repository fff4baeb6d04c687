"""`lrd.truncate` compared with torch.linalg.svd: time, memory beyond the inputs, and errors against float64.

The factor has 196608 x 576 entries and a decaying spectrum; 64 columns are kept. Each contestant and layout runs in a
fresh process; the time is the least of a few calls.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

import lrd_kernels as lrd
from benchmarks import commands, fresh, machine
from benchmarks.measure import memory_and_times
from benchmarks.registry import LAYOUTS

CONTESTANTS = ("lrd", "svd")
PROBES = 32


def covariance(S: int, R: int, layout: str) -> tuple[Tensor, Tensor]:
    """A factor [S, R] whose column norms decay slowly, and a diagonal."""
    generator = torch.Generator().manual_seed(0)
    shape = (S, R) if layout == "row" else (R, S)
    scale = torch.linspace(1, 0.05, R)
    factor = torch.randn(shape, generator=generator)
    factor = factor * scale if layout == "row" else (factor * scale[:, None]).mT
    return factor, 0.05 + torch.rand(S, generator=generator)


def by_svd(factor: Tensor, diag: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    U, s, _ = torch.linalg.svd(factor, full_matrices=False)
    kept = U[:, :rank] * s[:rank]
    return kept, diag + (factor.square().sum(1) - kept.square().sum(1)).clamp(min=0)


def by_lrd(factor: Tensor, diag: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    return lrd.truncate(factor, diag, rank)[:2]


def exact(factor: Tensor, rank: int) -> Tensor:
    """The leading columns in float64, from the Gram matrix summed in float64."""
    wide = factor.double()
    return wide @ torch.linalg.eigh(wide.mT @ wide)[1][:, -rank:]


def measure(contestant: str, layout: str, S: int, R: int, rank: int, repeats: int) -> dict:
    factor, diag = covariance(S, R, layout)
    function = by_lrd if contestant == "lrd" else by_svd
    function(*covariance(512, 8, layout), 4)  # starts the threads and touches the code
    measured, (kept, folded) = memory_and_times(lambda: function(factor, diag, rank), repeats)
    variance = diag.double() + factor.double().square().sum(1)
    off = (folded.double() + kept.double().square().sum(1)) / variance - 1
    # |P_hat P_hat^T - exact| by products with random vectors
    wanted, found = exact(factor, rank), kept.double()
    probes = torch.randn(S, PROBES, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    target = wanted @ (wanted.mT @ probes)
    error = (found @ (found.mT @ probes) - target).norm() / target.norm()
    factor_bytes = factor.numel() * factor.element_size()
    return {
        **measured,
        "extra_of_factor": measured["extra_bytes"] / factor_bytes,
        "result_of_factor": (kept.numel() + folded.numel()) * kept.element_size() / factor_bytes,
        "variance_error": float(off.abs().max()),
        "low_rank_error": float(error),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = commands.parser("benchmarks.truncation", __doc__, "truncation.json")
    parser.add_argument("--outputs", type=int, default=196608, help="rows of the factor")
    parser.add_argument("--columns", type=int, default=576, help="columns of the factor")
    parser.add_argument("--rank", type=int, default=64, help="columns that are kept")
    commands.add_repeats(parser, 3)
    options = parser.parse_args(argv)
    document = commands.begin(options)
    print(f"{'':12}{'seconds':>10}{'extra / P':>11}{'diag(Sigma) off':>17}{'low rank off':>14}")
    for layout in LAYOUTS:
        for contestant in CONTESTANTS:
            sizes = (options.outputs, options.columns, options.rank, options.repeats)
            found = fresh.call(measure, contestant, layout, *sizes)
            document["results"][f"{contestant} {layout}"] = found
            print(
                f"{layout:6}{contestant:6}{found['seconds']:10.3f}{found['extra_of_factor']:11.2f}"
                f"{found['variance_error']:17.1e}{found['low_rank_error']:14.1e}",
                flush=True,
            )
        a, b = (document["results"][f"{c} {layout}"] for c in CONTESTANTS)
        print(f"{layout:6}{b['seconds'] / a['seconds']:.1f} times as fast", flush=True)
    machine.write_json(options.output, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
