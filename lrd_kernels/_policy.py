"""The numerical policy: every constant that decides in which precision something is computed.

`csrc/core/policy.h` has the same numbers for the native kernels, and a test compares the two. What only Python needs is
at the end.
"""

from __future__ import annotations

import math

import torch

# The `precision` argument of the ops. The last one is "auto", except that an item whose growth exceeds CHOLESKY_GROWTH,
# or the diagonal of whose Gram matrix exceeds EXPLAINED_RATIO, is reported as failed, so that the caller can look into
# it and compute it by QR (log_prob_fwd on the CPU).
AUTO, FLOAT64, FLOAT32, DECLINING_AUTO = range(4)
# Unknown to the ops: the factorisation takes place outside them, by QR, or of the S x S covariance where there are more
# columns than outputs.
QR, DUAL = 4, 5
OP_PRECISIONS = {"auto": AUTO, "float64": FLOAT64, "float32": FLOAT32}  # by the names that callers use
PRECISIONS = {**OP_PRECISIONS, "qr": QR}

# ---- sums of float32 products ----

FLUSH_ROWS = 128  # float32 partial sums are added to a float64 sum after at most this many rows
FLOAT32_SUM_ERROR = 2.0**-22  # of such a sum, relative to sqrt(G_jj G_kk); it grows with FLUSH_ROWS
FLOAT64_SUM_ERROR = 2.0**-50  # the same of sums in float64
# The same of sums of pairs of float32, as the CUDA kernels form them. A product of a pair and a number errs by 2^-47.
# The lower half of a sum, about 2^-21 of it after 64 rows, is rounded by 2^-24 at each addition.
PAIR_SUM_ERROR = 2.0**-42
# Diagonal entries of which pairs are formed: their reciprocals, and the lower halves, are normal float32 numbers.
PAIR_LEAST, PAIR_MOST = 2.0**-80, 2.0**80
QUAD_ERROR = 2.0**-29  # of r^T w r, always summed in float64, relative to the sum error above
INVERSE_ERROR = 2.0**-46  # rounding error of M computed with L^-1, relative to its terms
TOLERANCE = 2.5e-7  # largest error of M, relative to M and to the log-density

FLOAT32_RANK = 32  # from this rank on, the CPU tries float32 products
# The largest growth for which L^-1 from float32 products is accurate enough. The growth is the factor by which an error
# of the Gram sums is larger in L^-1 than it would be for orthogonal columns.
FLOAT32_GROWTH = 8.0
HIGH_LEVERAGE = 0.1  # rows of higher leverage h are computed in float64, because 1 - h cancels
# So are rows of a larger weight 1 / D, and every row where the diagonal of L^-1 has a smaller entry: they come near the
# limits of float32's range.
FLOAT32_WEIGHT = 1e18
FLOAT32_INVERSE = 1e-18

# ---- the Cholesky factorisation of the capacitance ----

CHOLESKY_GROWTH = 1e10  # the largest growth for which it gives the log-density to 1e-7
# An output of this squared signal-to-noise ratio, w |p|^2, takes nearly all digits from the gradients of the others.
# The diagonal of the Gram matrix bounds it.
EXPLAINED_RATIO = 1e10
PIVOT_NUDGE = 2.0**-50  # times R and the diagonal entry: added to the diagonal when a pivot was rounded below zero
FUSED_RANK = 128  # the largest rank that one launch factorises in shared memory
BLOCKED_RANK = 1024  # the largest rank of the CUDA kernels; above, torch's routines are used

# ---- the diagonal eps + exp(raw) ----

EXP_LIMIT_FLOAT64 = 350.0
EXP_LIMIT_FLOAT32 = 80.0
EXP_LIMIT_BFLOAT16 = 80.0
EXP_LIMIT_FLOAT16 = 11.0

LOG_2PI = math.log(2 * math.pi)


def exp_limit(dtype: torch.dtype) -> float:
    """The exponential is constant above this limit, by the dtype of `raw`: there it is finite in that dtype, and its
    square in float64."""
    if dtype == torch.float64:
        return EXP_LIMIT_FLOAT64
    if dtype == torch.float16:
        return EXP_LIMIT_FLOAT16
    return EXP_LIMIT_BFLOAT16 if dtype == torch.bfloat16 else EXP_LIMIT_FLOAT32


# ---- in Python alone ----

QR_GROWTH = 1e12  # what a factorisation by QR reports as its growth: too much for float32 products
DUAL_RANK = 32  # above this rank, QR factorises the S x S covariance where it is smaller than the capacitance
# The largest trace of D^-1/2 Sigma D^-1/2, a bound on its condition number, for which a Cholesky factorisation of it
# serves instead of QR.
DUAL_TRACE = 1e7
EXPLAINED_LEVERAGE = 0.9  # outputs of higher leverage are inverted as a block of their own by QR
ROOT_LEVERAGE = 1 - 1e-8  # `whiten` conditions outputs of higher leverage on the others
FLOAT32_SQUARES = (1e-25, 1e30)  # sums of squares of float32 numbers that are accurate in float32
# Truncation: singular values below this share of the largest one lose digits in a Gram matrix in float64, and their
# columns in products in float32.
GRAM_RANGE = (1e-3, 1e-2)  # the second one for float64 factors
FLOAT32_RANGE = 3e-2
FOLD_TOLERANCE = 1e-3  # the largest share of a diagonal entry that folding may add to it by rounding
# Condition numbers of the capacitance, from which on:
CHOLESKY_CONDITION = 1e14  # a float64 Cholesky factorisation no longer tells the condition
GRADIENT_CONDITION = 1e11  # gradients lose digits even in float64
FLOAT32_CONDITION = 1e6  # float32 arithmetic may fail
