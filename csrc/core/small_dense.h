// R-sized algebra in double. Included only by the per-instruction-set sources.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

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

// C = I + G is at least the identity, so every exact pivot is at least 1: a smaller one is rounding, and is put right.
static double cholesky(const double* gram, double* chol, double* chol_inv, int64_t R) {
  bool finite = true;
  for (int64_t i = 0; i < R; ++i) {
    double* row = chol + i * R;
    for (int64_t j = 0; j < i; ++j) row[j] = (gram[i * R + j] - dot(row, chol + j * R, j)) / chol[j * R + j];
    const double pivot = 1.0 + gram[i * R + i] - dot(row, row, i);
    finite = finite && pivot <= std::numeric_limits<double>::max() && pivot >= -std::numeric_limits<double>::max();
    row[i] = std::sqrt(pivot < 1.0 ? 1.0 : pivot);
    for (int64_t j = i + 1; j < R; ++j) row[j] = 0.0;
  }
  for (int64_t i = 0; i < R; ++i) {
    double* row = chol_inv + i * R;
    for (int64_t j = 0; j < R; ++j) row[j] = 0.0;
    for (int64_t k = 0; k < i; ++k) {
      const double factor = chol[i * R + k];
      for (int64_t j = 0; j <= k; ++j) row[j] -= factor * chol_inv[k * R + j];
    }
    const double scale = 1.0 / chol[i * R + i];
    for (int64_t j = 0; j < i; ++j) row[j] *= scale;
    row[i] = scale;
  }
  if (!finite) return std::numeric_limits<double>::infinity();
  double growth = 1.0;
  for (int64_t i = 0; i < R; ++i) {
    double sum = 0.0;
    for (int64_t j = 0; j <= i; ++j) sum += chol_inv[i * R + j] * chol_inv[i * R + j] * gram[j * R + j];
    growth = sum > growth ? sum : growth;
  }
  return growth;
}

}  // namespace LRD_ISA_NAMESPACE
}  // namespace lrd
