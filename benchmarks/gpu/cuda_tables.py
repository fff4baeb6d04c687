"""The section of docs/gpu_tables.md on the CUDA kernels, with both backends side by side."""

from __future__ import annotations

import cuda_resources
import cuda_traffic
import emulated_cuda
import traffic

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

Registers of a thread / bytes spilled / bytes of shared memory of fixed size, by compute capability times ten: the
library's own PTX, assembled for each. "float32 in float64" is what is stored and what products are made in.

{resources}

## Both side by side

Bytes and 32-byte sectors that instructions ask of global memory, per element of P: Triton / CUDA. float32, {rows} rows,
one value at its mean; forward is the Gram pass, backward the pass that makes all gradients. P alone is 4 bytes and
0.125 sectors.

{side_by_side}

What each is chosen for: on a GPU the Triton kernels serve the passes over the outputs where Triton is installed, and
the CUDA kernel their R x R matrices up to rank 1024; without Triton the CUDA kernels serve all. `backend="cuda"` asks
for them by name. Nobody has timed one against the other."""


def section() -> str:
    if reason := emulated_cuda.why_not():
        return f"## The CUDA kernels\n\nNot in these tables: {reason}."
    return TEXT.format(resources="\n".join(resources()), side_by_side="\n".join(side_by_side()), rows=ROWS)
