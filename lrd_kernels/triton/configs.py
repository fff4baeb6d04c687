"""Which block sizes a kernel runs with: a table by architecture, rank, dtype and layout, not a search at first call.

`python tests/gpu/choose.py` rewrites configs_table.py, by what compiles without spills.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from lrd_kernels.triton import common
from lrd_kernels.triton.configs_table import TABLE


class Config(NamedTuple):
    block_s: int
    block_r: int
    num_warps: int
    num_stages: int
    programs: int  # so many at the least, where there are rows enough
    input_precision: str  # of float32 products: "ieee", or "tf32x3" on tensor cores


def choose(op: str, cov_factor: Tensor, columns: int, wide: bool) -> Config:
    """For a factor [..., S, R] of which `columns` meet in a product, in float64 if `wide`."""
    layout = "rank" if common.is_rank_major(cov_factor) else "row"
    return find(op, architecture(cov_factor.device), columns, wide, layout)


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


def find(op: str, arch: str, R: int, wide: bool, layout: str) -> Config:
    """The entry of the architecture, or that of all; of the least rank in it that is not below R, or the largest."""
    compute = "float64" if wide else "float32"
    entries = TABLE.get((op, arch, compute, layout)) or TABLE[op, "any", compute, layout]
    rank = min((r for r in entries if r >= R), default=max(entries))
    return Config(*entries[rank])
