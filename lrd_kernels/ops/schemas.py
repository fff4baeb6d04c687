"""The schemas of the ops by name, which all backends implement.

Sizes: `F` factors, `B` Gaussians, `N` values per Gaussian, `S` outputs, rank `R`. Each factor belongs to `B / F`
consecutive Gaussians (`F == B` unless factors are shared). `value - loc` is the difference `r`; `loc` may be absent.
With `eps`, `cov_diag` is raw and `D = eps + exp(cov_diag)`. `precision` is AUTO, FLOAT64 or FLOAT32 of `_policy`;
log_prob_fwd on the CPU also accepts DECLINING_AUTO.
"""

NAMESPACES = {"cpu": "lrd", "triton": "lrd_triton", "cuda": "lrd_cuda"}  # namespaces of torch.ops by backend

_INPUTS = "Tensor cov_factor, Tensor cov_diag, Tensor? value, Tensor? loc, Tensor? mask, float? eps, int precision"
_STACK = "Tensor cov_factors, Tensor? vectors, float factor_scale, float vector_scale, bool centre"

SCHEMAS = {
    # cov_factor [F, S, R], cov_diag [B, S], value and loc [B, N, S], mask [B, S]
    # -> G = P^T w P [B, R, R], u = P^T w r [B, N, R], quad = r^T w r [B, N], sum log D [B]; all float64
    "gram_fwd": f"({_INPUTS}) -> (Tensor gram, Tensor u, Tensor quad, Tensor log_diag)",
    # -> L [B, R, R], L^-1 [B, R, R], z = C^-1 u [B, N, R], M [B, N], log det Sigma [B], growth [B]; all float64.
    #    The growth is the factor by which an error of the Gram sums is larger in L^-1 than for orthogonal columns: at
    #    least 1, and infinite if a number of the covariance is not finite.
    "capacitance_fwd": (
        "(Tensor gram, Tensor u, Tensor quad, Tensor log_diag)"
        " -> (Tensor chol, Tensor chol_inv, Tensor z, Tensor maha, Tensor logdet, Tensor growth)"
    ),
    # The two ops above in one. Returns the result and the tensors that its gradient needs; handles precision "auto".
    # -> maha * M_n + logdet * log det Sigma + per_output * S [B, max(N, 1)] (without M if there are no values), in
    #    float64 for float64 inputs and if there is a mask, and in float32 otherwise; L^-1; the summary [B, 2] of growth
    #    and log det Sigma; z; and value_info [B, N] in int32, which is 1 if a number of the value or the covariance is
    #    not finite. The result is then NaN, and z is 0. If L^-1 and the summary of an earlier call are given, they are
    #    not computed again, and the corresponding outputs are empty.
    "log_prob_fwd": (
        f"({_INPUTS}, Tensor? chol_inv, Tensor? summary, float maha, float logdet, float per_output)"
        " -> (Tensor result, Tensor chol_inv, Tensor summary, Tensor z, Tensor value_info)"
    ),
    # A stack X [B, S, T R + V] of columns, read in place: the T cov_factors [B, T, S, R] times factor_scale, then the
    # vectors [B, V, S] times vector_scale, with their mean over V subtracted first if `centre` is True
    # -> X^T X [B, T R + V, T R + V] in float64
    "joint_gram_fwd": f"({_STACK}, int precision) -> Tensor",
    # The same stack, cov_diag [B, S], basis Q [B, T R + V, K] in float64 -> X Q [B, S, K], rank-major or row-major, and
    # the diagonal. With `fold` the dropped variance is added to it: D + rowsum(X^2) - rowsum((X Q)^2), at least D
    "project_fold_fwd": (
        f"({_STACK}, Tensor cov_diag, Tensor basis, bool fold, bool rank_major) -> (Tensor factor, Tensor diag)"
    ),
    # The gradients of project_fold_fwd. The pull is grad_factor - 2 grad_diag projected, for projected = X Q and
    # grad_factor [B, S, K], and grad_diag [B, S]; grad_diag is None if nothing was folded.
    # -> for the basis: X^T pull [B, T R + V, K] in float64
    "project_basis_bwd": f"({_STACK}, Tensor projected, Tensor grad_factor, Tensor? grad_diag) -> Tensor",
    # -> for the stack: X' = pull Q^T + 2 grad_diag X + X (Q W^T + W Q^T), for the basis Q and W (`turn`), both
    #    [B, T R + V, K] in float64; the last term is the gradient through the Gram matrix. For the cov_factors as
    #    [T B, S, R], in their layout, and for the vectors as [V, B, S]; the first dimension is 0 if not needed.
    "project_fold_bwd": (
        f"({_STACK}, Tensor basis, Tensor turn, Tensor projected, Tensor grad_factor, Tensor? grad_diag,"
        " bool need_factors, bool need_vectors) -> (Tensor grad_factors, Tensor grad_vectors)"
    ),
    # Gradients of sum_n grad_n (maha * M_n + logdet * log det Sigma), grad [B, max(N, 1)]: for cov_factor [F, S, R] in
    # the factor's layout, cov_diag [B, S] (raw if eps is given) and loc [B, N, S], or with sum_loc the sum over values
    # [B, 1, S]. The gradient for value is that for loc with the opposite sign. Gradients that are not needed are empty;
    # those of items that failed in the forward pass are zero.
    "log_prob_bwd": (
        f"({_INPUTS}, Tensor chol_inv, Tensor summary, Tensor z, Tensor value_info, Tensor grad, float maha,"
        " float logdet, bool need_factor, bool need_diag, bool need_loc, bool sum_loc)"
        " -> (Tensor grad_factor, Tensor grad_diag, Tensor grad_loc)"
    ),
}
