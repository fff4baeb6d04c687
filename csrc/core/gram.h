// Forward pass: G = P^T w P, u = P^T w r, r^T w r and sum log D in one read of P.
// Included only by the per-instruction-set sources.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "arena.h"
#include "columns.h"
#include "kernels.h"
#include "prefetch.h"
#include "rows.h"
#include "simd.h"
#include "small_gram.h"

namespace lrd {
namespace LRD_ISA_NAMESPACE {

// sums[m, c] += sum over n rows of a[i, m] * b[i, c] for m < rows and a tile of columns c; both are [n, ld].
template <class A, int kRows, int kVectors>
static inline void add_tile(const A* a, const A* b, int64_t ld, int64_t n, int64_t rows, double* sums,
                            int64_t ld_sums) {
  Tile<A, kRows, kVectors> tile;
  tile.product(a, 1, ld, b, ld, n);
  for (int64_t m = 0; m < rows; ++m) {
    A part[tile.kColumns];
    tile.store(m, part);
    for (int64_t c = 0; c < tile.kColumns; ++c) sums[m * ld_sums + c] += double(part[c]);
  }
}

// sums[j, k] += sum over n rows of x[i, j] * x[i, k] for j in [first, last), k < R, tiles above the diagonal skipped.
// x is [n, ld] with ld >= last + kRows and ld >= R rounded up to whole tiles.
template <class A, int kRows, class Between>
static void add_products(const A* x, int64_t ld, int64_t n, int64_t first, int64_t last, int64_t R, GramSums out,
                         const Between& between) {
  constexpr int64_t kColumns = Tile<A, kRows, kTileVectors>::kColumns, kLanes = Tile<A>::kLanes;
  static_assert(kCachedColumns % kColumns == 0, "a panel is whole tiles");
  for (int64_t panel = 0; panel < R; panel += kCachedColumns) {
    const int64_t above = panel > first ? (panel - first) / kRows * kRows : 0;  // tiles that end before the panel
    for (int64_t j0 = first + above; j0 < last; j0 += kRows) {
      const int64_t rows = last - j0 < kRows ? last - j0 : kRows;
      const int64_t reach = j0 + rows < R ? j0 + rows : R;
      const int64_t end = reach < panel + kCachedColumns ? reach : panel + kCachedColumns;
      double* sums = out.sums + j0 * out.ld;
      for (int64_t k0 = panel; k0 < end; k0 += kColumns) {
        if (reach - k0 <= kLanes)  // half a tile does
          add_tile<A, kRows, 1>(x + j0, x + k0, ld, n, rows, sums + k0, out.ld);
        else
          add_tile<A, kRows, kTileVectors>(x + j0, x + k0, ld, n, rows, sums + k0, out.ld);
        between();
      }
    }
  }
}

// How many tiles add_products goes through for all columns.
template <class A>
static int64_t triangle_tiles(int64_t R) {
  constexpr int64_t kColumns = Tile<A>::kColumns;
  int64_t tiles = 0;
  for (int64_t j = kTileRows; j < R + kTileRows; j += kTileRows) tiles += ((j < R ? j : R) + kColumns - 1) / kColumns;
  return tiles;
}

template <class A>
struct LargeGramScratch {
  int64_t block;  // rows
  int64_t ld;     // columns of the factor in whole tiles, a chunk of values, and what the last tile of rows reads on
  RowScratch rows;
  double *diff, *shifts;  // [block]
  A* scale;               // [block]
  A* x;                   // [block, ld]

  template <class Memory>
  LargeGramScratch(Memory& memory, int64_t R, int64_t N)
      : block(gram_block_rows(R, N, kComputeOf<A>)),
        ld(whole_tiles<A>(R) + kValueChunk + kMaxTileRows),
        rows(memory, block) {
    memory.take(diff, block);
    memory.take(shifts, block);
    memory.take(scale, block);
    memory.take(x, block * ld);
  }
};

template <class T, class A>
static void gram_rows_large(const GaussianInputs& g, const double* shift, int64_t begin, int64_t end, void* scratch,
                            GramSums out) {
  const int64_t R = g.factor.R;
  Arena arena(scratch);
  const LargeGramScratch<A> held(arena, R, g.N);
  const int64_t block = held.block, ld = held.ld;
  const RowScratch rows = held.rows;
  double *diff = held.diff, *shifts = held.shifts;
  A *scale = held.scale, *x = held.x;
  const int64_t tiles = triangle_tiles<A>(R);

  for (int64_t i0 = begin; i0 < end; i0 += block) {
    const int64_t n = end - i0 < block ? end - i0 : block;
    *out.log_diag += read_diag<T, true>(g, i0, n, rows);
    for (int64_t i = 0; i < n; ++i) scale[i] = A(std::sqrt(rows.weight[i]));
    read_factor<T, A>(g.factor, g.mask, i0, n, scale, x, ld, shift, shifts);

    // G goes with the first chunk of values; later chunks overwrite the columns behind the factor.
    int64_t value = 0;
    do {
      const int64_t count = g.N - value < kValueChunk ? g.N - value : kValueChunk;
      for (int64_t c = 0; c < count; ++c) {
        read_diff<T>(g, value + c, i0, n, diff);
        for (int64_t i = 0; shift && i < n; ++i) diff[i] -= shifts[i];
        for (int64_t i = 0; i < n; ++i) x[i * ld + R + c] = A(diff[i]) * scale[i];
        out.quad[value + c] += weighted_square(diff, rows.weight, n);
      }
      GramSums shifted = out;
      shifted.sums += value * out.ld;
      if (value == 0 && out.want_gram) {
        const int64_t next = i0 + n, last = next + block < end ? next + block : end;
        NextBlock<T> ahead(g.factor, next, last, tiles);
        add_products<A, kTileRows>(x, ld, n, 0, R, R, out, [&] { ahead.step(); });
      }
      if (count < 4)
        add_products<A, 1>(x, ld, n, R, R + count, R, shifted, [] {});
      else
        add_products<A, kTileRows>(x, ld, n, R, R + count, R, shifted, [] {});
      value += count;
    } while (value < g.N);
  }
}

template <class A>
static int64_t gram_scratch(int64_t R, int64_t N) {
  return sums_along_rows(R, N) ? bytes_of<SmallGramScratch<A>>(R, N) : bytes_of<LargeGramScratch<A>>(R, N);
}

template <class T, class A>
static void gram_rows(const GaussianInputs& g, const double* shift, int64_t begin, int64_t end, void* scratch,
                      GramSums out) {
  if (sums_along_rows(g.factor.R, g.N))
    gram_rows_small<T, A>(g, begin, end, scratch, out);
  else
    gram_rows_large<T, A>(g, shift, begin, end, scratch, out);
}

}  // namespace LRD_ISA_NAMESPACE
}  // namespace lrd
