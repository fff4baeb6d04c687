"""What binds the CUDA kernels: the clocks of each pipe per row, by the model of `sass`, as multiples of DRAM's."""

from __future__ import annotations

import functools
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import emulated_cuda
import sass
import torch
from emulated_cuda import emulated_gpu
from ptxemu import build, cuda

from lrd_kernels import testing

ROOT = Path(__file__).parents[2]
RANKS = (8, 16, 32, 64)
FAST_FLOAT64 = (80, 90)  # architectures with float64 at half of the speed of float32
ROWS = 2048

# The second pass of values drawn from the model, where the tile is read 16 bytes at a time.
_RESIDUALS = """#include "finish.cuh"
extern "C" __global__ void __launch_bounds__(256, 1) residuals(const lrd::cuda::GramArgs p, const double* z) {{
  extern __shared__ double memory[];
  lrd::cuda::GramArgs own = p;
  own.vector = {vector};
  lrd::cuda::sum_residuals<float, {lanes}, 16, {sum}>(own, z, blockIdx.x, memory);
}}
"""


@dataclass(frozen=True)
class Kernel:
    """How the loops of a kernel run: `threads` of a block do `rows` in a turn of its main loop."""

    ptx: str
    part: str  # of its name
    rows: float
    threads: int
    turns: tuple[float, ...]

    def per_row(self, architecture: int) -> Counter[str]:
        counts = sass.count(sass.disassemble(self.ptx, architecture), self.turns)
        return Counter({pipe: n * self.threads / self.rows for pipe, n in counts.items()})


def _named(part: str) -> str:
    """The PTX of the kernel with this in its name."""
    names = [name for text in emulated_cuda.sources() for name in emulated_cuda.split(text) if part in name]
    (name,) = set(names)
    return emulated_cuda.ptx_of(name)


