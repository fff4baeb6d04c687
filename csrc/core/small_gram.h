// The forward sums of small ranks: G = P^T w P and u_n = P^T w r_n as sums along the rows, whose lanes stay apart until
// the end. Rows are loaded once, transposed in registers, and go into the first sums from there; where the sums do not
// all fit into the registers, the columns are kept in scratch for the others. Included only by the per-instruction-set
// sources.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "arena.h"
#include "kernels.h"
#include "quads.h"
#include "rows.h"
#include "small_rows.h"

namespace lrd {
namespace LRD_ISA_NAMESPACE {

// The first columns, whose triangle of sums is formed while rows are loaded; strips of three columns beside so many
// others are formed after.
#if defined(__AVX512F__)
constexpr int kTriangle = 6;  // 21 accumulators
constexpr int kStripColumns = 8;
#elif defined(__AVX2__)
constexpr int kTriangle = 4;
constexpr int kStripColumns = 4;
#else
constexpr int kTriangle = 3;
constexpr int kStripColumns = 3;
#endif
constexpr int kStripRows = 3;

// Up to this rank the sums with one value fit beside the triangle.
constexpr int kWholeRank = kTriangle - 1;

// One pass over a block: n rows, a multiple of the vectors' length.
template <class E, class A>
struct GramPass {
  const E* rows;
  int64_t stride;
  int64_t left;  // rows of the memory from there on
  int64_t n;
  const A *weight, *diff;  // [n]
  bool masked;             // rows of weight zero may hold anything
  A* columns;              // [R, ld], or null where they are not needed again
  int64_t ld;
  A* lanes;  // [R + N, R] vectors of sums
};

template <class E, class A, int R, bool kRowMajor>
static void gram_pass(const GramPass<E, A>& pass) {
  typedef RowVectors<E, A, R, kRowMajor> Rows;
  typedef Lanes<A, Tile<A>::kLanes> Whole;
  typedef typename Tile<A>::Vector Vector;
  constexpr int kLanes = Tile<A>::kLanes;
  constexpr int kTop = R < kTriangle ? R : kTriangle;
  constexpr bool kWithDiff = R <= kWholeRank;
  Vector sums[kTop * (kTop + 1) / 2], pulls[kWithDiff ? R : 1];
#pragma GCC unroll 8
  for (int a = 0; a < kTop; ++a)
#pragma GCC unroll 8
    for (int b = 0; b <= a; ++b) sums[a * (a + 1) / 2 + b] = Whole::load(pass.lanes + (a * R + b) * kLanes);
#pragma GCC unroll 8
  for (int b = 0; kWithDiff && b < R; ++b) pulls[b] = Whole::load(pass.lanes + (R * R + b) * kLanes);

  for (int64_t i = 0; i < pass.n; i += kLanes) {
    Rows::prefetch(pass.rows, pass.stride, i, pass.left);
    const E* from = pass.rows + i * (kRowMajor ? pass.stride : 1);
    const Vector weight = Whole::load(pass.weight + i);
    Vector x[R];
#pragma GCC unroll 4
    for (int c = 0; c < R; c += 4) {
      Rows::load(c, from, pass.stride, x);
      if (pass.masked) {
#pragma GCC unroll 4
        for (int k = c; k < c + 4; ++k)
          if (k < R) keep_weighted(weight, x[k]);
      }
      if (!kWithDiff || pass.columns) {
#pragma GCC unroll 4
        for (int k = c; k < c + 4; ++k)
          if (k < R) Whole::store(pass.columns + k * pass.ld + i, x[k]);
      }
    }
#pragma GCC unroll 8
    for (int a = 0; a < kTop; ++a) {
      const Vector weighted = weight * x[a];
#pragma GCC unroll 8
      for (int b = 0; b <= a; ++b) sums[a * (a + 1) / 2 + b] += weighted * x[b];
    }
    if constexpr (kWithDiff) {
      const Vector weighted = weight * Whole::load(pass.diff + i);
#pragma GCC unroll 8
      for (int b = 0; b < R; ++b) pulls[b] += weighted * x[b];
    }
  }
#pragma GCC unroll 8
  for (int a = 0; a < kTop; ++a)
#pragma GCC unroll 8
    for (int b = 0; b <= a; ++b) Whole::store(pass.lanes + (a * R + b) * kLanes, sums[a * (a + 1) / 2 + b]);
#pragma GCC unroll 8
  for (int b = 0; kWithDiff && b < R; ++b) Whole::store(pass.lanes + (R * R + b) * kLanes, pulls[b]);
}

// lanes[a, b] += weight * left_a * right_b for kRows columns a and kColumns columns b of n entries.
template <class A, int kRows, int kColumns>
static void add_strip(const A* left, const A* right, int64_t ld, const A* weight, int64_t n, A* lanes, int64_t R) {
  typedef Lanes<A, Tile<A>::kLanes> Whole;
  typedef typename Tile<A>::Vector Vector;
  constexpr int kLanes = Tile<A>::kLanes;
  Vector sums[kRows][kColumns];
#pragma GCC unroll 4
  for (int a = 0; a < kRows; ++a)
#pragma GCC unroll 8
    for (int b = 0; b < kColumns; ++b) sums[a][b] = Whole::load(lanes + (a * R + b) * kLanes);
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vector w = Whole::load(weight + i);
    Vector weighted[kRows];
#pragma GCC unroll 4
    for (int a = 0; a < kRows; ++a) weighted[a] = w * Whole::load(left + a * ld + i);
#pragma GCC unroll 8
    for (int b = 0; b < kColumns; ++b) {
      const Vector column = Whole::load(right + b * ld + i);
#pragma GCC unroll 4
      for (int a = 0; a < kRows; ++a) sums[a][b] += weighted[a] * column;
    }
  }
#pragma GCC unroll 4
  for (int a = 0; a < kRows; ++a)
#pragma GCC unroll 8
    for (int b = 0; b < kColumns; ++b) Whole::store(lanes + (a * R + b) * kLanes, sums[a][b]);
}

template <class A>
using StripKernel = void (*)(const A*, const A*, int64_t, const A*, int64_t, A*, int64_t);

template <class A, int kRows, int... kLess>
static StripKernel<A> strip_kernel(int64_t columns, std::integer_sequence<int, kLess...>) {
  static constexpr StripKernel<A> kernels[] = {add_strip<A, kRows, kLess + 1>...};
  return kernels[columns - 1];
}

// Sums of columns [first, last) with all columns of the factor up to themselves; columns from R on are differences.
template <class A>
static void add_strips(const A* x, int64_t ld, int64_t R, int64_t first, int64_t last, const A* weight, int64_t n,
                       A* lanes) {
  constexpr auto kWidths = std::make_integer_sequence<int, kStripColumns>();
  for (int64_t a = first; a < last; a += kStripRows) {
    const int64_t rows = std::min<int64_t>(kStripRows, last - a), columns = std::min(R, a + rows);
    const int64_t parts = (columns + kStripColumns - 1) / kStripColumns;
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t b = columns * part / parts, count = columns * (part + 1) / parts - b;
      const StripKernel<A> strip = rows == 3   ? strip_kernel<A, 3>(count, kWidths)
                                   : rows == 2 ? strip_kernel<A, 2>(count, kWidths)
                                               : strip_kernel<A, 1>(count, kWidths);
      strip(x + a * ld, x + b * ld, ld, weight, n, lanes + (a * R + b) * Tile<A>::kLanes, R);
    }
  }
}

