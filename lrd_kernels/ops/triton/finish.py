"""From the slots of the Gram pass to the result, in one launch: an item's last program does the R-sized algebra."""

from __future__ import annotations

import triton
import triton.language as tl

from lrd_kernels.ops.triton.algebra import add_scalars, add_slots, factorise, is_last, judge, settle
from lrd_kernels.ops.triton.row_sums import SCALARS


@triton.jit(do_not_specialize=["S", "R", "splits"])
def _finish_kernel(
    sums,
    scalars,
    totals,
    tickets,
    again,
    chol_inv,
    summary,
    z,
    value_info,
    result,
    S: tl.int64,
    R: tl.int64,
    splits: tl.int64,
    sum_error: tl.float64,
    of_maha: tl.float64,
    of_logdet: tl.float64,
    constant: tl.float64,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    SLOTS: tl.constexpr,
    HAS_VALUE: tl.constexpr,
    BY_CERTIFICATE: tl.constexpr,
):
    """Program (chunk of numbers, b)."""
    ALL: tl.constexpr = WIDTH * (WIDTH + 1) // 2 + WIDTH
    CHUNKS: tl.constexpr = (ALL + CHUNK - 1) // CHUNK
    pid = tl.program_id(0).to(tl.int64)
    b = pid // CHUNKS
    totals += b * ALL
    numbers = pid % CHUNKS * CHUNK + tl.arange(0, CHUNK).to(tl.int64)
    add_slots(sums + b * splits * ALL, totals, numbers, splits, WIDTH, SLOTS)
    if is_last(tickets + 2 * b, CHUNKS):
        quad, log_diag, odd = add_scalars(scalars + b * splits * SCALARS, splits, SLOTS)
        growth, logdet, M, weighted = factorise(
            totals, quad, log_diag, chol_inv + b * R * R, summary + 2 * b, z + b * R, R, WIDTH, HAS_VALUE
        )
        settle(growth, logdet, M, result + b, value_info + b, of_maha, of_logdet, constant, HAS_VALUE)
        tl.store(again + b, judge(growth, logdet, M, weighted, quad, odd, S, sum_error, HAS_VALUE, BY_CERTIFICATE))
