"""Which block sizes a kernel runs with: a table by architecture, rank, compute type and layout, not a search at first
call. `python -m benchmarks.gpu.choose` rewrites configs_table.py: by what compiles without spills, or with --time, on a
GPU, by what is fastest there.

A compute type is "float64", "float32", or "tf32x3": float32 products made of three on tensor cores. These sum with
roundings of their own, so only precision "float32" takes them, and only where products, not memory, limit the pass.
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
    programs: int  # so many at the least, where there are rows enough
    input_precision: str  # of the products: "ieee" or "tf32x3"


TENSOR_CORES_ABOVE = 16  # columns; up to there a pass waits for memory


def compute_type(dtype: torch.dtype, precision: int) -> str:
    """Of the first launch, for inputs of a dtype, with a precision of `_policy`."""
    if dtype == torch.float64 or precision == FLOAT64:
        return "float64"
    return "tf32x3" if precision == FLOAT32 else "float32"


def choose(op: str, cov_factor: Tensor, columns: int, compute: str) -> Config:
    """For a factor [..., S, R] of which `columns` meet in a product."""
    layout = "rank" if is_rank_major(cov_factor) else "row"
    return find(op, architecture(cov_factor.device), columns, compute, layout)


def split_rows(S: int, programs: int, config: Config) -> tuple[int, int]:
    """Into how many runs the rows of one item are split, and the rows of a run, in whole blocks. Both depend on the
    problem and the table alone."""
    wanted = triton.cdiv(config.programs, max(programs, 1))
    splits = max(min(wanted, triton.cdiv(S, 4 * config.block_s)), 1)
    blocks = max(triton.cdiv(triton.cdiv(S, splits), config.block_s), 1)
    return splits, blocks * config.block_s


@functools.cache
def architecture(device: torch.device) -> str:
    """sm_80 and the like, gfx90a and the like, or "interpreter"."""
    if device.type != "cuda":
        return "interpreter"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return properties.gcnArchName.split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def find(op: str, arch: str, R: int, compute: str, layout: str) -> Config:
    """The entry of the architecture, or that of all; of the least rank in it that is not below R, or the largest."""
    if compute == "tf32x3" and (R <= TENSOR_CORES_ABOVE or (op, arch, compute, layout) not in TABLE):
        compute = "float32"
    entries = TABLE.get((op, arch, compute, layout)) or TABLE[op, "any", compute, layout]
    rank = min((r for r in entries if r >= R), default=max(entries))
    return Config(*entries[rank], "tf32x3" if compute == "tf32x3" else "ieee")