template <class E, class A>
using GramKernel = void (*)(const GramPass<E, A>&);

template <class E, class A, bool kRowMajor, int... kLess>
static GramKernel<E, A> gram_kernel(int64_t R, std::integer_sequence<int, kLess...>) {
  static constexpr GramKernel<E, A> kernels[] = {gram_pass<E, A, kLess + 1, (kRowMajor && kLess > 0)>...};
  return kernels[R - 1];
}

template <class A>
struct SmallGramScratch {
  int64_t ld;  // the rows of a block
  RowScratch rows;
  double* diff;      // [ld]
  A* narrow_weight;  // [ld], not in double, where the weights serve as they are
  A* x;              // [R + max(N, 1), ld]: the columns and the differences
  A* lanes;          // [R + max(N, 1), R] vectors
  A* buffer;         // [R, ld] and kRowSlack: rows that cannot be loaded from where they lie
  A* rest;           // [kRestElements]

  template <class Memory>
  SmallGramScratch(Memory& memory, int64_t R, int64_t N) : ld(gram_block_rows(R, N, kComputeOf<A>)), rows(memory, ld) {
    const int64_t all = R + std::max<int64_t>(N, 1);
    memory.take(diff, ld);
    memory.take(narrow_weight, std::is_same_v<A, double> ? 0 : ld);
    memory.take(x, all * ld);
    memory.take(lanes, all * R * Tile<A>::kLanes);
    memory.take(buffer, R * ld + kRowSlack);
    memory.take(rest, kRestElements<A>);
  }
};

