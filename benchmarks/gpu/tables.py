"""Writes docs/gpu_tables.md: registers, shared memory, memory traffic and errors of the GPU kernels. Needs no GPU."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path

import accuracy
import compiled
import torch
import traffic
import triton

from benchmarks import commands
from benchmarks.gpu import ROOT, bounds, cuda_tables
from lrd_kernels import testing

RANKS = (8, 16, 32, 64, 128)
ROWS = 512  # enough for the ratios, few enough for the emulator


def resources() -> list[str]:
    lines = ["| op | compute | rank | " + " | ".join(map(str, (*compiled.NVIDIA, *compiled.AMD))) + " |"]
    lines.append("|" + "---|" * (lines[0].count("|") - 1))
    cells: dict = {}
    for architecture in (*compiled.NVIDIA, *compiled.AMD):
        worst: dict = {}
        for (_, compute, _, rank), found in compiled.matrix(architecture):
            key = (found.kernel.strip("_").removesuffix("_kernel"), compute, rank)
            before = worst.get(key, (0, 0, 0))
            worst[key] = tuple(map(max, before, (found.registers, found.spills, found.shared)))
        for key, numbers in worst.items():
            cells.setdefault(key, {})[architecture] = "{} / {} / {}".format(*numbers)
        print(architecture, len(worst), "kernels", flush=True)
    for (kernel, compute, rank), by in sorted(cells.items()):
        row = (by.get(a, "-") for a in (*compiled.NVIDIA, *compiled.AMD))
        lines.append(f"| {kernel} | {compute} | {rank} | " + " | ".join(row) + " |")
    return lines


def moved() -> list[str]:
    lines = [
        "| rank | layout | P read forward | read backward | gradient written | sectors forward | sectors backward |",
        "|---|---|---|---|---|---|---|",
    ]
    for R in RANKS:
        for layout in ("row", "rank"):
            t = traffic.count(ROWS, R, layout)
            lines.append(
                f"| {R} | {layout}-major | {t.read_forward:.2f} | {t.read_backward:.2f} | {t.written:.2f}"
                f" | {t.excess_forward:.2f} | {t.excess_backward:.2f} |"
            )
            print(lines[-1], flush=True)
    return lines


def errors() -> list[str]:
    lines = [
        '| inputs | rank | "auto" on the CPU | "auto" from the PTX | "float32" from the PTX |',
        "|---|---|---|---|---|",
    ]
    for family, hardness, R in accuracy.CASES:
        inputs = testing.hard_inputs(family, hardness, accuracy.ROWS, R)
        found = (
            accuracy.on_cpu(inputs, "auto"),
            accuracy.emulated(inputs, "auto"),
            accuracy.emulated(inputs, "float32"),
        )
        row = ("{:.0e} / {:.0e}".format(*pair) for pair in found)
        lines.append(f"| {family} {hardness:.0e} | {R} | " + " | ".join(row) + " |")
        print(lines[-1], flush=True)
    return lines


def least_times() -> list[str]:
    lines = ["| GPU | GB/s | " + " | ".join(f"{S} x {R}" for S, R in bounds.SIZES) + " |"]
    lines.append("|---|---|" + "---|" * len(bounds.SIZES))
    for name, speed in bounds.BANDWIDTH.items():
        row = (f"{1e3 * bounds.least_seconds(S, R, speed):.3f} ms" for S, R in bounds.SIZES)
        lines.append(f"| {name} | {speed / 1e9:.0f} | " + " | ".join(row) + " |")
    return lines


def beside_paper() -> list[str]:
    lines = ["| outputs x rank | least time at 672 GB/s | the paper's curve |", "|---|---|---|"]
    for (S, R), seconds in bounds.PAPER.items():
        least = bounds.least_seconds_forward(S, R, bounds.BANDWIDTH["Quadro RTX 8000"])
        lines.append(f"| {S} x {R} | {1e3 * least:.3f} ms | {1e3 * seconds:.2f} ms |")
    return lines


TEXT = """# GPU kernels: resources and traffic

Written by `make gpu-check` on {date}, without a GPU: torch {torch}, triton {triton}. No time was measured.

## Registers, spilled bytes, shared memory

Of each kernel, for every architecture (NVIDIA by compute capability times ten, AMD by name): registers of a thread /
bytes spilled / bytes of shared memory, the most over both layouts, with a value, a mean, a mask and the fused diagonal;
"-" where the table has no such entry, and another compute type or smaller tiles serve.

{resources}

## Bytes moved

On the PTX for sm_80, float32, {rows} rows, counted in the emulator. The first three as multiples of the bytes of P. The
last two are the bytes of all 32-byte sectors that a pass requests over the bytes it needs: 1 where loads are coalesced,
less where several threads want the same number. The table is one of what instructions request; caches come on top.

{moved}

Above a rank of 64 a product is done in tiles, and P is read for each: mostly from the second-level cache.

## Errors

On the PTX for sm_80, float32 inputs of {accuracy_rows} rows, against extended precision: log p / the worst of its
gradients, each as a share of its largest entry. The inputs are those of `lrd_kernels.testing.hard_inputs`: a typical
Gaussian ("diagonal 1"), a tiny diagonal, near-dependent columns, five outputs of tiny variance. From rank 17 on,
precision "float32" multiplies on tensor cores, three tf32 products for one of float32, whose sums the emulator rounds
to nearest and a GPU may truncate.

{errors}

## The time that this implies

Bounds, not measurements: P read forward, read backward, and its gradient written, at the bandwidth that the maker
states. No kernel is faster than this; how near these come has not been seen.

{bounds}

The forward pass alone on the card of the paper, beside what the paper plots for a log-likelihood by torch's functions:

{paper}

{cuda}
"""


def main(argv: Sequence[str] | None = None) -> None:
    parser = commands.parser("benchmarks.gpu.tables", __doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "gpu_tables.md", help="file to write")
    options = parser.parse_args(argv)
    text = TEXT.format(
        date=datetime.date.today().isoformat(),
        torch=torch.__version__,
        triton=triton.__version__,
        rows=ROWS,
        resources="\n".join(resources()),
        moved="\n".join(moved()),
        accuracy_rows=accuracy.ROWS,
        errors="\n".join(errors()),
        bounds="\n".join(least_times()),
        paper="\n".join(beside_paper()),
        cuda=cuda_tables.section(),
    )
    options.output.write_text(text)


if __name__ == "__main__":
    main()
