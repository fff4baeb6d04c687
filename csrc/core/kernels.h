// The kernels that exist once per instruction set, and the choice between the sets.
#pragma once

#include <cstdint>

#include "policy.h"
#include "types.h"

namespace lrd {

// Running sums of the forward pass over rows, in double. `sums` holds R + N rows of `ld` columns:
// row j < R is row j of G = P^T w P (columns k <= j are meaningful), row R + n is u_n = P^T w r_n.
struct GramSums {
  double* sums;
  int64_t ld;
  double* quad;           // [N]  r_n^T w r_n
  double* log_diag;       // [1]  sum log D; NaN once any D is not a positive finite number
  bool want_gram = true;  // false: rows j < R may be left as they are
};

// What the backward pass needs beside the inputs, and where it writes. Null outputs are skipped.
struct GramGrads {
  const void* chol_inv;    // L^-1 in the compute type, [R + kMaxTileRows, ld], zero-padded
  const void* chol_inv_t;  // its transpose, likewise
  int64_t ld;
  const double* z;          // [N, R]
  const double* grad_maha;  // [N]
  double grad_logdet;

  void* factor;  // [S, R] in the input dtype
  int64_t factor_stride_s;
  int64_t factor_stride_r;
  void* diag;  // [S]
  void* loc;   // [N, S], or with sum_loc [1, S], the sum over the values
  int64_t loc_stride_n;
  bool sum_loc;

  const double* exact_chol_inv;  // L^-1 in double, [R, R], for rows of high leverage

  // Of the forward pass: what failed there (a number was not finite) has zero for a gradient.
  bool failed;                // the covariance
  const int32_t* value_info;  // [N], not 0 for a value

  bool streamed;  // the outputs are so large that they are written past the caches
};

// A basis to project rows on, and where the results go.
struct Projection {
  const void* basis;  // the scales of the columns in it, transposed: [K + kMaxTileRows, ld] in the compute type,
  int64_t ld;         // zero-padded
  int64_t K;
  bool fold;

  void* factor;  // the projected rows [S, K] in the input dtype
  int64_t factor_stride_s;
  int64_t factor_stride_r;
  VectorView diag;  // D [S]
  void* folded;     // [S]
};

// The gradients that come back to a projection, and what was projected.
struct Pull {
  MatrixView factor;     // the gradient for the projected rows [S, K]
  MatrixView projected;  // [S, K]
  VectorView diag;       // the gradient for the diagonal [S] where something was folded, else null
};

// What the gradient for a stack needs beside them, and where it goes. Null outputs are skipped.
struct StackGrads {
  const double* turn;  // [K + kMaxTileRows, columns], zero-padded: the gradient for the Gram matrix of the stack is
                       // Q B^T + B Q^T, and this is B^T, times the scales of the columns
  const double* back;  // [columns + kMaxTileRows, 2 K], zero-padded: Q and B side by side, times the scales

  void* factors;  // [T, S, R] in the input dtype
  int64_t factor_stride_t;
  int64_t factor_stride_s;
  int64_t factor_stride_r;
  void* vectors;  // [V, S]
  int64_t vector_stride_v;
};

struct Kernels {
  const char* isa;
  int64_t (*padded_columns[kComputes])(int64_t columns);  // the columns of GramSums: whole tiles

  // Adds rows [begin, end) of one Gaussian to `sums`. A shift [R], or null, makes the difference r - P shift; it is for
  // one value and ranks above kSmallRank.
  void (*gram_rows[kDTypes][kComputes])(const GaussianInputs&, const double* shift, int64_t begin, int64_t end,
                                        void* scratch, GramSums sums);

  // Adds rows [begin, end) of the residuals r_n - P shift_n, shift [N, R], to `sums`: row n of it (of ld columns) is
  // P^T w (r_n - P shift_n), and quad the weighted squares. All in double; log_diag is left alone.
  void (*residual_rows[kDTypes])(const GaussianInputs&, const double* shift, int64_t begin, int64_t end, void* scratch,
                                 GramSums sums);

