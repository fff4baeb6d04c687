"""gram_fwd: G = P^T w P, u = P^T w r, r^T w r and sum log D. P is read once if one tile holds all columns.

Each program sums a run of rows of one Gaussian, for one tile of G. Sums of float32 products are added to float64 sums
after every block of rows. Each program has its own slot, and the slots are added in order: there are no atomics, and
every run gives the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lrd_kernels._policy import AUTO, FLOAT64, exp_limit
from lrd_kernels.ops.triton import common, configs
from lrd_kernels.ops.triton.common import find_present, load_diag, load_rows, load_tile, operand, rounded, times


@triton.jit(do_not_specialize=["once"])
def _gram_fwd_kernel(
    factor,
    diag,
    value,
    loc,
    mask,
    again,
    shift,
    gram,
    u,
    quad,
    log_diag,
    S,
    R,
    N,
    first_value,
    per_factor,
    splits,
    rows_per_split,
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
    once,
    eps: tl.float64,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILES: tl.constexpr,
    WANT_GRAM: tl.constexpr,
    HAS_VALUE: tl.constexpr,
    HAS_LOC: tl.constexpr,
    HAS_MASK: tl.constexpr,
    EXP: tl.constexpr,
    LIMIT: tl.constexpr,
    AGAIN: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    """Program (split, tile, b). With AGAIN, only items whose `again` [B] is set are summed. With RESIDUAL, r - P s is
    used instead of r, where s is `shift` [B, N, R], and one tile holds all columns."""
    pid = tl.program_id(0).to(tl.int64)
    split = pid % splits
    tile = pid // splits % (TILES * TILES if WANT_GRAM else TILES)
    b = pid // splits // (TILES * TILES if WANT_GRAM else TILES)
    i = tile // TILES if WANT_GRAM else tile
    j = tile % TILES if WANT_GRAM else tile
    if j > i:
        return
    factor += b // per_factor * factor_b
    diag += b * diag_b
    mask += b * mask_b
    left = (i * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    right = (j * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    numbers = (first_value + tl.arange(0, BLOCK_N)).to(tl.int64)

    products = tl.zeros([BLOCK_R, BLOCK_R], tl.float64)
    if BLOCK_N == 1:
        projected = tl.zeros([BLOCK_R], tl.float64)
        squares = tl.zeros([1], tl.float64)
    else:
        projected = tl.zeros([BLOCK_R, BLOCK_N], tl.float64)
        squares = tl.zeros([BLOCK_N], tl.float64)
    logs = tl.zeros([BLOCK_S], tl.float64)
    if RESIDUAL:
        s = tl.load(shift + (b * N + first_value) * R + left, mask=left < R, other=0.0)
    begin = split * rows_per_split
    end = tl.minimum(begin + rows_per_split, S)
    if AGAIN:  # the other items process no rows
        end *= tl.load(again + b)
    for start in range(begin, end, BLOCK_S):
        rows = start + tl.arange(0, BLOCK_S).to(tl.int64)
        present = find_present(mask, rows, mask_s, rows < end, HAS_MASK)
        d, w, _ = load_diag(diag, rows, diag_s, present, eps, EXP, LIMIT)
        logs += tl.where((d > 0) & (d < float("inf")), tl.log(d), float("nan"))
        P = load_tile(factor, rows, left, factor_s, factor_r, present, R).to(COMPUTE)
        if WANT_GRAM:
            weighted = operand(P * w.to(COMPUTE)[:, None], once, COMPUTE)
            if TILES == 1:
                Q = operand(P, once, COMPUTE)
            else:
                Q = load_tile(factor, rows, right, factor_s, factor_r, present, R).to(COMPUTE)
                Q = operand(Q, once, COMPUTE)
            products += tl.dot(tl.trans(weighted), Q, input_precision=PRECISION, out_dtype=COMPUTE).to(tl.float64)
        if HAS_VALUE:
            if BLOCK_N == 1:
                r = load_rows(value + b * value_b + first_value * value_n, rows, value_s, present)
                if HAS_LOC:
                    r -= load_rows(loc + b * loc_b + first_value * loc_n, rows, loc_s, present)
                if RESIDUAL:
                    r -= tl.sum(times(P, s[None, :], once, COMPUTE), 1)
                projected += tl.sum(times(P, (w * r)[:, None], once, COMPUTE), 0)
                squares += tl.sum(rounded(w * r * r, once), 0)
            else:
                r = load_tile(value + b * value_b, rows, numbers, value_s, value_n, present, N).to(tl.float64)
                if HAS_LOC:
                    r -= load_tile(loc + b * loc_b, rows, numbers, loc_s, loc_n, present, N).to(tl.float64)
                wr = r * w[:, None]
                projected += tl.dot(
                    tl.trans(operand(P, once, COMPUTE)),
                    operand(wr.to(COMPUTE), once, COMPUTE),
                    input_precision=PRECISION,
                    out_dtype=COMPUTE,
                ).to(tl.float64)
                squares += tl.sum(rounded(wr * r, once), 0)

    slot = b * splits + split
    if WANT_GRAM:
        inside = (left < R)[:, None] & (right < R)[None, :]
        tl.store(gram + (slot * R + left[:, None]) * R + right[None, :], products, mask=inside)
    if HAS_VALUE and j == i:
        if BLOCK_N == 1:
            tl.store(u + (slot * N + first_value) * R + left, projected, mask=left < R)
        else:
            wanted = (left < R)[:, None] & (numbers < N)[None, :]
            tl.store(u + (slot * N + numbers[None, :]) * R + left[:, None], projected, mask=wanted)
    if i == 0:
        if HAS_VALUE:
            tl.store(quad + slot * N + first_value + tl.arange(0, BLOCK_N), squares, mask=numbers < N)
        if first_value == 0:
            tl.store(log_diag + slot, tl.sum(logs, 0))


def launch_gram_fwd(
    cov_factor: Tensor,
    cov_diag: Tensor,
    value: Tensor | None,
    loc: Tensor | None,
    mask: Tensor | None,
    eps: float | None,
    *,
    compute: str,
    want_gram: bool = True,
    again: Tensor | None = None,
    shift: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sums of `gram_fwd`, with products in a compute type. With `again` [B], other items are uninitialised. With a
    shift s [B, N, R], r - P s is used instead of r; this requires `one_tile`."""
    F, S, R = cov_factor.shape
    B = cov_diag.shape[0]
    N = 0 if value is None else value.shape[1]
    config = configs.choose("gram", cov_factor, R, compute)
    if shift is not None:  # no product needs registers here, and fewer rows spill on sm_90
        config = config._replace(block_s=max(config.block_s, 32))
    tiles = max(triton.cdiv(R, config.block_r), 1)
    splits, rows_per_split = configs.split_rows(S, B * tiles * tiles, config)

    def sums(*shape: int) -> Tensor:
        return torch.empty(B, splits, *shape, dtype=torch.float64, device=cov_factor.device)

    gram, u, quad, log_diag = sums(R, R) if want_gram else sums(0), sums(N, R), sums(N), sums()
    mask = common.as_bytes(mask)
    block_n = 1 if N <= 1 or shift is not None else 16
    for first in range(0, max(N, 1), block_n):
        count = tiles * tiles if want_gram and first == 0 else tiles
        if B * count == 0:
            break
        _gram_fwd_kernel[common.grid(B * count * splits)](
            cov_factor,
            cov_diag,
            common.pointer(value, cov_diag),
            common.pointer(loc, cov_diag),
            common.pointer(mask, cov_diag),
            common.pointer(again, cov_diag),
            common.pointer(shift, cov_diag),
            *(gram, u, quad, log_diag),
            *(S, R, N, first, B // max(F, 1), splits, rows_per_split),
            *cov_factor.stride(),
            *cov_diag.stride(),
            *common.strides(value, 3),
            *common.strides(loc, 3),
            *common.strides(mask, 2),
            *(1, 0.0 if eps is None else eps),
            COMPUTE=tl.float64 if compute == "float64" else tl.float32,
            PRECISION=config.input_precision,
            BLOCK_S=config.block_s,
            BLOCK_R=config.block_r,
            BLOCK_N=block_n,
            TILES=tiles,
            WANT_GRAM=want_gram and first == 0,
            HAS_VALUE=value is not None and N > 0,
            HAS_LOC=loc is not None,
            HAS_MASK=mask is not None,
            EXP=eps is not None,
            LIMIT=exp_limit(cov_factor.dtype),
            AGAIN=again is not None,
            RESIDUAL=shift is not None,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
    return common.add_slots(gram) if want_gram else gram, u.sum(1), quad.sum(1), log_diag.sum(1)


def one_tile(cov_factor: Tensor) -> bool:
    """Whether one program of the float32 launch holds all columns."""
    R = cov_factor.shape[2]
    return configs.choose("gram", cov_factor, R, "float32").block_r >= R


def gram_fwd(
    cov_factor: Tensor,
    cov_diag: Tensor,
    value: Tensor | None,
    loc: Tensor | None,
    mask: Tensor | None,
    eps: float | None,
    precision: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    precision = FLOAT64 if precision == AUTO else precision  # "auto" has no certificate here
    compute = configs.compute_type(cov_factor.dtype, precision)
    return launch_gram_fwd(cov_factor, cov_diag, value, loc, mask, eps, compute=compute)