template <class T, class A>
static void gram_rows_small(const GaussianInputs& g, int64_t begin, int64_t end, void* scratch, GramSums out) {
  typedef Wide<T> E;
  static_assert(sizeof(E) <= sizeof(A), "buffers of A hold rows of E");
  constexpr int64_t kLanes = Tile<A>::kLanes;
  constexpr auto kRanks = std::make_integer_sequence<int, kSmallRank>();
  const int64_t R = g.factor.R, columns = R + g.N;
  Arena arena(scratch);
  const SmallGramScratch<A> held(arena, R, g.N);
  const int64_t ld = held.ld;
  const RowScratch rows = held.rows;
  double* diff = held.diff;
  A* weight = std::is_same_v<A, double> ? reinterpret_cast<A*>(rows.weight) : held.narrow_weight;
  A *x = held.x, *lanes = held.lanes, *differences = x + R * ld;
  std::fill_n(lanes, std::max(columns, R + 1) * R * kLanes, A(0));
  std::fill_n(differences, ld, A(0));  // where there is no value
  const bool keep = R > kWholeRank || g.N > 1;
  const GramKernel<E, A> kernel = R == 0                    ? nullptr
                                  : reads_by_rows(g.factor) ? gram_kernel<E, A, true>(R, kRanks)
                                                            : gram_kernel<E, A, false>(R, kRanks);

  for (int64_t i0 = begin; i0 < end; i0 += ld) {
    const int64_t n = std::min(ld, end - i0);
    const int64_t whole = (n + kLanes - 1) / kLanes * kLanes;
    *out.log_diag += read_diag<T, true>(g, i0, n, rows);
    if (!std::is_same_v<A, double>)
      for (int64_t i = 0; i < n; ++i) weight[i] = A(rows.weight[i]);
    for (int64_t i = n; i < whole; ++i) weight[i] = A(0);
    for (int64_t value = 0; value < g.N; ++value) {
      A* column = differences + value * ld;
      double* exact = std::is_same_v<A, double> ? reinterpret_cast<double*>(column) : diff;
      read_diff<T>(g, value, i0, n, exact);
      if (!std::is_same_v<A, double>)
        for (int64_t i = 0; i < n; ++i) column[i] = A(diff[i]);
      for (int64_t i = n; i < whole; ++i) column[i] = A(0);
      out.quad[value] += weighted_square(exact, rows.weight, n);
    }
    if (R == 0) continue;
    const RowBlock<E> block = row_block<T>(g.factor, i0, n, kLanes, reinterpret_cast<E*>(held.buffer), ld);
    const bool masked = g.mask.data != nullptr;
    kernel({block.data, block.stride, block.rows, block.whole, weight, differences, masked, keep ? x : nullptr, ld,
            lanes});
    if (const int64_t at = block.whole; at < n) {
      const RowBlock<E> rest = rest_of(block, R, n, kLanes, reinterpret_cast<E*>(held.rest));
      kernel({rest.data, rest.stride, 0, rest.whole, weight + at, differences + at, masked, keep ? x + at : nullptr, ld,
              lanes});
    }
    // The rows of G behind the triangle, and the values that have not gone with it.
    const int64_t first = R <= kTriangle ? R + (R <= kWholeRank ? 1 : 0) : kTriangle;
    add_strips<A>(x, ld, R, first, columns, weight, whole, lanes);
    if (kComputeOf<A> == Compute::f64 && i0 + ld < end) continue;
    for (int64_t a = 0; a < columns; ++a)  // float lanes are flushed with every block
      for (int64_t b = 0; b < std::min(a + 1, R); ++b) {
        A* from = lanes + (a * R + b) * kLanes;
        double sum = 0.0;
        for (int64_t lane = 0; lane < kLanes; ++lane) sum += double(from[lane]);
        std::fill_n(from, kLanes, A(0));
        out.sums[a * out.ld + b] += sum;
      }
  }
}

}  // namespace LRD_ISA_NAMESPACE
}  // namespace lrd