def forward(R: int, layout: str, architecture: int) -> Kernel:
    vector = "Lb1" if layout == "row" else "Lb0"
    if R <= 16:
        doubles = architecture in FAST_FLOAT64
        kind, rows = ("f", 32) if R > 8 else ("d" if doubles else "NS0_4PairE", 64)
        # a flush, and the rows in it; in float64 the sums are flushed once at the end
        return Kernel(_named(f"row_sums_kernelIfLi{R}E{vector}E{kind}E"), "row_sums", rows, 1, (rows,))
    across, held = R // 8, 64 if R == 64 else 96
    warps_of_g = (across * (across + 1) // 2 + 3) // 4
    slices = 288 // 32 // warps_of_g * 8
    spans, on_diagonal = 128 // (held // slices), across / 4 / warps_of_g
    chunk = (
        held / 288,  # the scalars of the rows
        held * R / 4 / 288,  # loads
        held / slices / 2 * (1 - on_diagonal),  # products, two rows at a time
        held / slices / 2 * on_diagonal,
        held / (256 / R) / 4 * 256 / 288,  # u
    )
    return Kernel(_named(f"gram_tiles_kernelIfLi{across}E{vector}E"), "gram_tiles", held * spans, 288, (spans, *chunk))


def second_pass(R: int, layout: str, architecture: int) -> Kernel | None:
    """Where it is wanted of values drawn from the model; below rank 9 the sums need none."""
    if R <= 8:
        return None
    lanes = R // 16
    kind = "double" if architecture in FAST_FLOAT64 else "lrd::cuda::Pair"
    text = _RESIDUALS.format(vector="true" if layout == "row" else "false", lanes=lanes, sum=kind)
    return Kernel(_compiled(text), "again", 128 * 256 / lanes, 256, (128,))


@functools.cache
def _compiled(text: str) -> str:
    headers = "".join(p.read_text() for p in sorted((ROOT / "csrc/cuda").glob("*.*h")))
    return build.kept_text([*cuda.toolkit_key(), headers, text], lambda: _compile(text))


def _compile(text: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "residuals.cu"
        source.write_text(text)
        options = ["-std=c++20", f"-I{ROOT / 'csrc/cuda'}"]
        ptx = cuda.compile(source, arch="compute_75", options=options)
        (name,) = (name for name in emulated_cuda.split(ptx) if name == "residuals")
        return emulated_cuda.ptx_of(name, (ptx,))


def backward(R: int, layout: str, architecture: int) -> Kernel:
    vector = "Lb1" if layout == "row" else "Lb0"
    if R <= 16:
        return Kernel(_named(f"row_grads_kernelIfLi{R}E{vector}E"), "row_grads", 1, 1, ())
    held, own = 8192 // R, R * (8192 // R) // 256
    product = (R / 8 + 1) / 2 * 2  # turns of four columns, on average over the warps
    turns = (held / 256, held * R / 4 / 256, own / 8, product, own / 16, product, held * R / 4 / 256, held / 256)
    return Kernel(_named(f"gradient_tiles_kernelIfLi{R}E{vector}E"), "gradient_tiles", held, 256, turns)


_KINDS = {("shared", "load"): "LDS", ("shared", "store"): "STS", ("global", "load"): "LDG", ("global", "store"): "STG"}


@functools.cache
def wavefronts(R: int, layout: str, part: str) -> dict[str, float]:
    """Kind and bytes of an access -> the wavefronts that it takes on average in a kernel, counted in the emulator."""
    inputs = testing.make_inputs((1,), ROWS, R, dtype=torch.float32, layout=layout)
    arguments = (inputs.cov_factor, inputs.cov_diag, inputs.value[:, None], inputs.loc[:, None], None, None)
    with emulated_gpu(race=False, stats=True) as gpu:
        result, *state = torch.ops.lrd_cuda.log_prob_fwd(*arguments, 0, None, None, -0.5, -0.5, 0.0)
        ones = torch.ones_like(result)
        torch.ops.lrd_cuda.log_prob_bwd(*arguments, 0, *state, ones, -0.5, -0.5, True, True, True, False)
    return average_wavefronts(gpu.of(part))


def average_wavefronts(launches: Iterable) -> dict[str, float]:
    passes, requests = Counter(), Counter()
    for launch in launches:
        for _, text, traffic in launch.result.stats.instructions:
            space = "shared" if "shared" in text else "global"
            kind = _KINDS.get((space, "store" if text.startswith("st") else "load"))
            if traffic.requests and kind:
                key = f"{kind} {traffic.bytes // traffic.lanes}"
                passes[key] += traffic.sectors / 4 if space == "global" else traffic.wavefronts
                requests[key] += traffic.requests
    return {key: max(passes[key] / n, 1.0) for key, n in requests.items()}


def row_bytes(R: int, backward_pass: bool) -> int:
    return 4 * (2 * R + 5) if backward_pass else 4 * (R + 3)


def ratios(R: int, layout: str, architecture: int, which: str) -> dict[str, float]:
    """Pipe -> clocks of a row, over those of DRAM for one pass. `which` is "forward", with the second pass of values
    drawn from the model, "first" without it, or "backward"."""
    card = sass.CARDS[architecture]
    passes = {"backward": [backward], "forward": [forward, second_pass], "first": [forward]}[which]
    kernels = [kernel for make in passes if (kernel := make(R, layout, architecture))]
    counts: Counter[str] = Counter()
    for kernel in kernels:
        counts += with_wavefronts(kernel.per_row(architecture), wavefronts(R, layout, kernel.part))
    return over_dram(card, counts, R, which == "backward")


def with_wavefronts(counts: Counter[str], average: dict[str, float]) -> Counter[str]:
    """Adds the wavefronts that the accesses take, `average` for each kind and width."""
    counts["wavefronts"] = counts["SHFL 4"]
    for key in [key for key in counts if key[:3] in ("LDS", "STS", "LDG", "STG")]:
        counts["wavefronts"] += counts[key] * average.get(key, max(int(key.split()[1]) / 4, 1))
    return counts


def over_dram(card: sass.Card, counts: Counter[str], R: int, backward_pass: bool) -> dict[str, float]:
    dram = card.dram(row_bytes(R, backward_pass))
    return {pipe: clocks / dram for pipe, clocks in card.clocks(counts).items()}
