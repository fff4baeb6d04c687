"""joint_gram_fwd: the Gram matrix of a stack's columns, which are read in place. Tiles and sums as in gram.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lrd_kernels.ops.triton import common, configs
from lrd_kernels.ops.triton.common import operand
from lrd_kernels.ops.triton.stack import load_stack


@triton.jit(do_not_specialize=["once"])
def _joint_gram_fwd_kernel(
    factors,
    vectors,
    mean,
    gram,
    S,
    R,
    split_column,
    total,
    splits,
    rows_per_split,
    factor_b,
    factor_t,
    factor_s,
    factor_r,
    vector_b,
    vector_v,
    vector_s,
    once,
    factor_scale: tl.float64,
    vector_scale: tl.float64,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_R: tl.constexpr,
    TILES: tl.constexpr,
    HAS_VECTORS: tl.constexpr,
    CENTRE: tl.constexpr,
):
    """Program (split, tile, b)."""
    pid = tl.program_id(0).to(tl.int64)
    split = pid % splits
    tile = pid // splits % (TILES * TILES)
    b = pid // splits // (TILES * TILES)
    i = tile // TILES
    j = tile % TILES
    if j > i:
        return
    factors += b * factor_b
    vectors += b * vector_b
    mean += b * S
    left = (i * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    right = (j * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    products = tl.zeros([BLOCK_R, BLOCK_R], tl.float64)
    begin = split * rows_per_split
    end = tl.minimum(begin + rows_per_split, S)
    for start in range(begin, end, BLOCK_S):
        rows = start + tl.arange(0, BLOCK_S).to(tl.int64)
        inside = rows < end
        X = load_stack(
            factors, vectors, mean, rows, left, inside, split_column, total, R, factor_t, factor_s, factor_r,
            vector_v, vector_s, factor_scale, vector_scale, COMPUTE, HAS_VECTORS, CENTRE,
        )  # fmt: skip
        X = operand(X, once, COMPUTE)
        if TILES == 1:
            Y = X
        else:
            Y = load_stack(
                factors, vectors, mean, rows, right, inside, split_column, total, R, factor_t, factor_s, factor_r,
                vector_v, vector_s, factor_scale, vector_scale, COMPUTE, HAS_VECTORS, CENTRE,
            )  # fmt: skip
        products += tl.dot(tl.trans(X), operand(Y, once, COMPUTE), input_precision=PRECISION, out_dtype=COMPUTE).to(
            tl.float64
        )
    inside = (left < total)[:, None] & (right < total)[None, :]
    where = ((b * splits + split) * total + left[:, None]) * total + right[None, :]
    tl.store(gram + where, products, mask=inside)


def joint_gram_fwd(
    cov_factors: Tensor,
    vectors: Tensor | None,
    factor_scale: float,
    vector_scale: float,
    centre: bool,
    precision: int,
) -> Tensor:
    B, T, S, R = cov_factors.shape
    V = 0 if vectors is None else vectors.shape[1]
    K = T * R + V
    compute = configs.compute_type(cov_factors.dtype, precision or 1)  # "auto" has no certificate here
    config = configs.choose("gram", cov_factors, K, compute)
    tiles = max(triton.cdiv(K, config.block_r), 1)
    splits, rows_per_split = configs.split_rows(S, B * tiles * tiles, config)
    gram = torch.empty(B, splits, K, K, dtype=torch.float64, device=cov_factors.device)
    mean = mean_of(vectors, centre, cov_factors)
    if gram.numel():
        _joint_gram_fwd_kernel[common.grid(B * tiles * tiles * splits)](
            *(cov_factors, common.pointer(vectors, cov_factors), mean, gram),
            *(S, max(R, 1), T * R, K, splits, rows_per_split),
            *cov_factors.stride(),
            *common.strides(vectors, 3),
            *(1, factor_scale, vector_scale),
            COMPUTE=tl.float64 if compute == "float64" else tl.float32,
            PRECISION=config.input_precision,
            BLOCK_S=config.block_s,
            BLOCK_R=config.block_r,
            TILES=tiles,
            HAS_VECTORS=V > 0,
            CENTRE=centre,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
    return common.add_slots(gram)


def mean_of(vectors: Tensor | None, centre: bool, stand_in: Tensor) -> Tensor:
    """The mean [B, S] of the vectors in float64, if they are to be centred."""
    if vectors is None or not centre or vectors.shape[1] == 0:
        return stand_in
    return vectors.mean(1, dtype=torch.float64)
