// Projection with variance folding: the rows of a stack in another basis of fewer columns, and what a row loses by it
// added to its diagonal entry. One read of the stack, one write of the result. Included only by the per-instruction-set
// sources.
#pragma once

#include <cstdint>
#include <type_traits>

#include "arena.h"
#include "columns.h"
#include "kernels.h"
#include "rows.h"
#include "simd.h"
#include "stack.h"

namespace lrd {
namespace LRD_ISA_NAMESPACE {

// out [K, ld] = b [K, R] x [R, ld] for n columns; b is zero-padded to whole tiles of rows. Columns up to the next whole
// tile exist in scratch.
template <class A>
static void full_product(const A* b, int64_t ld_b, int64_t K, const A* x, int64_t R, int64_t ld, int64_t n, A* out) {
  Tile<A> tile;
  for (int64_t c0 = 0; c0 < K; c0 += kTileRows) {
    const int64_t rows = K - c0 < kTileRows ? K - c0 : kTileRows;
    for (int64_t i0 = 0; i0 < n; i0 += tile.kColumns) {
      tile.product(b + c0 * ld_b, ld_b, 1, x + i0, ld, R);
      for (int64_t m = 0; m < rows; ++m) tile.store(m, out + (c0 + m) * ld + i0);
    }
  }
}

// squares[i] += scale * sum over the columns of x[j, i]^2, in double.
template <class A>
static void add_squares(const A* x, int64_t columns, int64_t ld, int64_t n, double scale, double* squares) {
  for (int64_t j = 0; j < columns; ++j)
    for (int64_t i = 0; i < n; ++i) squares[i] += scale * double(x[j * ld + i]) * double(x[j * ld + i]);
}

template <class A>
struct ProjectScratch {
  int64_t ld;           // beyond the rows of a block
  double *diag, *lost;  // [ld]
  A* x;                 // [columns, ld]
  A* y;                 // [K, ld]

  template <class Memory>
  ProjectScratch(Memory& memory, int64_t columns, int64_t K) : ld(apart<A>(project_block_rows(columns, K))) {
    memory.take(diag, ld);
    memory.take(lost, ld);
    memory.take(x, columns * ld);
    memory.take(y, K * ld);
  }
};

template <class A>
static int64_t project_scratch(int64_t columns, int64_t K) {
  return bytes_of<ProjectScratch<A>>(columns, K);
}

template <class T, class A>
static void project_fold_rows(const Stack& s, const Projection& to, int64_t begin, int64_t end, void* scratch) {
  const int64_t columns = s.columns(), n = end - begin;
  Arena arena(scratch);
  const ProjectScratch<A> held(arena, columns, to.K);
  const int64_t ld = held.ld;
  double *diag = held.diag, *lost = held.lost;
  A *x = held.x, *y = held.y;
  read_stack_columns<T, A>(s, begin, n, lost, x, ld);
  full_product(static_cast<const A*>(to.basis), to.ld, to.K, x, columns, ld, n, y);
  if (sizeof(T) < sizeof(A))  // what is folded is what the stored numbers leave
    for (int64_t j = 0; j < to.K; ++j)
      for (int64_t i = 0; i < n; ++i) {
        T narrow;
        store(narrow, double(y[j * ld + i]));
        y[j * ld + i] = A(load(narrow));
      }
  T* factor = static_cast<T*>(to.factor) + begin * to.factor_stride_s;
  write_columns<T, A>(y, ld, to.K, n, factor, to.factor_stride_s, to.factor_stride_r);

  read_vector<T>(to.diag, s.S, begin, n, diag);
  if (to.fold) {
    for (int64_t i = 0; i < n; ++i) lost[i] = 0.0;
    add_squares(x, s.T * s.R, ld, n, s.factor_scale * s.factor_scale, lost);
    add_squares(x + s.T * s.R * ld, s.V, ld, n, s.vector_scale * s.vector_scale, lost);
    add_squares(y, to.K, ld, n, -1.0, lost);
    // never less than nothing: what rounding added is not taken from the diagonal
    for (int64_t i = 0; i < n; ++i) diag[i] += lost[i] < 0.0 ? 0.0 : lost[i];
  }
  T* out = static_cast<T*>(to.folded) + begin;
  for (int64_t i = 0; i < n; ++i) store(out[i], diag[i]);
}

}  // namespace LRD_ISA_NAMESPACE
}  // namespace lrd
