// Forward pass: G = P^T w P, u = P^T w r, r^T w r and sum log D in one read of P.
// Included only by the per-instruction-set sources.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels.h"
#include "rows.h"
#include "simd.h"

namespace lrd {
namespace LRD_ISA_NAMESPACE {

// sums[j, k] += sum over n rows of x[i, j] * x[i, k] for j in [first, last), k < R, tiles above the diagonal skipped.
// x is [n, ld] with ld >= last + kTileRows and ld >= R rounded up to whole tiles.
template <class A>
static void add_products(const A* x, int64_t ld, int64_t n, int64_t first, int64_t last, int64_t R, GramSums out) {
  Tile<A> tile;
  for (int64_t j0 = first; j0 < last; j0 += kTileRows) {
    const int64_t rows = last - j0 < kTileRows ? last - j0 : kTileRows;
    const int64_t reach = j0 + kTileRows < R ? j0 + kTileRows : R;
    for (int64_t k0 = 0; k0 < reach; k0 += Tile<A>::kColumns) {
      tile.product(x + j0, 1, ld, x + k0, ld, n);
      for (int64_t m = 0; m < rows; ++m) {
        double* sums = out.sums + (j0 + m) * out.ld + k0;
        for (int64_t v = 0; v < kTileVectors; ++v)
          for (int64_t lane = 0; lane < Tile<A>::kLanes; ++lane)
            sums[v * Tile<A>::kLanes + lane] += double(tile.acc[m][v][lane]);
      }
    }
  }
}

// Scratch: x [rows, padded columns] in A, then diag, weight and diff [rows] in double and scale [rows] in A.
template <class T, class A>
static void gram_rows(const Gaussian& g, int64_t begin, int64_t end, void* scratch, GramSums out) {
  constexpr Compute compute = sizeof(A) == sizeof(double) ? Compute::f64 : Compute::f32;
  const int64_t block = gram_block_rows(g.R, compute);
  const int64_t ld = out.ld + kValueChunk + kMaxTileRows;
  A* x = static_cast<A*>(scratch);
  double* diag = reinterpret_cast<double*>(x + block * ld);
  RowScratch rows{diag, diag + block};
  double* diff = diag + 2 * block;
  A* scale = reinterpret_cast<A*>(diag + 3 * block);
  for (int64_t i = 0; i < block * ld; ++i) x[i] = A(0);

  for (int64_t i0 = begin; i0 < end; i0 += block) {
    const int64_t n = end - i0 < block ? end - i0 : block;
    *out.log_diag += read_diag<T>(g, i0, n, rows) ? sum_log(rows.diag, n) : std::numeric_limits<double>::quiet_NaN();
    for (int64_t i = 0; i < n; ++i) scale[i] = A(std::sqrt(rows.weight[i]));
    read_factor<T, A>(g, i0, n, scale, x, ld);

    // G goes with the first chunk of values; later chunks overwrite the columns behind the factor.
    int64_t first = 0;
    int64_t value = 0;
    do {
      const int64_t count = g.N - value < kValueChunk ? g.N - value : kValueChunk;
      for (int64_t c = 0; c < count; ++c) {
        read_diff<T>(g, value + c, i0, n, diff);
        double quad = 0.0;
        for (int64_t i = 0; i < n; ++i) {
          quad += diff[i] * diff[i] * rows.weight[i];
          x[i * ld + g.R + c] = A(diff[i]) * scale[i];
        }
        out.quad[value + c] += quad;
      }
      GramSums shifted = out;
      shifted.sums += value * out.ld;
      add_products<A>(x, ld, n, first, g.R + count, g.R, shifted);
      first = g.R;
      value += count;
    } while (value < g.N);
  }
}

}  // namespace LRD_ISA_NAMESPACE
}  // namespace lrd