  // Gradients of rows [begin, end), at most bwd_block_rows() of them, of `count` Gaussians that share one factor:
  // their factor gradients are summed, in order.
  void (*log_prob_bwd_rows[kDTypes][kComputes])(const GaussianInputs*, const GramGrads*, int64_t count, int64_t begin,
                                                int64_t end, void* scratch);

  // Adds rows [begin, end) of the Gram matrix of a stack to `sums`, of which only the sums themselves are touched.
  void (*joint_gram_rows[kDTypes][kComputes])(const Stack&, int64_t begin, int64_t end, void* scratch, GramSums sums);

  // Rows [begin, end) of a stack, at most project_block_rows() of them, in another basis, and their diagonal.
  void (*project_fold_rows[kDTypes][kComputes])(const Stack&, const Projection&, int64_t begin, int64_t end,
                                                void* scratch);

  // Adds X^T pull of rows [begin, end) of a stack X to `sums`, row k of which is for column k of the pull. In double.
  void (*project_basis_bwd_rows[kDTypes])(const Stack&, const Pull&, int64_t begin, int64_t end, void* scratch,
                                          GramSums sums);

  // The gradient for rows [begin, end) of a stack, at most project_bwd_block_rows() of them. In double.
  void (*project_fold_bwd_rows[kDTypes])(const Stack&, const Pull&, const StackGrads&, int64_t begin, int64_t end,
                                         void* scratch);

  // C = I + gram -> L, L^-1 (upper parts zeroed); gram and chol_inv may be the same memory. Returns the growth: by how
  // much more than for orthogonal columns an error of the Gram sums comes out in L^-1 (1 at best, scale-free), infinity
  // when C is not finite.
  double (*cholesky)(const double* gram, double* chol, double* chol_inv, void* scratch, int64_t R);

  // The bytes of scratch that each of them takes, by the layout that it uses itself.
  int64_t (*gram_scratch[kComputes])(int64_t R, int64_t N);
  int64_t (*residual_scratch)(int64_t R);
  int64_t (*bwd_scratch[kComputes])(int64_t R);
  int64_t (*joint_gram_scratch[kComputes])(int64_t columns);
  int64_t (*project_scratch[kComputes])(int64_t columns, int64_t K);
  int64_t (*project_basis_bwd_scratch)(int64_t columns, int64_t K);
  int64_t (*project_fold_bwd_scratch)(int64_t columns, int64_t K);
  int64_t (*cholesky_scratch)(int64_t R);
};

// Sizes shared by the kernels and their callers; they depend on the problem alone, never on the threads.
int64_t gram_block_rows(int64_t R, int64_t N, Compute compute);
int64_t bwd_block_rows(int64_t R);
int64_t joint_block_rows(int64_t columns, Compute compute);
int64_t project_block_rows(int64_t columns, int64_t K);
int64_t project_bwd_block_rows(int64_t columns, int64_t K);

// Values are scored this many at a time beside the packed factor block.
constexpr int64_t kValueChunk = 16;
// The most rows of a register tile of any instruction set: scratch is padded by it.
constexpr int64_t kMaxTileRows = 8;
// Up to this rank, and one chunk of values, the forward pass sums along the rows of a block; otherwise by outer
// products of its rows.
constexpr int64_t kSmallRank = 16;
constexpr bool sums_along_rows(int64_t R, int64_t N) { return R <= kSmallRank && N <= kValueChunk; }

// Of high ranks, products take so many columns of a block at a time, which stay in the second-level cache.
constexpr int64_t kCachedColumns = 256;

// The set in use, chosen once: the best that CPU and operating system both allow, or the one
// that LRD_CPU_ISA names. select_error() tells why that name could not be followed, or is null.
const Kernels& kernels();
const char* select_error();
// Null-terminated names of the sets this machine can run, best first.
const char* const* available_isas();
const Kernels* kernels_named(const char* isa);

}  // namespace lrd
