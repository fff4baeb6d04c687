"""Op name -> schema text: the single contract of all backends.

Sizes: `F` factors serve `B` Gaussians, `B / F` consecutive ones each (`F == B` unless factors are shared); `N` values
are scored against each Gaussian; `S` outputs, `R` rank. `value - loc` is the difference `r`; `loc` may be absent.
With `eps`, `cov_diag` is raw and `D = eps + exp(cov_diag)`. `precision` is AUTO, FLOAT64 or FLOAT32 of `_policy`;
log_prob_fwd on the CPU takes DECLINING_AUTO as well.
"""

NAMESPACES = {"cpu": "lrd", "triton": "lrd_triton", "cuda": "lrd_cuda"}  # of torch.ops, by backend

_INPUTS = "Tensor cov_factor, Tensor cov_diag, Tensor? value, Tensor? loc, Tensor? mask, float? eps, int precision"
_STACK = "Tensor cov_factors, Tensor? vectors, float factor_scale, float vector_scale, bool centre"

SCHEMAS = {
    # cov_factor [F, S, R], cov_diag [B, S], value and loc [B, N, S], mask [B, S]
    # -> G = P^T w P [B, R, R], u = P^T w r [B, N, R], quad = r^T w r [B, N], sum log D [B]; all float64
    "gram_fwd": f"({_INPUTS}) -> (Tensor gram, Tensor u, Tensor quad, Tensor log_diag)",
    # -> L [B, R, R], L^-1 [B, R, R], z = C^-1 u [B, N, R], M [B, N], log det Sigma [B], growth [B]; all float64.
    #    Growth tells how much more than for orthogonal columns an error of the Gram sums comes out in L^-1: 1 at best,
    #    infinity where a number of the covariance was not finite.
    "capacitance_fwd": (
        "(Tensor gram, Tensor u, Tensor quad, Tensor log_diag)"
        " -> (Tensor chol, Tensor chol_inv, Tensor z, Tensor maha, Tensor logdet, Tensor growth)"
    ),
    # Both in one, for the number that is wanted and what its gradient needs, with the safeguards of precision "auto":
    # -> maha * M_n + logdet * log det Sigma + constant [B, max(N, 1)], without M where there are no values, in float64
    #    for float64 inputs and float32 for others; L^-1, the summary [B, 2] of growth and log det Sigma, z, and
    #    value_info [B, N] in int32, 1 where a number of the value or the covariance was not finite. Such results are
    #    NaN, and their z is 0. An L^-1 and a summary that are known from an earlier call spare their computation, and
    #    come back with no elements.
    "log_prob_fwd": (
        f"({_INPUTS}, Tensor? chol_inv, Tensor? summary, float maha, float logdet, float constant)"
        " -> (Tensor result, Tensor chol_inv, Tensor summary, Tensor z, Tensor value_info)"
    ),
    # A stack of columns, met where they lie: the T cov_factors [B, T, S, R] times factor_scale, then the vectors
    # [B, V, S], less their mean over V where they are to be centred, times vector_scale: X [B, S, T R + V]
    # -> X^T X [B, T R + V, T R + V] in float64
    "joint_gram_fwd": f"({_STACK}, int precision) -> Tensor",
    # The same stack, cov_diag [B, S], basis Q [B, T R + V, K] in float64 -> X Q [B, S, K], rank-major or not, and the
    # diagonal, with fold that plus what X Q leaves out: D + rowsum(X^2) - rowsum((X Q)^2), not less than D
    "project_fold_fwd": (
        f"({_STACK}, Tensor cov_diag, Tensor basis, bool fold, bool rank_major) -> (Tensor factor, Tensor diag)"
    ),
    # Gradients of sum_n grad_n (maha * M_n + logdet * log det Sigma), grad [B, max(N, 1)]: for cov_factor [F, S, R] in
    # the factor's layout, cov_diag [B, S] (raw when eps is given) and loc [B, N, S], or with sum_loc their sum over the
    # values [B, 1, S]; for value it is the same with the other sign. What is not needed comes back with no elements;
    # what failed in the forward pass gets zeros.
    "log_prob_bwd": (
        f"({_INPUTS}, Tensor chol_inv, Tensor summary, Tensor z, Tensor value_info, Tensor grad, float maha,"
        " float logdet, bool need_factor, bool need_diag, bool need_loc, bool sum_loc)"
        " -> (Tensor grad_factor, Tensor grad_diag, Tensor grad_loc)"
    ),
}
