// Reading a block of rows of a stack. Included only by the per-instruction-set sources.
#pragma once

#include <cstdint>

#include "columns.h"
#include "rows.h"
#include "types.h"

namespace lrd {
namespace LRD_ISA_NAMESPACE {

// One block of a stack, and its vectors as the columns of one.
template <class T>
static MatrixView stack_block(const Stack& s, int64_t t) {
  return {static_cast<const T*>(s.factors) + t * s.factor_stride_t, s.S, s.R, s.factor_stride_s, s.factor_stride_r};
}

static inline MatrixView stack_vectors(const Stack& s) {
  return {s.vectors, s.S, s.V, s.vector_stride_s, s.vector_stride_v};
}

// Rows [begin, begin + n) of all columns as out [n, ld], scaled and centred; room as for read_factor, and `ones` and
// `mean` of as many entries as a block has rows.
template <class T, class A>
static void read_stack_rows(const Stack& s, int64_t begin, int64_t n, A* ones, double* mean, A* out, int64_t ld) {
  for (int64_t i = 0; i < (n + 7) / 8 * 8; ++i) ones[i] = A(s.factor_scale);
  for (int64_t t = 0; t < s.T; ++t)
    read_factor<T, A>(stack_block<T>(s, t), {}, begin, n, ones, out + t * s.R, ld, nullptr, nullptr);
  if (s.V == 0) return;
  A* vectors = out + s.T * s.R;
  for (int64_t i = 0; i < (n + 7) / 8 * 8; ++i) ones[i] = s.centre ? A(1) : A(s.vector_scale);
  read_factor<T, A>(stack_vectors(s), {}, begin, n, ones, vectors, ld, nullptr, nullptr);
  if (!s.centre) return;
  for (int64_t i = 0; i < n; ++i) {
    A* row = vectors + i * ld;
    mean[i] = 0.0;
    for (int64_t v = 0; v < s.V; ++v) mean[i] += double(row[v]);
    mean[i] /= double(s.V);
    for (int64_t v = 0; v < s.V; ++v) row[v] = A((double(row[v]) - mean[i]) * s.vector_scale);
  }
}

// The same as columns out [columns, ld], centred and not scaled.
template <class T, class A>
static void read_stack_columns(const Stack& s, int64_t begin, int64_t n, double* mean, A* out, int64_t ld) {
  for (int64_t t = 0; t < s.T; ++t) read_columns<T, A>(stack_block<T>(s, t), {}, begin, n, out + t * s.R * ld, ld);
  if (s.V == 0) return;
  A* vectors = out + s.T * s.R * ld;
  read_columns<T, A>(stack_vectors(s), {}, begin, n, vectors, ld);
  if (!s.centre) return;
  for (int64_t i = 0; i < n; ++i) mean[i] = 0.0;
  for (int64_t v = 0; v < s.V; ++v)
    for (int64_t i = 0; i < n; ++i) mean[i] += double(vectors[v * ld + i]);
  for (int64_t i = 0; i < n; ++i) mean[i] /= double(s.V);
  for (int64_t v = 0; v < s.V; ++v)
    for (int64_t i = 0; i < n; ++i) vectors[v * ld + i] = A(double(vectors[v * ld + i]) - mean[i]);
}

}  // namespace LRD_ISA_NAMESPACE
}  // namespace lrd
