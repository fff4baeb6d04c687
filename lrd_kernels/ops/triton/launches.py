"""Launches of log_prob_fwd for ranks up to 64 and one value at most: three, or two in float64."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from lrd_kernels._policy import FLOAT32, FLOAT32_SUM_ERROR, PAIR_SUM_ERROR, exp_limit
from lrd_kernels.ops.triton import common, configs
from lrd_kernels.ops.triton.again import _again_kernel, _reset_kernel
from lrd_kernels.ops.triton.finish import _finish_kernel
from lrd_kernels.ops.triton.row_sums import IN_FLOAT32, IN_FLOAT64, IN_PAIRS, SCALARS, TURNS, _row_sums_kernel
from lrd_kernels.ops.triton.rows import MOST_RANK, ROW_RANK, ends, is_unit, is_vector, narrow_diag, width
from lrd_kernels.ops.triton.tile_sums import _tile_sums_kernel
from lrd_kernels.ops.views import is_rank_major

PAIR_RANK = 8  # up to which sums have the quality of float64


def serves(cov_factor: Tensor, cov_diag: Tensor, value: Tensor | None) -> bool:
    N = 0 if value is None else value.shape[1]
    return 1 <= cov_factor.shape[2] <= MOST_RANK and N <= 1 and cov_diag.shape[0] > 0


class Splits(NamedTuple):
    """The runs into which the rows of an item are split, one per program."""

    programs: int
    rows: int


def split_rows(B: int, S: int, programs: int, block: int, most: int = 2**62) -> Splits:
    """Runs of whole blocks of rows, `programs` of all items where there are rows enough, of at most `most` rows."""
    wanted = max(min(triton.cdiv(programs, B), triton.cdiv(S, block)), triton.cdiv(S, most), 1)
    rows = max(triton.cdiv(triton.cdiv(S, wanted), block), 1) * block
    return Splits(max(triton.cdiv(S, rows), 1), rows)


def launch_log_prob_fwd(
    cov_factor: Tensor,
    cov_diag: Tensor,
    value: Tensor | None,
    loc: Tensor | None,
    mask: Tensor | None,
    eps: float | None,
    precision: int,
    maha: float,
    logdet: float,
    per_output: float,
) -> tuple[Tensor, ...]:
    F, S, R = cov_factor.shape
    B, N = cov_diag.shape[0], 0 if value is None else value.shape[1]
    compute = configs.compute_type(cov_factor.dtype, precision)
    columns = width(R)
    numbers = columns * (columns + 1) // 2 + columns

    def empty(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=cov_factor.device)

    wide_result = mask is not None or cov_factor.dtype == torch.float64
    result = empty(B, max(N, 1), dtype=torch.float64 if wide_result else torch.float32)
    chol_inv, summary, z = empty(B, R, R), empty(B, 2), empty(B, N, R)
    value_info, state = empty(B, N, dtype=torch.int32), empty(3 * B, dtype=torch.int32)  # tickets [B, 2], then `again`
    totals, again = empty(B, numbers), state[2 * B :]
    has_value = N > 0
    mask = common.as_bytes(mask)
    inputs = (cov_factor, cov_diag, *(common.pointer(t, cov_diag) for t in (value, loc, mask)))
    strides = (
        *cov_factor.stride(),
        *cov_diag.stride(),
        *(ends(value) if has_value else (0, 0)),
        *(ends(loc) if has_value else (0, 0)),
        *common.strides(mask, 2),
    )
    narrow = narrow_diag(eps, cov_factor.dtype)
    rank_major = is_rank_major(cov_factor)
    layout: dict[str, Any] = {
        "WIDTH": columns,
        "VECTOR": not rank_major and is_vector(cov_factor, columns),
        "RANK_MAJOR": rank_major,
        "UNIT": is_unit(cov_diag, value, loc, mask),
    }
    given = {
        "HAS_VALUE": has_value,
        "HAS_LOC": has_value and loc is not None,
        "HAS_MASK": mask is not None,
        "EXP": eps is not None,
    }
    found = (chol_inv, summary, z, value_info, result)
    weights = (maha, logdet, per_output * S)
    per_factor = B // F
    config = configs.choose("finish", cov_factor, columns, "float32")
    finishing = {"SLOTS": config.block_s, "num_warps": config.num_warps}
    if compute == "float64":
        _reset_kernel[common.grid(triton.cdiv(2 * B, 256))](state, B, BLOCK=256)
    else:
        rows = columns <= ROW_RANK
        summed = IN_FLOAT32.value
        if columns <= PAIR_RANK:
            summed = (IN_FLOAT64 if configs.has_fast_float64(cov_factor.device) else IN_PAIRS).value
        config = configs.choose("row_sums" if rows else "tile_sums", cov_factor, columns, compute)
        most = TURNS * config.block_s if rows else 2**62
        splits = split_rows(B, S, config.programs, config.block_s if rows else max(config.block_s, 128), most)
        sums = empty(
            B, splits.programs, numbers, dtype=torch.float32 if rows and summed == IN_FLOAT32.value else torch.float64
        )
        scalars = empty(B, splits.programs, SCALARS.value)
        arguments = (*inputs, sums, scalars, state, S, R, per_factor, *splits, *strides, *narrow)
        options = {**layout, **given, "num_warps": config.num_warps, "enable_fp_fusion": False}
        if rows:
            _row_sums_kernel[common.grid(B * splits.programs)](*arguments, SUMS=summed, ROWS=config.block_s, **options)
        else:
            _tile_sums_kernel[common.grid(B * splits.programs)](
                *arguments,
                PRECISION=config.input_precision,
                BLOCK_S=config.block_s,
                ROW_MAJOR=cov_factor.stride(2) == 1,
                num_stages=config.num_stages,
                **options,
            )
        chunk = min(triton.next_power_of_2(numbers), 64)
        _finish_kernel[common.grid(B * triton.cdiv(numbers, chunk))](
            *(sums, scalars, totals, state, again, *found, S, R, splits.programs),
            FLOAT32_SUM_ERROR if summed == IN_FLOAT32.value else PAIR_SUM_ERROR,
            *weights,
            WIDTH=columns,
            CHUNK=chunk,
            HAS_VALUE=has_value,
            BY_CERTIFICATE=precision != FLOAT32,
            **finishing,
            enable_fp_fusion=False,
        )
    config = configs.choose("again", cov_factor, columns, "float64")
    splits = split_rows(B, S, config.programs, 128)
    sums, scalars = empty(B, splits.programs, numbers), empty(B, splits.programs, SCALARS.value)
    _again_kernel[common.grid(B * splits.programs)](
        *(*inputs, sums, scalars, totals, state, again, *found, S, R, per_factor, *splits, *strides),
        *(1, *narrow, 0.0 if eps is None else eps, *weights),
        BLOCK_S=config.block_s,
        BLOCK_S64=config.block_r,
        SLOTS=finishing["SLOTS"],
        ROW_MAJOR=cov_factor.stride(2) == 1,
        LIMIT=exp_limit(cov_factor.dtype),
        EVERY=compute == "float64",
        **layout,
        **given,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=False,
    )
    return result, chol_inv, summary, z, value_info
