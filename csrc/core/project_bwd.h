// The gradients of a projection with variance folding. With the pull of a row, grad_factor - 2 grad_diag projected, one
// pass sums X^T pull, the gradient for the basis; another writes the gradient for the rows X themselves. Everything is
// in double: what folding leaves is a small difference of rows. Included only by the per-instruction-set sources.
#pragma once

#include <cstdint>

#include "arena.h"
#include "columns.h"
#include "gram.h"
#include "kernels.h"
#include "prefetch.h"
#include "rows.h"
#include "simd.h"
#include "stack.h"

namespace lrd {
namespace LRD_ISA_NAMESPACE {

struct ProjectBasisScratch {
  int64_t block;        // rows
  int64_t ld, ld_y;     // columns of the stack and of the pull, and of what is projected; both as read_factor wants
  double *mean, *ones;  // [block]; the mean, then grad_diag
  double *x, *y;        // [block, ld], [block, ld_y]

  template <class Memory>
  ProjectBasisScratch(Memory& memory, int64_t columns, int64_t K)
      : block(joint_block_rows(columns + 2 * K, Compute::f64)),
        ld(whole_tiles<double>(columns) + K + kMaxTileRows),
        ld_y(K + kMaxTileRows) {
    memory.take(mean, block);
    memory.take(ones, block);
    memory.take(x, block * ld);
    memory.take(y, block * ld_y);
  }
};

static int64_t project_basis_bwd_scratch(int64_t columns, int64_t K) {
  return bytes_of<ProjectBasisScratch>(columns, K);
}

// Adds X^T pull of rows [begin, end) to the sums: row k is that of column k of the pull.
template <class T>
static void project_basis_bwd_rows(const Stack& s, const Pull& pull, int64_t begin, int64_t end, void* scratch,
                                   GramSums out) {
  constexpr int64_t kColumns = Tile<double>::kColumns, kLanes = Tile<double>::kLanes;
  const int64_t columns = s.columns(), K = pull.factor.R;
  Arena arena(scratch);
  const ProjectBasisScratch held(arena, columns, K);
  const int64_t block = held.block, ld = held.ld, ld_y = held.ld_y;
  double *x = held.x, *y = held.y, *grad_diag = held.mean;
  for (int64_t i0 = begin; i0 < end; i0 += block) {
    const int64_t n = end - i0 < block ? end - i0 : block;
    read_stack_rows<T, double>(s, i0, n, held.ones, held.mean, x, ld);
    for (int64_t i = 0; i < (n + 7) / 8 * 8; ++i) held.ones[i] = 1.0;
    read_factor<T, double>(pull.factor, {}, i0, n, held.ones, x + columns, ld, nullptr, nullptr);
    if (pull.diag.data) {
      read_factor<T, double>(pull.projected, {}, i0, n, held.ones, y, ld_y, nullptr, nullptr);
      read_vector<T>(pull.diag, s.S, i0, n, grad_diag);
      for (int64_t i = 0; i < n; ++i)
        for (int64_t k = 0; k < K; ++k) x[i * ld + columns + k] -= 2.0 * grad_diag[i] * y[i * ld_y + k];
    }
    const int64_t next = i0 + n, last = next + block < end ? next + block : end;
    const int64_t tiles = (K + kTileRows - 1) / kTileRows * whole_tiles<double>(columns) / kColumns;
    NextBlock<T> vectors(stack_vectors(s), next, last, tiles);
    int64_t tile = 0, t = 0;
    for (int64_t k0 = 0; k0 < K; k0 += kTileRows) {
      const int64_t rows = K - k0 < kTileRows ? K - k0 : kTileRows;
      for (int64_t j0 = 0; j0 < columns; j0 += kColumns) {
        const double *a = x + columns + k0, *b = x + j0;
        double* sums = out.sums + k0 * out.ld + j0;
        if (columns - j0 <= kLanes)  // half a tile does
          add_tile<double, kTileRows, 1>(a, b, ld, n, rows, sums, out.ld);
        else
          add_tile<double, kTileRows, kTileVectors>(a, b, ld, n, rows, sums, out.ld);
        vectors.step();
        for (++tile; t * tiles < tile * s.T; ++t) NextBlock<T>(stack_block<T>(s, t), next, last, 1).step();
      }
    }
  }
}

struct ProjectBackwardScratch {
  int64_t ld;           // beyond the rows of a block
  double *mean, *diag;  // [ld]
  double* x;            // [columns, ld]; becomes its gradient
  double* z;            // [2 K, ld]: the pull and what the Gram matrix adds to it, then the projected rows

