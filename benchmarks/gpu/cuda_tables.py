"""The section of docs/gpu_tables.md on the CUDA kernels, with both backends side by side."""

from __future__ import annotations

import cuda_resources
import cuda_traffic
import emulated_cuda
import sass
import traffic

from benchmarks.gpu import cost_tables

RANKS = (8, 16, 64, 128)
ROWS = 512


def resources() -> list[str]:
    """A row for each kernel: the most over the dtypes that it stores."""
    lines = ["| kernel | made for | " + " | ".join(map(str, cuda_resources.ARCHITECTURES)) + " |"]
    lines.append("|---|---|" + "---|" * len(cuda_resources.ARCHITECTURES))
    cells: dict[tuple[str, str], dict[int, tuple[int, int, int]]] = {}
    for architecture in cuda_resources.ARCHITECTURES:
        for name, taken in cuda_resources.assemble(architecture).items():
            by = cells.setdefault(cuda_resources.readable(name), {})
            before = by.get(architecture, (0, 0, 0))
            by[architecture] = tuple(map(max, before, (taken.registers, taken.spills, taken.shared)))
        print("cuda", architecture, len(cells), "kernels", flush=True)
    for (kernel, made_for), by in sorted(cells.items()):
        row = ("{} / {} / {}".format(*by[a]) for a in cuda_resources.ARCHITECTURES)
        lines.append(f"| {kernel} | {made_for} | " + " | ".join(row) + " |")
    return lines


def side_by_side() -> list[str]:
    lines = [
        "| rank | layout | bytes forward | sectors | bytes backward | sectors | bytes stored | sectors |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for R in RANKS:
        for layout in ("row", "rank"):
            arguments = traffic.arguments_of(ROWS, R, layout)
            elements = ROWS * R
            triton = [cuda_traffic.Pass.of(x.stats, elements) for x in traffic.launches(arguments)]
            native = [cuda_traffic.Pass.of(x.result.stats, elements) for x in cuda_traffic.launches(arguments)[:2]]
            cells = [
                f"{getattr(triton[which], what):.2f} / {getattr(native[which], what):.2f}"
                for which, what in (
                    *((0, "loaded"), (0, "sectors_loaded"), (1, "loaded"), (1, "sectors_loaded")),
                    *((1, "stored"), (1, "sectors_stored")),
                )
            ]
            lines.append(f"| {R} | {layout}-major | " + " | ".join(cells) + " |")
            print(lines[-1], flush=True)
    return lines


TEXT = """## The CUDA kernels

Registers per thread / spilled bytes / bytes of static shared memory, by ten times the compute capability: the library's
own PTX, assembled for each architecture. "float32 in float64" means float32 data, multiplied in float64.

{resources}

## Both side by side

Bytes and 32-byte sectors that instructions request from global memory, per element of P: Triton / CUDA. float32, {rows}
rows, one value at its mean. Forward is the Gram pass, backward the pass that computes all gradients. P alone is 4 bytes
and 0.125 sectors.

{side_by_side}

The CUDA kernels are used where the library and the GPU allow it, and Triton elsewhere; `backend="triton"` selects its
kernels explicitly. The two have not been timed against each other.

{cost}"""


def cost_section() -> str:
    if sass.find_nvdisasm() is None:
        return "## What binds the CUDA kernels\n\nNot in these tables: nvdisasm is not installed."
    return cost_tables.section()


def section() -> str:
    if reason := emulated_cuda.why_not():
        return f"## The CUDA kernels\n\nNot in these tables: {reason}."
    return TEXT.format(
        resources="\n".join(resources()), side_by_side="\n".join(side_by_side()), rows=ROWS, cost=cost_section()
    )
