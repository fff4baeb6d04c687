// R-sized algebra in double. Included only by the per-instruction-set sources.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "arena.h"
#include "simd.h"

namespace lrd {
namespace LRD_ISA_NAMESPACE {

// Four independent partial sums: a fixed order that still fills the pipelines.
static inline double dot(const double* a, const double* b, int64_t n) {
  typedef Tile<double>::Vector Vector;
  typedef Tile<double>::Unaligned Unaligned;
  constexpr int64_t kLanes = Tile<double>::kLanes;
  Vector acc[4] = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes)
    for (int64_t p = 0; p < 4; ++p)
      acc[p] += *reinterpret_cast<const Unaligned*>(a + i + p * kLanes) *
                *reinterpret_cast<const Unaligned*>(b + i + p * kLanes);
  const Vector total = (acc[0] + acc[1]) + (acc[2] + acc[3]);
  double sum = 0.0;
  for (int64_t lane = 0; lane < kLanes; ++lane) sum += total[lane];
  for (; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

// Columns of a block of the factorisation: one tile wide.
constexpr int64_t kPanel = Tile<double>::kColumns;

// out[m, c] = from[m, c] - sum over k < count of a[m, k] * b[k, c], one tile; `out` and `from` have rows of R.
template <int kRows>
static void subtract_tile(const double* from, const double* a, const double* b, int64_t ld_b, int64_t count, int64_t R,
                          int64_t columns, double* out) {
  Tile<double, kRows> tile;
  tile.product(a, R, 1, b, ld_b, count);
  for (int64_t m = 0; m < kRows; ++m) {
    double part[kPanel];
    tile.store(m, part);
    for (int64_t c = 0; c < columns; ++c) out[m * R + c] = from[m * R + c] - part[c];
  }
}

// The block of L on the diagonal. C = I + G is at least the identity, so every exact pivot is at least 1: a smaller one
// is rounding, and is put right. Returns whether all pivots are finite.
static bool factorise_diagonal(const double* gram, double* chol, int64_t first, int64_t last, int64_t R) {
  bool finite = true;
  for (int64_t i = first; i < last; ++i) {
    double* row = chol + i * R;
    for (int64_t j = first; j < i; ++j) row[j] = (gram[i * R + j] - dot(row, chol + j * R, j)) / chol[j * R + j];
    const double pivot = 1.0 + gram[i * R + i] - dot(row, row, i);
    finite = finite && pivot <= std::numeric_limits<double>::max() && pivot >= -std::numeric_limits<double>::max();
    row[i] = std::sqrt(pivot < 1.0 ? 1.0 : pivot);
  }
  return finite;
}

// Writes the lower part of L, by columns of blocks. `panel` has room for R rows of kPanel.
static bool factorise(const double* gram, double* chol, double* panel, int64_t R) {
  bool finite = true;
  for (int64_t first = 0; first < R; first += kPanel) {
    const int64_t last = first + kPanel < R ? first + kPanel : R;
    const int64_t columns = last - first;
    finite = factorise_diagonal(gram, chol, first, last, R) && finite;
    if (last == R) break;
    // The block's rows as columns, those of its own triangle without their diagonal.
    for (int64_t k = 0; k < last; ++k)
      for (int64_t c = 0; c < kPanel; ++c) panel[k * kPanel + c] = k < first + c ? chol[(first + c) * R + k] : 0.0;
    int64_t i = last;
    for (; i + kTileRows <= R; i += kTileRows)
      subtract_tile<kTileRows>(gram + i * R + first, chol + i * R, panel, kPanel, first, R, columns,
                               chol + i * R + first);
    for (; i < R; ++i)
      subtract_tile<1>(gram + i * R + first, chol + i * R, panel, kPanel, first, R, columns, chol + i * R + first);
    for (i = last; i < R; ++i) {  // the triangle of the block itself
      double* row = chol + i * R + first;
      double part[kPanel];
      for (int64_t c = 0; c < kPanel; ++c) part[c] = row[c];
      for (int64_t j = 0; j < kPanel; ++j) {
        const double x = row[j] = part[j] / chol[(first + j) * R + first + j];
        for (int64_t c = 0; c < kPanel; ++c) part[c] -= x * panel[(first + j) * kPanel + c];
      }
    }
  }
  return finite;
}

// The inverse of lower triangular L, upper part zeroed, a tile of rows at a time: the products with all finished rows,
// then those among its own. A tile may read on into the next row of `inverse`, never past its end.
static void invert_lower(const double* chol, double* inverse, int64_t R) {
  std::fill_n(inverse, R * R, 0.0);
  for (int64_t first = 0; first < R; first += kTileRows) {
    const int64_t last = first + kTileRows < R ? first + kTileRows : R;
    double* rows = inverse + first * R;
    for (int64_t c = 0; c < first; c += kPanel) {
      const int64_t columns = first - c < kPanel ? first - c : kPanel;
      const double *a = chol + first * R + c, *b = inverse + c * R + c;
      if (last - first == kTileRows && c + kPanel <= R)
        subtract_tile<kTileRows>(rows + c, a, b, R, first - c, R, columns, rows + c);
      else
        for (int64_t m = 0; m < last - first; ++m)
          for (int64_t k = 0; k < first - c; ++k)
            for (int64_t j = 0; j < columns; ++j) rows[m * R + c + j] -= a[m * R + k] * b[k * R + j];
    }
    for (int64_t i = first; i < last; ++i) {
      double* row = inverse + i * R;
      for (int64_t k = first; k < i; ++k)
        for (int64_t j = 0; j <= k; ++j) row[j] -= chol[i * R + k] * inverse[k * R + j];
      const double scale = 1.0 / chol[i * R + i];
      for (int64_t j = 0; j < i; ++j) row[j] *= scale;
      row[i] = scale;
    }
  }
}

// `gram_diag` [R] is G's diagonal.
static double growth_of(const double* inverse, const double* gram_diag, int64_t R) {
  double growth = 1.0;
  for (int64_t i = 0; i < R; ++i) {
    double sum = 0.0;
    for (int64_t j = 0; j <= i; ++j) sum += inverse[i * R + j] * inverse[i * R + j] * gram_diag[j];
    growth = sum > growth ? sum : growth;
  }
  return growth;
}

struct CholeskyScratch {
  double* gram_diag;  // [R]
  double* panel;      // [R, kPanel]

  template <class Memory>
  CholeskyScratch(Memory& memory, int64_t R) {
    memory.take(gram_diag, R);
    memory.take(panel, R * kPanel);
  }
};

static int64_t cholesky_scratch(int64_t R) { return bytes_of<CholeskyScratch>(R); }

// gram and chol_inv may be the same memory.
static double cholesky(const double* gram, double* chol, double* chol_inv, void* scratch, int64_t R) {
  Arena arena(scratch);
  const CholeskyScratch held(arena, R);
  double* gram_diag = held.gram_diag;
  for (int64_t j = 0; j < R; ++j) gram_diag[j] = gram[j * R + j];
  const bool finite = factorise(gram, chol, held.panel, R);
  for (int64_t i = 0; i < R; ++i) std::fill_n(chol + i * R + i + 1, R - i - 1, 0.0);
  invert_lower(chol, chol_inv, R);
  return finite ? growth_of(chol_inv, gram_diag, R) : std::numeric_limits<double>::infinity();
}

}  // namespace LRD_ISA_NAMESPACE
}  // namespace lrd
