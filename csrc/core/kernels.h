// The kernels that exist once per instruction set, and the choice between the sets.
#pragma once

#include <cstddef>
#include <cstdint>

#include "types.h"

namespace lrd {

// Running sums of the forward pass over rows, in double. `sums` holds R + N rows of `ld` columns:
// row j < R is row j of G = P^T w P (columns k <= j are meaningful), row R + n is u_n = P^T w r_n.
struct GramSums {
  double* sums;
  int64_t ld;
  double* quad;      // [N]  r_n^T w r_n
  double* log_diag;  // [1]  sum log D; NaN once any D is not a positive finite number
};

// What the backward pass needs beside the inputs, and where it writes. Null outputs are skipped.
struct GramGrads {
  const void* chol_inv;    // L^-1 in the compute type, [R, ld], zero-padded
  const void* chol_inv_t;  // its transpose, [R, ld]
  int64_t ld;
  const double* z;          // [N, R]
  const double* grad_maha;  // [N]
  double grad_logdet;

  void* factor;  // [S, R] in the input dtype
  int64_t factor_stride_s;
  int64_t factor_stride_r;
  void* diag;  // [S]
  void* loc;   // [N, S]
  int64_t loc_stride_n;

  // Of the forward pass: where it is not 0, a number was not finite, and all that would follow from it is zero.
  int32_t info;               // of the covariance
  const int32_t* value_info;  // [N]
};

struct Kernels {
  const char* isa;
  int64_t column_multiple[kComputes];  // packed columns are padded to a multiple of this

  // Adds rows [begin, end) of one Gaussian to `sums`.
  void (*gram_rows[kDTypes][kComputes])(const Gaussian&, int64_t begin, int64_t end, void* scratch, GramSums sums);

  // Gradients of rows [begin, end), at most bwd_block_rows() of them, of `count` Gaussians that share one factor:
  // their factor gradients are summed, in order.
  void (*log_prob_bwd_rows[kDTypes][kComputes])(const Gaussian*, const GramGrads*, int64_t count, int64_t begin,
                                                int64_t end, void* scratch);

  // C = I + gram -> L (lower, upper part zeroed), L^-1. Returns false when C is not finite.
  bool (*cholesky)(const double* gram, double* chol, double* chol_inv, int64_t R);
};

// Sizes shared by the kernels and their callers; they depend on the problem alone, never on the threads.
int64_t gram_block_rows(int64_t R, Compute compute);
int64_t bwd_block_rows(int64_t R, Compute compute);
int64_t padded_columns(const Kernels& kernels, int64_t R, Compute compute);
size_t gram_scratch_bytes(const Kernels& kernels, int64_t R, Compute compute);
size_t bwd_scratch_bytes(const Kernels& kernels, int64_t R, Compute compute);

// Values are scored this many at a time beside the packed factor block.
constexpr int64_t kValueChunk = 16;
// The widest register tile of any instruction set, rows and bytes of columns: scratch is padded by it.
constexpr int64_t kMaxTileRows = 12;

// The set in use, chosen once: the best that CPU and operating system both allow, or the one
// that LRD_CPU_ISA names. select_error() tells why that name could not be followed, or is null.
const Kernels& kernels();
const char* select_error();
// Null-terminated names of the sets this machine can run, best first.
const char* const* available_isas();
const Kernels* kernels_named(const char* isa);

}  // namespace lrd
