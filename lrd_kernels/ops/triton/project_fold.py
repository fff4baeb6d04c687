"""project_fold_fwd: rows of the stack in another basis, and the diagonal with the dropped variance added."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lrd_kernels._policy import AUTO
from lrd_kernels.ops.triton import common, configs
from lrd_kernels.ops.triton.common import narrowed, operand, square
from lrd_kernels.ops.triton.joint_gram import mean_of
from lrd_kernels.ops.triton.stack import load_stack


@triton.jit(do_not_specialize=["once"])
def _project_fold_fwd_kernel(
    factors,
    vectors,
    mean,
    diag,
    basis,
    factor,
    folded,
    S,
    R,
    split_column,
    total,
    K,
    blocks,
    factor_b,
    factor_t,
    factor_s,
    factor_r,
    vector_b,
    vector_v,
    vector_s,
    diag_b,
    diag_s,
    out_b,
    out_s,
    out_r,
    once,
    factor_scale: tl.float64,
    vector_scale: tl.float64,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILES: tl.constexpr,
    FOLD: tl.constexpr,
    HAS_VECTORS: tl.constexpr,
    CENTRE: tl.constexpr,
):
    """Program (block of rows, b): all K columns of the result, BLOCK_K at a time; each time the stack is read."""
    pid = tl.program_id(0).to(tl.int64)
    block = pid % blocks
    b = pid // blocks
    factors += b * factor_b
    vectors += b * vector_b
    mean += b * S
    rows = block * BLOCK_S + tl.arange(0, BLOCK_S).to(tl.int64)
    inside = rows < S
    lost = tl.zeros([BLOCK_S], tl.float64)
    for tile in range(TILES):
        kept = (tile * BLOCK_K + tl.arange(0, BLOCK_K)).to(tl.int64)
        projected = tl.zeros([BLOCK_S, BLOCK_K], COMPUTE)
        for first in range(0, total, BLOCK_R):
            columns = (first + tl.arange(0, BLOCK_R)).to(tl.int64)
            X = load_stack(
                factors, vectors, mean, rows, columns, inside, split_column, total, R, factor_t, factor_s, factor_r,
                vector_v, vector_s, factor_scale, vector_scale, COMPUTE, HAS_VECTORS, CENTRE,
            )  # fmt: skip
            where = (b * total + columns[:, None]) * K + kept[None, :]
            Q = tl.load(basis + where, mask=(columns < total)[:, None] & (kept < K)[None, :], other=0.0).to(COMPUTE)
            projected += tl.dot(operand(X, once, COMPUTE), Q, input_precision=PRECISION, out_dtype=COMPUTE)
            if FOLD and tile == 0:
                lost += tl.sum(square(X, once, COMPUTE), 1)
        stored = narrowed(projected, factor)
        where = b * out_b + rows[:, None] * out_s + kept[None, :] * out_r
        tl.store(factor + where, stored, mask=inside[:, None] & (kept < K)[None, :])
        # the variance to add is that missing from the stored numbers
        lost -= tl.sum(square(stored, once, COMPUTE), 1)
    d = tl.load(diag + b * diag_b + rows * diag_s, mask=inside, other=0.0).to(tl.float64)
    if FOLD:
        d += tl.where(lost < 0.0, 0.0, lost)
    tl.store(folded + b * S + rows, narrowed(d, folded), mask=inside)


def project_fold_fwd(
    cov_factors: Tensor,
    vectors: Tensor | None,
    factor_scale: float,
    vector_scale: float,
    centre: bool,
    cov_diag: Tensor,
    basis: Tensor,
    fold: bool,
    rank_major: bool,
) -> tuple[Tensor, Tensor]:
    B, T, S, R = cov_factors.shape
    V = 0 if vectors is None else vectors.shape[1]
    K = basis.shape[2]
    new = cov_factors.new_empty
    factor, folded = new(B, K, S).mT if rank_major else new(B, S, K), new(B, S)
    compute = configs.compute_type(cov_factors.dtype, AUTO)
    config = configs.choose("project_fold", cov_factors, K, compute)
    blocks = triton.cdiv(S, config.block_s)
    if B * blocks:
        _project_fold_fwd_kernel[common.grid(B * blocks)](
            *(cov_factors, common.pointer(vectors, cov_factors), mean_of(vectors, centre, cov_factors)),
            *(cov_diag, basis, factor, folded),
            *(S, max(R, 1), T * R, T * R + V, K, blocks),
            *cov_factors.stride(),
            *common.strides(vectors, 3),
            *cov_diag.stride(),
            *factor.stride(),
            *(1, factor_scale, vector_scale),
            COMPUTE=tl.float64 if compute == "float64" else tl.float32,
            PRECISION=config.input_precision,
            BLOCK_S=config.block_s,
            BLOCK_R=32,
            BLOCK_K=config.block_r,
            TILES=max(triton.cdiv(K, config.block_r), 1),
            FOLD=fold,
            HAS_VECTORS=V > 0,
            CENTRE=centre,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
    return factor, folded
