// The arguments of the kernels, one plain struct each, passed by value. Strides count elements. Null: not given.
#pragma once

#include <cstdint>

namespace lrd::cuda {

// The columns of a Gram matrix or a projection where they lie: T blocks [S, R], then V vectors [S].
struct Columns {
  const void* factors;  // [F, T, S, R]
  int64_t factor_b, factor_t, factor_s, factor_r;
  int64_t per_factor;  // consecutive items that share a factor
  int R;               // columns of a block, at least 1
  int of_factors;      // T R
  int total;           // T R + V
  bool rank_major;     // S, not R, is contiguous
  double factor_scale;
  const void* vectors;  // [B, V, S]
  int64_t vector_b, vector_v, vector_s;
  double vector_scale;
  const double* mean;  // [B, S] of the vectors, where they are centred
};

// The S-sized inputs of a Gaussian beside its factor.
struct Rows {
  bool weighted;     // by 1 / D; otherwise all weights are 1, and there is nothing but rows
  const void* diag;  // [B, S]
  int64_t diag_b, diag_s;
  bool exp_diag;  // D = eps + exp(min(diag, limit))
  double eps, limit;
  const uint8_t* mask;  // [B, S]
  int64_t mask_b, mask_s;
  const void* value;  // [B, N, S]
  int64_t value_b, value_n, value_s;
  const void* loc;  // [B, N, S]
  int64_t loc_b, loc_n, loc_s;
  int64_t S, N;
};

struct GramArgs {
  Columns columns;
  Rows rows;
  const int32_t* again;  // [B]: only the items for which it is set
  double* gram;          // [B, splits, total, total], tiles at or below the diagonal; null: not wanted
  double* u;             // [B, splits, N, total]
  double* quad;          // [B, splits, N]
  double* log_diag;      // [B, splits]
  int64_t first_value;
  int values;  // of this launch
  int64_t splits, rows_per_split, pairs;
};

// Sums of the slots, in their order.
struct AddArgs {
  const int32_t* again;
  const double *gram_slots, *u_slots, *quad_slots, *log_slots;
  double *gram, *u, *quad, *log_diag;
  int64_t B, N, columns, splits;
};

struct MeanArgs {
  const void* vectors;  // [B, V, S]
  int64_t vector_b, vector_v, vector_s;
  double* mean;  // [B, S]
  int64_t B, V, S;
};

struct CapacitanceArgs {
  const double *gram, *u, *quad, *log_diag;  // [B, R, R], [B, N, R], [B, N], [B]
  const int32_t* again;                      // [B]: only the items for which it is set
  double* chol;                              // [B, R, R]; of the fused kernel may be null
  double *chol_inv, *z, *maha;
  double *logdet, *growth;  // [B], `stride` apart
  int64_t stride;
  int64_t N;
  int R;
  int panel, panels;  // of the blocked kernels
};

// Above the rank of the blocked kernels, around torch's own routines.
struct PrepareArgs {
  const double* gram;                  // [B, R, R]
  double *matrix, *nudged, *identity;  // I + G, the same with a little more on its diagonal, and I [R, R]
  int64_t B, R;
};

// The lower triangle of `first`, or of `second` where `failed` is set, to a contiguous [B, R, R], zeros above.
struct TakeArgs {
  const int32_t* again;   // [B]: only the items for which it is set
  const int32_t* failed;  // [B]; may be null
  const double *first, *second;
  int64_t stride_b, stride_i, stride_j;  // of both
  double* to;
  int64_t B, R;
};

struct JudgeArgs {
  const double *gram, *quad, *z, *maha;
  const double* summary;  // [B, 2]: growth, log det Sigma
  int32_t* again;         // [B]
  int64_t N, S;
  int R;
};

struct SettleArgs {
  const double *maha, *summary;
  double* z;
  int32_t* value_info;
  void* result;  // [B, max(N, 1)]
  bool wide;
  int64_t N;
  int R;
  double of_maha, of_logdet, constant;
};

struct BackwardArgs {
  const void* factor;  // [F, S, R]
  int64_t factor_b, factor_s, factor_r;
  bool rank_major;
  Rows rows;
  const double *chol_inv, *summary, *z;
  const int32_t* value_info;
  const void* grad;  // [B, max(N, 1)]
  int64_t grad_b, grad_n;
  bool wide_grad;
  int32_t* flags;         // [F, blocks]: set where float32 is not enough
  const int32_t* wanted;  // [F, wanted_blocks]: only these blocks of rows
  int64_t wanted_blocks;
  int wanted_rows;
  void *grad_factor, *grad_diag, *grad_loc;
  int64_t out_b, out_s, out_r;
  int64_t per_factor, blocks;
  int R, block_rows, width, pitch;
  bool separate_total;  // the gradient is summed beside the block of rows, not in its place
  bool need_logdet, sum_loc;
  double maha, logdet;
};

struct ProjectArgs {
  Columns columns;
  const void* diag;  // [B, S]
  int64_t diag_b, diag_s;
  const double* basis;  // [B, total, K]
  void *factor, *folded;
  int64_t out_b, out_s, out_r;
  bool out_rank_major, fold;
  int64_t S, blocks;
  int K, block_rows, width, pitch;
};

}  // namespace lrd::cuda
