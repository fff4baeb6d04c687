"""What binds the Triton kernels with a thread per row, by the model of `sass`, as multiples of DRAM's for a pass."""

from __future__ import annotations

import functools
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import compiled
import cost
import sass
import torch
import triton
import triton.language as tl
from ptxemu.triton_driver import emulated_gpu

from lrd_kernels import testing
from lrd_kernels.ops.triton import OPS, again, configs
from lrd_kernels.ops.triton.row_sums import NOT_SPECIALISED, TURNS
from lrd_kernels.ops.triton.rows import width

ROWS = 2048


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def _residuals_kernel(
    factor, diag, value, loc, z, slot, scalars, R: tl.int64, rows_per_split: tl.int64, factor_s: tl.int64,
    factor_r: tl.int64, BLOCK_S: tl.constexpr, WIDTH: tl.constexpr, VECTOR: tl.constexpr, RANK_MAJOR: tl.constexpr,
):  # fmt: skip
    """The second pass of values drawn from the model, alone."""
    begin = tl.program_id(0).to(tl.int64) * rows_per_split
    again._sum_residuals(
        factor, diag, value, loc, diag, z, slot, scalars, begin, begin + rows_per_split, R, factor_s, factor_r, 1, 1, 1,
        1, 0.0, 0.0, 0.0, BLOCK_S, WIDTH, VECTOR, RANK_MAJOR, not RANK_MAJOR, True, True, False, False,
    )  # fmt: skip


def _inputs(R: int, layout: str) -> tuple:
    inputs = testing.make_inputs((1,), ROWS, R, dtype=torch.float32, layout=layout)
    return inputs.cov_factor, inputs.cov_diag, inputs.value[:, None], inputs.loc[:, None], None, None


def _forward(R: int, layout: str) -> None:
    OPS["log_prob_fwd"](*_inputs(R, layout), 2, None, None, -0.5, -0.5, 0.0)


def _backward(R: int, layout: str) -> None:
    state = (torch.eye(R).double()[None], torch.ones(1, 2).double(), torch.zeros(1, 1, R).double())
    info, ones = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1)
    OPS["log_prob_bwd"](*_inputs(R, layout), 0, *state, info, ones, -0.5, -0.5, True, True, True, False)


def _residuals(R: int, layout: str) -> None:
    factor, diag, value, loc, _, _ = _inputs(R, layout)
    config = configs.choose("again", factor, width(R), "float64")
    _residuals_kernel[(1,)](
        *(factor, diag, value, loc, torch.zeros(R).double(), torch.zeros(3000).double(), torch.zeros(8).double()),
        *(R, ROWS, factor.stride(1), factor.stride(2)),
        BLOCK_S=config.block_s,
        WIDTH=width(R),
        VECTOR=layout == "row",
        RANK_MAJOR=layout == "rank",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=False,
    )


def _machine_code(launch: Callable, name: str, R: int, layout: str, architecture: int) -> tuple[str, int]:
    """Of the kernel of a launch, and its threads."""
    with compiled.compiling(architecture) as found:
        launch(R, layout)
    kernel = next(k for k in found if k.metadata.name == name)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(kernel.asm["cubin"])
        text = subprocess.run([sass.find_nvdisasm(), "-c", path], check=True, capture_output=True, text=True).stdout
    return text, 32 * kernel.metadata.num_warps


@functools.cache
def _wavefronts(launch: Callable, name: str, R: int, layout: str) -> dict[str, float]:
    """As in `cost`, from the PTX for sm_80."""
    with emulated_gpu(80, stats=True) as gpu, mock.patch.object(configs, "architecture", return_value="sm_80"):
        launch(R, layout)
    return cost.average_wavefronts(x for x in gpu.launches if x.name == name)


def _per_row(launch: Callable, name: str, R: int, layout: str, architecture: int) -> Counter[str]:
    """Instructions of a row, and of its share in what a program does once: for 64 rows of a thread in the forward pass,
    and 16 in the backward pass."""
    text, threads = _machine_code(launch, name, R, layout, architecture)
    if launch is _residuals:  # a turn of the main loop does 64 blocks of rows
        turns = again.TURNS.value
        counts, rows = sass.count(text, (turns,)), turns * configs.Config(*_again_entry(R)).block_s
    else:
        counts, rows = sass.count(text, ()), threads
        for key, number in sass.count_outside(text).items():
            counts[key] += number / (TURNS if launch is _forward else 16)
    return Counter({key: number * threads / rows for key, number in counts.items()})


def _again_entry(R: int) -> tuple:
    return (*configs.TABLE["again", "any", "float64", "row"][width(max(R, 16))], "ieee")


def ratios(R: int, layout: str, architecture: int, which: str) -> dict[str, float]:
    """Pipe -> clocks of a row, over those of DRAM for one pass. `which` is "forward", with the second pass of values
    drawn from the model from rank 9 on, or "backward"."""
    kernels = [(_backward, "_row_grads_kernel")]
    if which == "forward":
        kernels = [(_forward, "_row_sums_kernel")] + ([(_residuals, "_residuals_kernel")] if R > 8 else [])
    counts: Counter[str] = Counter()
    for kernel in kernels:
        average = _wavefronts(*kernel, R, layout)
        counts += cost.with_wavefronts(_per_row(*kernel, R, layout, architecture), average)
    return cost.over_dram(sass.CARDS[architecture], counts, R, which == "backward")
