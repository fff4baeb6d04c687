// The arguments of the kernels, one plain struct each, passed by value. Strides count elements. Null: not given.
#pragma once

#include <cstdint>

#include "../core/policy.h"

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
  float narrow_eps[2], narrow_limit;  // the same as a pair of float32, and in float32
  const uint8_t* mask;                // [B, S]
  int64_t mask_b, mask_s;
  const void* value;  // [B, N, S]
  int64_t value_b, value_n, value_s;
  const void* loc;  // [B, N, S]
  int64_t loc_b, loc_n, loc_s;
  int64_t S, N;
};

// The sums of a run of rows, in one slot: the lower half of G by rows, u [N, K], quad [N], sum log D, and whether a D
// is not ordinary (see row_parts.cuh).
struct SlotLayout {
  int64_t u, quad, log_diag, odd, numbers;

  LRD_HOST_DEVICE SlotLayout(int64_t columns, int64_t N, bool with_gram = true)
      : u(with_gram ? columns * (columns + 1) / 2 : 0),
        quad(u + N * columns),
        log_diag(quad + N),
        odd(log_diag + 1),
        numbers(odd + 1) {}
};

struct GramArgs {
  Columns columns;
  Rows rows;
  const int32_t* again;  // [B]: only the items for which it is set
  double* slots;         // [B, splits, numbers of a SlotLayout]
  int32_t* tickets;      // [B, 2], set to 0 for the launches that follow; may be null
  int64_t B;
  bool slots_have_gram, want_gram;  // G has room in a slot, and is summed by this launch
  int64_t first_value;
  int values;  // of this launch
  int64_t splits, rows_per_split, pairs;
  bool vector = false;  // of the second pass: rows of a whole tile of columns can be read 16 bytes at a time
};

// Sums of the slots, in their order.
struct AddArgs {
  const int32_t* again;
  const double* slots;
  double *gram, *u, *quad, *log_diag;  // [B, K, K], [B, N, K], [B, N], [B]; gram and log_diag may be null
  int32_t* odd;                        // [B]; may be null
  int64_t B, N, columns, splits;
  bool slots_have_gram;
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

// What the sums were, and so what their certificate asks for.
struct JudgeArgs {
  const double *gram, *quad, *z, *maha;
  const double* summary;  // [B, 2]: growth, log det Sigma
  const int32_t* odd;     // [B]; may be null
  int32_t* again;         // [B]: an Again
  int64_t N, S;
  int R;
  double sum_error, quad_error, growth_limit;  // relative errors of G and u, of quad; the largest growth
  bool by_certificate;                         // otherwise numbers out of range alone ask for more
  bool by_residuals;                           // a value that cancels is done again by its residuals, not in float64
};

// What is done again of an item: nothing; everything, in float64; or M and z, from the residuals r - P z.
enum Again : int32_t { kNothing = 0, kInFloat64 = 1, kByResiduals = 2 };

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

// From the slots to the result.
struct FinishArgs {
  AddArgs add;
  CapacitanceArgs capacitance;
  JudgeArgs judge;
  SettleArgs settle;
  bool judges;
  int32_t* tickets;  // [B], 2 apart
};

// The second pass: the sums of the items that the first one did not serve, and what follows.
struct AgainArgs {
  GramArgs gram;  // in float64, or of the residuals
  FinishArgs finish;
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
  bool flag_uncertain;    // and also where the certificate or a leverage asks for float64
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