  template <class Memory>
  ProjectBackwardScratch(Memory& memory, int64_t columns, int64_t K)
      : ld(apart<double>(project_bwd_block_rows(columns, K))) {
    memory.take(mean, ld);
    memory.take(diag, ld);
    memory.take(x, columns * ld);
    memory.take(z, 2 * K * ld);
  }
};

static int64_t project_fold_bwd_scratch(int64_t columns, int64_t K) {
  return bytes_of<ProjectBackwardScratch>(columns, K);
}

// out [rows, ld] += a [rows, count] x [count, ld] for n columns; a is zero-padded to whole tiles of rows.
static void add_full_product(const double* a, int64_t count, int64_t rows, const double* x, int64_t ld, int64_t n,
                             double* out) {
  Tile<double> tile;
  for (int64_t r0 = 0; r0 < rows; r0 += kTileRows) {
    const int64_t here = rows - r0 < kTileRows ? rows - r0 : kTileRows;
    for (int64_t i0 = 0; i0 < n; i0 += tile.kColumns) {
      tile.product(a + r0 * count, count, 1, x + i0, ld, count);
      for (int64_t m = 0; m < here; ++m) {
        double* to = out + (r0 + m) * ld + i0;
        tile.add(m, to);
        tile.store(m, to);
      }
    }
  }
}

template <class T>
static void project_fold_bwd_rows(const Stack& s, const Pull& pull, const StackGrads& to, int64_t begin, int64_t end,
                                  void* scratch) {
  const int64_t columns = s.columns(), split = s.T * s.R, K = pull.factor.R, n = end - begin;
  Arena arena(scratch);
  const ProjectBackwardScratch held(arena, columns, K);
  const int64_t ld = held.ld;
  double *diag = held.diag, *x = held.x, *z = held.z, *y = z + K * ld;
  read_stack_columns<T, double>(s, begin, n, held.mean, x, ld);
  read_columns<T, double>(pull.factor, {}, begin, n, z, ld);
  read_columns<T, double>(pull.projected, {}, begin, n, y, ld);
  for (int64_t i = 0; i < n; ++i) diag[i] = 0.0;
  if (pull.diag.data) {
    read_vector<T>(pull.diag, s.S, begin, n, diag);
    for (int64_t i = 0; i < n; ++i) diag[i] *= 2.0;
    for (int64_t k = 0; k < K; ++k)
      for (int64_t i = 0; i < n; ++i) z[k * ld + i] -= diag[i] * y[k * ld + i];
  }
  add_full_product(to.turn, columns, K, x, ld, n, z);

  // Of the factors, the vectors, or all of them.
  const int64_t first = to.factors ? 0 : split, last = to.vectors ? columns : split;
  for (int64_t j = first; j < last; ++j) {
    const double scale = j < split ? s.factor_scale : s.vector_scale, square = scale * scale;
    for (int64_t i = 0; i < n; ++i) x[j * ld + i] *= square * diag[i];
  }
  add_full_product(to.back + first * 2 * K, 2 * K, last - first, z, ld, n, x + first * ld);

  for (int64_t t = 0; to.factors && t < s.T; ++t)
    write_columns<T, double>(x + t * s.R * ld, ld, s.R, n,
                             static_cast<T*>(to.factors) + t * to.factor_stride_t + begin * to.factor_stride_s,
                             to.factor_stride_s, to.factor_stride_r);
  if (!to.vectors) return;
  double *vectors = x + split * ld, *mean = held.mean;
  if (s.centre) {  // the mean of the vectors moves with each of them
    for (int64_t i = 0; i < n; ++i) mean[i] = 0.0;
    for (int64_t v = 0; v < s.V; ++v)
      for (int64_t i = 0; i < n; ++i) mean[i] += vectors[v * ld + i];
    for (int64_t v = 0; v < s.V; ++v)
      for (int64_t i = 0; i < n; ++i) vectors[v * ld + i] -= mean[i] / double(s.V);
  }
  write_columns<T, double>(vectors, ld, s.V, n, static_cast<T*>(to.vectors) + begin, 1, to.vector_stride_v);
}

}  // namespace LRD_ISA_NAMESPACE
}  // namespace lrd
