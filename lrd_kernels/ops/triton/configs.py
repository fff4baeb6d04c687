"""Block sizes of the kernels, from a table by architecture, rank, compute type and layout, without autotuning at the
first call. `python -m benchmarks.gpu.choose` writes configs_table.py. It selects block sizes that compile without
spills or, with --time on a GPU, the fastest ones.

A compute type is "float64", "float32", or "tf32x3": float32 products computed as three products on tensor cores. Tensor
cores round sums differently, so only precision "float32" uses them, and only where products, not memory, are the limit.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from lrd_kernels._policy import FLOAT32, FLOAT64
from lrd_kernels.ops.triton.configs_table import TABLE
from lrd_kernels.ops.views import is_rank_major


class Config(NamedTuple):
    block_s: int
    block_r: int
    num_warps: int
    num_stages: int
    programs: int  # the smallest number of programs, if there are enough rows
    input_precision: str  # precision of the products: "ieee" or "tf32x3"


TENSOR_CORES_ABOVE = 16  # columns; up to this rank a pass is limited by memory bandwidth


def compute_type(dtype: torch.dtype, precision: int) -> str:
    """Compute type of the first launch, by the dtype of the inputs and a precision of `_policy`."""
    if dtype == torch.float64 or precision == FLOAT64:
        return "float64"
    return "tf32x3" if precision == FLOAT32 else "float32"


def choose(op: str, cov_factor: Tensor, columns: int, compute: str) -> Config:
    """Config for a factor [..., S, R] with `columns` columns per product."""
    layout = "rank" if is_rank_major(cov_factor) else "row"
    return find(op, architecture(cov_factor.device), columns, compute, layout)


def split_rows(S: int, programs: int, config: Config) -> tuple[int, int]:
    """The number of runs into which the rows of one item are split, and the rows per run, a multiple of the block size.
    Both depend only on the problem and the table."""
    wanted = triton.cdiv(config.programs, max(programs, 1))
    splits = max(min(wanted, triton.cdiv(S, 4 * config.block_s)), 1)
    blocks = max(triton.cdiv(triton.cdiv(S, splits), config.block_s), 1)
    return splits, blocks * config.block_s


@functools.cache
def architecture(device: torch.device) -> str:
    """The architecture, such as "sm_80" or "gfx90a", or "interpreter"."""
    if device.type != "cuda":
        return "interpreter"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return properties.gcnArchName.split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


FAST_FLOAT64 = ("sm_80", "sm_90", "sm_100", "gfx90a", "gfx942", "interpreter")


def has_fast_float64(device: torch.device) -> bool:
    """Whether float64 is fast enough to sum in it what only memory should limit."""
    return architecture(device) in FAST_FLOAT64


def find(op: str, arch: str, R: int, compute: str, layout: str) -> Config:
    """The entry of the architecture, or of "any", for the smallest rank not below R, or else the largest rank."""
    if compute == "tf32x3" and (R <= TENSOR_CORES_ABOVE or (op, arch, compute, layout) not in TABLE):
        compute = "float32"
    entries = TABLE.get((op, arch, compute, layout)) or TABLE[op, "any", compute, layout]
    rank = min((r for r in entries if r >= R), default=max(entries))
    return Config(*entries[rank], "tf32x3" if compute == "tf32x3" else "ieee")
