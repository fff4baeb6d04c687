// A second look at the differences, when r^T w r exceeds the Mahalanobis term by so much that their difference would
// cancel: with r replaced by r - P shift, shift near C^-1 u, nothing large is left. Included only by the
// per-instruction-set sources.
#pragma once

#include <cstdint>

#include "arena.h"
#include "columns.h"
#include "kernels.h"
#include "rows.h"
#include "small_dense.h"

namespace lrd {
namespace LRD_ISA_NAMESPACE {

struct ResidualScratch {
  int64_t ld;  // the rows of a block
  RowScratch rows;
  double *diff, *projected;  // [ld]
  double* x;                 // [R, ld]

  template <class Memory>
  ResidualScratch(Memory& memory, int64_t R) : ld(bwd_block_rows(R)), rows(memory, ld) {
    memory.take(diff, ld);
    memory.take(projected, ld);
    memory.take(x, R * ld);
  }
};

static int64_t residual_scratch(int64_t R) { return bytes_of<ResidualScratch>(R); }

// Row-major memory: each row is read once, as it lies, and is still in the first-level cache for its second use.
template <class T>
static void residual_of_rows(const GaussianInputs& g, const double* shift, int64_t begin, int64_t end,
                             const ResidualScratch& held, GramSums out) {
  const int64_t R = g.factor.R, block = held.ld;
  const RowScratch rows = held.rows;
  double* diff = held.diff;
  for (int64_t i0 = begin; i0 < end; i0 += block) {
    const int64_t n = end - i0 < block ? end - i0 : block;
    read_diag<T, false>(g, i0, n, rows);
    for (int64_t value = 0; value < g.N; ++value) {
      read_diff<T>(g, value, i0, n, diff);
      double* sums = out.sums + value * out.ld;
      for (int64_t i = 0; i < n; ++i) {
        const double w = rows.weight[i];
        if (w == 0.0) continue;  // masked: the row may hold anything
        const T* p = static_cast<const T*>(g.factor.data) + (i0 + i) * g.factor.stride_s;
        const double r = diff[i] - row_dot(p, shift + value * R, R);
        const double pull = w * r;
        out.quad[value] += pull * r;
        for (int64_t j = 0; j < R; ++j) sums[j] += pull * double(load(p[j]));
      }
    }
  }
}

// Any other memory, by columns.
template <class T>
static void residual_of_columns(const GaussianInputs& g, const double* shift, int64_t begin, int64_t end,
                                const ResidualScratch& held, GramSums out) {
  const int64_t R = g.factor.R, ld = held.ld;
  const RowScratch rows = held.rows;
  double *diff = held.diff, *projected = held.projected, *x = held.x;
  for (int64_t i0 = begin; i0 < end; i0 += ld) {
    const int64_t n = end - i0 < ld ? end - i0 : ld;
    read_diag<T, false>(g, i0, n, rows);
    read_columns<T, double>(g.factor, g.mask, i0, n, x, ld);
    for (int64_t value = 0; value < g.N; ++value) {
      read_diff<T>(g, value, i0, n, diff);
      for (int64_t i = 0; i < n; ++i) projected[i] = 0.0;
      add_projection(x, ld, shift + value * R, R, n, projected);
      for (int64_t i = 0; i < n; ++i) diff[i] -= projected[i];
      out.quad[value] += weighted_square(diff, rows.weight, n);
      for (int64_t i = 0; i < n; ++i) diff[i] *= rows.weight[i];
      for (int64_t j = 0; j < R; ++j) out.sums[value * out.ld + j] += dot(x + j * ld, diff, n);
    }
  }
}

template <class T>
static void residual_rows(const GaussianInputs& g, const double* shift, int64_t begin, int64_t end, void* scratch,
                          GramSums out) {
  Arena arena(scratch);
  const ResidualScratch held(arena, g.factor.R);
  if (g.factor.stride_r == 1)
    residual_of_rows<T>(g, shift, begin, end, held, out);
  else
    residual_of_columns<T>(g, shift, begin, end, held, out);
}

}  // namespace LRD_ISA_NAMESPACE
}  // namespace lrd
