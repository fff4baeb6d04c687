"""The sections of docs/gpu_tables.md on what binds the CUDA kernels, and on their launches."""

from __future__ import annotations

import cost
import sass
import torch
from emulated_cuda import emulated_gpu

from benchmarks.gpu import bounds
from lrd_kernels import testing

PASSES = (("first", "forward"), ("forward", "forward, with the second pass"), ("backward", "backward"))


def ratios() -> list[str]:
    """The busiest pipe of each pass on each card."""
    lines = ["| pass | rank | layout | " + " | ".join(card.name for card in sass.CARDS.values()) + " |"]
    lines.append("|---|---|---|" + "---|" * len(sass.CARDS))
    for which, name in PASSES:
        for R in cost.RANKS:
            if which == "forward" and R <= 8:
                continue  # there is no second pass
            for layout in ("row", "rank"):
                cells = []
                for architecture in sass.CARDS:
                    found = cost.ratios(R, layout, architecture, which)
                    worst = max(found, key=lambda pipe: found[pipe])
                    cells.append(f"{found[worst]:.2f} {worst}")
                lines.append(f"| {name} | {R} | {layout}-major | " + " | ".join(cells) + " |")
                print(lines[-1], flush=True)
    return lines


def times() -> list[str]:
    """Forward and backward pass of row-major float32 inputs, by the larger of DRAM and the busiest pipe."""
    lines = [
        "| GPU | " + " | ".join(f"{S} x {R}" for S, R in bounds.SIZES) + " |",
        "|---|" + "---|" * len(bounds.SIZES),
    ]
    for architecture, card in sass.CARDS.items():
        cells = []
        for S, R in bounds.SIZES:
            clocks = 0.0
            for which in ("first", "backward"):
                found = cost.ratios(R, "row", architecture, which)
                clocks += max(1.0, *found.values()) * card.dram(cost.row_bytes(R, which == "backward"))
            seconds = clocks * S / card.multiprocessors / (card.gigahertz * 1e9)
            cells.append(f"{1e3 * seconds:.3f} ms")
        lines.append(f"| {card.name} | " + " | ".join(cells) + " |")
    return lines


def launches() -> list[str]:
    """Kernels of one call with precision "auto"."""
    lines = ["| rank | values | forward | backward |", "|---|---|---|---|"]
    for R, N in ((8, 1), (16, 1), (64, 1), (64, 4), (100, 1), (64, 16), (256, 1)):
        inputs = testing.make_inputs((1,), 64, R, dtype=torch.float32)
        value, loc = (t[:, None].expand(1, N, 64) for t in (inputs.value, inputs.loc))
        arguments = (inputs.cov_factor, inputs.cov_diag, value, loc, None, None)
        with emulated_gpu(race=False) as gpu:
            result, *state = torch.ops.lrd_cuda.log_prob_fwd(*arguments, 0, None, None, -0.5, -0.5, 0.0)
            forward = len(gpu.launches)
            ones = torch.ones_like(result)
            torch.ops.lrd_cuda.log_prob_bwd(*arguments, 0, *state, ones, -0.5, -0.5, True, True, True, False)
        lines.append(f"| {R} | {N} | {forward} | {len(gpu.launches) - forward} |")
    return lines


TEXT = """## What binds the CUDA kernels

Clocks of the busiest pipe, as multiples of the clocks that DRAM takes for one pass: below 1, memory is the bound. The
instructions of the machine code are counted by pipe (`tests/gpu/sass.py`, which states the assumptions). The model
leaves out latency and occupancy. float32, one value, precision "auto"; the fused diagonal is always counted. "With the
second pass" is the forward pass of values drawn from the model from rank 9 on, both passes over the DRAM time of one.
Pipes: issue slots, float32, float64, integer, special functions, and memory: the path to shared memory and the cache.

{ratios}

The larger of the DRAM time and the time of the busiest pipe, forward and backward pass together, without the second
pass. These are bounds by this model, not measurements:

{times}

## Launches

CUDA kernels of one call for one Gaussian, counted in the emulator. Nothing of torch runs in between.

{launches}"""


def section() -> str:
    return TEXT.format(ratios="\n".join(ratios()), times="\n".join(times()), launches="\n".join(launches()))
