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

Each cell gives registers per thread / spilled bytes / bytes of shared memory of a kernel on one architecture (NVIDIA:
ten times the compute capability; AMD: name). It is the maximum over both layouts, with a value, a mean, a mask and the
fused diagonal. "-" means that there is no such entry: another compute type or smaller tiles are used.

{resources}

## Bytes moved

On the PTX for sm_80, float32, {rows} rows, counted in the emulator. The first three columns are multiples
of the bytes of P. The last two are the bytes of all 32-byte sectors that a pass requests, divided by the bytes it
needs: 1 if loads are coalesced, less if several threads load the same number. The table counts what instructions
request, before any cache.

{moved}

Above rank 64 products are computed in tiles, and P is read once for each tile, mostly from the L2 cache.

## Errors

On the PTX for sm_80, float32 inputs of {accuracy_rows} rows, against extended precision: log p / the worst of its
gradients, each relative to its largest entry. The inputs come from `lrd_kernels.testing.hard_inputs`: a typical
Gaussian ("diagonal 1"), a tiny diagonal, nearly dependent columns, five outputs of tiny variance. From rank 17 on,
precision "float32" uses tensor cores, with three tf32 products for one in float32. The emulator rounds their sums to
nearest; a GPU may truncate them.

{errors}

## Lower bounds on times

These are bounds, not measurements: P is read in each pass and its gradient is written, at the bandwidth of the data
sheet. No kernel can be faster; how close these kernels come has not been measured.

{bounds}

The forward pass alone on the card of the paper, and what the paper plots for a log-likelihood with torch's functions:

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
