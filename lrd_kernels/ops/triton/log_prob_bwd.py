"""log_prob_bwd: P is read once and its gradient written once, if one tile holds all columns. Otherwise a program
computes one tile of columns and reads the tiles of P that it needs again, from the L2 cache.

Products are float32 where the certificate of the forward pass allows it. A second launch in float64 recomputes blocks
with a row of high leverage h, where 1 - h cancels, and items without that certificate; its other programs do nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lrd_kernels import _policy
from lrd_kernels.ops.triton import common, configs
from lrd_kernels.ops.triton.common import (
    find_present,
    load_diag,
    load_rows,
    load_tile,
    narrowed,
    operand,
    square,
    times,
)
from lrd_kernels.ops.triton.row_grads import _row_grads_kernel
from lrd_kernels.ops.triton.rows import GRADS_RANK, ROW_RANK, ends, is_unit, is_vector, narrow_diag, width
from lrd_kernels.ops.triton.tile_grads import _tile_grads_kernel
from lrd_kernels.ops.views import is_rank_major

FLOAT32_GROWTH = tl.constexpr(_policy.FLOAT32_GROWTH)
HIGH_LEVERAGE = tl.constexpr(_policy.HIGH_LEVERAGE)  # at most 10 R rows exceed it
ROW_TURNS = 16  # blocks of rows that a program of small ranks does at most


@triton.jit(do_not_specialize=["once"])
def _log_prob_bwd_kernel(
    factor,
    diag,
    value,
    loc,
    mask,
    chol_inv,
    summary,
    z,
    value_info,
    grad,
    again,
    grad_factor,
    grad_diag,
    grad_loc,
    S,
    R,
    N,
    per_factor,
    blocks,
    flagged_blocks,
    per_flag,
    factor_b,
    factor_s,
    factor_r,
    diag_b,
    diag_s,
    value_b,
    value_n,
    value_s,
    loc_b,
    loc_n,
    loc_s,
    mask_b,
    mask_s,
    grad_b,
    grad_n,
    out_b,
    out_s,
    out_r,
    once,
    eps: tl.float64,
    maha: tl.float64,
    logdet: tl.float64,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_R: tl.constexpr,
    TILES: tl.constexpr,
    NEED_FACTOR: tl.constexpr,
    NEED_DIAG: tl.constexpr,
    NEED_LOC: tl.constexpr,
    SUM_LOC: tl.constexpr,
    NEED_LOGDET: tl.constexpr,
    HAS_VALUE: tl.constexpr,
    HAS_LOC: tl.constexpr,
    HAS_MASK: tl.constexpr,
    EXP: tl.constexpr,
    LIMIT: tl.constexpr,
    CERTIFIED: tl.constexpr,
    AGAIN: tl.constexpr,
):
    """Program (block of rows, tile of columns, f). CERTIFIED programs of the first tile set `again`
    [F, flagged_blocks], of `per_flag` blocks each, where float32 is not accurate enough; AGAIN programs only run where
    it is set."""
    pid = tl.program_id(0).to(tl.int64)
    block = pid % blocks
    tile = pid // blocks % TILES
    f = pid // blocks // TILES
    rows = block * BLOCK_S + tl.arange(0, BLOCK_S).to(tl.int64)
    first = f * per_factor
    if AGAIN:  # skip blocks for which the first launch was accurate enough
        wanted = tl.load(again + f * flagged_blocks + block // per_flag)
        per_factor *= wanted
        inside = rows < S * wanted
    else:
        inside = rows < S
    within = tl.arange(0, BLOCK_R).to(tl.int64)
    own = tile * BLOCK_R + within
    factor += f * factor_b
    results = tl.maximum(N, 1)
    total = tl.zeros([BLOCK_S, BLOCK_R], COMPUTE)
    worst = tl.zeros([BLOCK_S], tl.float64)  # leverage; 1 if the whole item is to be recomputed
    for k in range(per_factor):
        b = first + k
        growth = tl.zeros([BLOCK_S], tl.float64) + tl.load(summary + 2 * b)
        present = find_present(mask + b * mask_b, rows, mask_s, inside, HAS_MASK)
        present = present & (growth < float("inf"))  # gradients of items that failed in the forward pass are zero
        _, w, slope = load_diag(diag + b * diag_b, rows, diag_s, present, eps, EXP, LIMIT)
        own_inverse = chol_inv + b * R * R
        pull = tl.zeros([BLOCK_S, BLOCK_R], COMPUTE)
        of_diag = tl.zeros([BLOCK_S], tl.float64)
        if TILES == 1:
            P = load_tile(factor, rows, own, factor_s, factor_r, present, R).to(COMPUTE)

        if NEED_LOGDET:
            weight = tl.full([], 0.0, tl.float64)
            for n in range(results):
                share = tl.load(grad + b * grad_b + n * grad_n).to(tl.float64)
                if HAS_VALUE:
                    share = tl.where(tl.load(value_info + b * N + n) == 0, share, 0.0)
                weight += share
            weight *= logdet
            norms = tl.zeros([BLOCK_S], tl.float64)
            q = tl.zeros([BLOCK_S, BLOCK_R], COMPUTE)
            for m in range(tile, TILES):  # rows of L^-1
                lines = m * BLOCK_R + within
                V = tl.zeros([BLOCK_S, BLOCK_R], COMPUTE)
                for j in range(0, m + 1):
                    columns = j * BLOCK_R + within
                    if TILES != 1:
                        P = load_tile(factor, rows, columns, factor_s, factor_r, present, R).to(COMPUTE)
                    L = load_tile(own_inverse, lines, columns, R, 1, lines < R, R).to(COMPUTE)
                    V += tl.dot(operand(P, once, COMPUTE), tl.trans(L), input_precision=PRECISION, out_dtype=COMPUTE)
                norms += tl.sum(square(V, once, COMPUTE), 1)
                if NEED_FACTOR:
                    L = load_tile(own_inverse, lines, own, R, 1, lines < R, R).to(COMPUTE)
                    q += tl.dot(V, L, input_precision=PRECISION, out_dtype=COMPUTE)
            if CERTIFIED:
                worst = tl.maximum(worst, tl.maximum(w * norms, tl.where(growth > FLOAT32_GROWTH, 1.0, 0.0)))
            pull += q * (2 * weight * w).to(COMPUTE)[:, None]
            of_diag += weight * w * (1.0 - w * norms)

        summed = tl.zeros([BLOCK_S], tl.float64)
        for n in range(N):
            r = load_rows(value + b * value_b + n * value_n, rows, value_s, present)
            if HAS_LOC:
                r -= load_rows(loc + b * loc_b + n * loc_n, rows, loc_s, present)
            fine = tl.load(value_info + b * N + n) == 0
            r = tl.where(fine, r, 0.0)
            zs = z + (b * N + n) * R
            along = tl.zeros([BLOCK_S], tl.float64)
            for j in range(TILES):
                columns = j * BLOCK_R + within
                if TILES != 1:
                    P = load_tile(factor, rows, columns, factor_s, factor_r, present, R).to(COMPUTE)
                zj = tl.load(zs + columns, mask=columns < R, other=0.0)
                along += tl.sum(times(P, zj[None, :], once, COMPUTE), 1)
            a = w * (r - along)
            weight = tl.where(fine, maha * tl.load(grad + b * grad_b + n * grad_n).to(tl.float64), 0.0)
            if NEED_FACTOR:
                zk = tl.load(zs + own, mask=own < R, other=0.0)
                pull -= (2 * weight * a).to(COMPUTE)[:, None] * zk.to(COMPUTE)[None, :]
            of_diag -= weight * a * a
            of_loc = -2 * weight * a
            if NEED_LOC and tile == 0:
                if SUM_LOC:
                    summed += of_loc
                else:
                    tl.store(grad_loc + (b * N + n) * S + rows, narrowed(of_loc, grad_loc), mask=inside)
        if NEED_LOC and SUM_LOC and tile == 0:
            tl.store(grad_loc + b * S + rows, narrowed(summed, grad_loc), mask=inside)
        if NEED_DIAG and tile == 0:
            of_diag = tl.where(present, of_diag * slope, 0.0)
            tl.store(grad_diag + b * S + rows, narrowed(of_diag, grad_diag), mask=inside)
        total += pull
    if CERTIFIED and tile == 0:  # the first tile has all rows of L^-1
        tl.store(again + f * blocks + block, (tl.max(worst, 0) > HIGH_LEVERAGE).to(tl.int32))
    if NEED_FACTOR:
        offsets = rows[:, None] * out_s + own[None, :] * out_r
        there = inside[:, None] & (own < R)[None, :]
        tl.store(grad_factor + f * out_b + offsets, narrowed(total, grad_factor), mask=there)


def log_prob_bwd(
    cov_factor: Tensor,
    cov_diag: Tensor,
    value: Tensor | None,
    loc: Tensor | None,
    mask: Tensor | None,
    eps: float | None,
    precision: int,
    chol_inv: Tensor,
    summary: Tensor,
    z: Tensor,
    value_info: Tensor,
    grad: Tensor,
    maha: float,
    logdet: float,
    need_factor: bool,
    need_diag: bool,
    need_loc: bool,
    sum_loc: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    F, S, R = cov_factor.shape
    B, N = z.shape[:2]
    new = cov_factor.new_empty
    grad_factor = (new(F, R, S).mT if is_rank_major(cov_factor) else new(F, S, R)) if need_factor else new(0)
    grad_diag = new(B, S) if need_diag else new(0)
    grad_loc = new(B, 1 if sum_loc else N, S) if need_loc else new(0)
    mask = common.as_bytes(mask)
    need_logdet = logdet != 0.0 and (need_factor or need_diag)

    first = configs.compute_type(cov_factor.dtype, precision)
    columns = width(R)
    fast = 1 <= R <= GRADS_RANK and N <= 1 and B == F > 0 and first != "float64" and not (need_loc and N == 0)
    if columns > ROW_RANK and configs.architecture(cov_factor.device) == "sm_100":
        fast = False  # a pass of Triton 3.7 fails on this kernel there (TritonNvidiaGPUOptimizeTMemLayouts)
    block_s = configs.choose("log_prob_bwd", cov_factor, R, first).block_s  # the same in both launches
    if fast:  # of the second launch, whose blocks divide those of the first
        block_s = min(block_s, 64 if columns <= ROW_RANK else 32)
    blocks = triton.cdiv(S, block_s)

    def launch(compute: str, again: Tensor | None, per_flag: int = 1) -> Tensor | None:
        config = configs.choose("log_prob_bwd", cov_factor, R, compute)
        tiles = max(triton.cdiv(R, config.block_r), 1)
        programs = F * tiles * blocks
        certified = compute == "float32" and need_logdet  # "auto"
        flags = torch.empty(F * blocks, dtype=torch.int32, device=cov_factor.device) if certified else again
        if programs == 0:
            return None
        _log_prob_bwd_kernel[common.grid(programs)](
            cov_factor,
            cov_diag,
            common.pointer(value, cov_diag),
            common.pointer(loc, cov_diag),
            common.pointer(mask, cov_diag),
            *(chol_inv, summary, z, value_info, grad),
            common.pointer(flags, cov_diag),
            *(grad_factor, grad_diag, grad_loc),
            *(S, R, N, B // max(F, 1), blocks, triton.cdiv(blocks, per_flag), per_flag),
            *cov_factor.stride(),
            *cov_diag.stride(),
            *common.strides(value, 3),
            *common.strides(loc, 3),
            *common.strides(mask, 2),
            *grad.stride(),
            *(grad_factor.stride() if need_factor else (0, 0, 0)),
            *(1, 0.0 if eps is None else eps, maha, logdet),
            COMPUTE=tl.float64 if compute == "float64" else tl.float32,
            PRECISION=config.input_precision,
            BLOCK_S=block_s,
            BLOCK_R=config.block_r,
            TILES=tiles,
            NEED_FACTOR=need_factor,
            NEED_DIAG=need_diag,
            NEED_LOC=need_loc,
            SUM_LOC=sum_loc,
            NEED_LOGDET=need_logdet,
            HAS_VALUE=N > 0,
            HAS_LOC=loc is not None,
            HAS_MASK=mask is not None,
            EXP=eps is not None,
            LIMIT=_policy.exp_limit(cov_factor.dtype),
            CERTIFIED=certified,
            AGAIN=again is not None,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
        return flags if certified else None

    def launch_fast() -> tuple[Tensor, int]:
        """The first launch in float32: its flags, and the blocks of the second launch that each stands for."""
        by_rows = columns <= ROW_RANK
        config = configs.choose("row_grads" if by_rows else "tile_grads", cov_factor, columns, first)
        turns = min(max(triton.cdiv(B * S, config.programs * config.block_s), 1), ROW_TURNS) if by_rows else 1
        rows = turns * config.block_s
        runs = triton.cdiv(S, rows)
        flags = torch.empty(B * runs, dtype=torch.int32, device=cov_factor.device)
        rank_major = is_rank_major(cov_factor)
        vector = not rank_major and is_vector(cov_factor, columns)
        tensors = (cov_factor, cov_diag, *(common.pointer(t, cov_diag) for t in (value, loc, mask)))
        outputs = (grad_factor, grad_diag, grad_loc)
        numbers = (
            *cov_factor.stride(),
            *cov_diag.stride(),
            *(ends(value) if N else (0, 0)),
            *(ends(loc) if N else (0, 0)),
            *common.strides(mask, 2),
            grad.stride(0),
            *(grad_factor.stride() if need_factor else (0, 0, 0)),
            *narrow_diag(eps, cov_factor.dtype),
            *(maha, logdet),
        )
        options: dict[str, Any] = {
            "WIDTH": columns,
            "VECTOR": vector and (not need_factor or is_vector(grad_factor, columns)),
            "RANK_MAJOR": rank_major,
            "UNIT": is_unit(cov_diag, value, loc, mask),
            "NEED_FACTOR": need_factor,
            "NEED_DIAG": need_diag,
            "NEED_LOC": need_loc,
            "NEED_LOGDET": need_logdet,
            "CERTIFIED": precision != _policy.FLOAT32,
            "HAS_VALUE": N > 0,
            "HAS_LOC": N > 0 and loc is not None,
            "HAS_MASK": mask is not None,
            "EXP": eps is not None,
            "num_warps": config.num_warps,
            "enable_fp_fusion": False,
        }
        if by_rows:
            scratch = cov_factor.new_empty(B * runs * columns * columns if columns > 8 else 0, dtype=torch.float32)
            _row_grads_kernel[common.grid(B * runs)](
                *(*tensors, chol_inv, summary, z, value_info, grad, flags, scratch, *outputs, S, R, runs, rows),
                *numbers,
                ROWS=config.block_s,
                **options,
            )
        else:
            _tile_grads_kernel[common.grid(B * runs)](
                *(*tensors, chol_inv, summary, z, value_info, grad, flags, *outputs, S, R, runs),
                *numbers,
                PRECISION=config.input_precision,
                BLOCK_S=config.block_s,
                ROW_MAJOR=cov_factor.stride(2) == 1,
                **options,
            )
        return flags, rows // block_s

    if fast and S > 0:
        launch("float64", *launch_fast())
    else:
        flags = launch(first, None)
        if flags is not None:
            launch("float64", flags)
    return grad_factor, grad_diag, grad_loc
