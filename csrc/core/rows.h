// Reading a block of rows into scratch: the diagonal, the differences, the factor. All bounds of the caller's memory
// are respected here; everything behind works on padded scratch. Included only by the per-instruction-set sources.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "convert.h"
#include "types.h"

namespace lrd {
namespace LRD_ISA_NAMESPACE {

// exp for vector code: x = k ln 2 + r, a Taylor polynomial in r, then 2^k by its bits. Below -708 it gives 0.
static inline double exp_branch_free(double x) {
  constexpr double kShift = 0x1.8p52;  // adding it rounds to an integer, left in the low bits
  const double clamped = x < -708.0 ? -708.0 : (x > 710.0 ? 710.0 : x);
  const double shifted = clamped * 0x1.71547652b82fep0 + kShift;
  const double k = shifted - kShift;
  const double r = (clamped - k * 0x1.62e42fee00000p-1) - k * 0x1.a39ef35793c76p-33;
  double p = 1.0 / 6227020800.0;
  p = p * r + 1.0 / 479001600.0;
  p = p * r + 1.0 / 39916800.0;
  p = p * r + 1.0 / 3628800.0;
  p = p * r + 1.0 / 362880.0;
  p = p * r + 1.0 / 40320.0;
  p = p * r + 1.0 / 5040.0;
  p = p * r + 1.0 / 720.0;
  p = p * r + 1.0 / 120.0;
  p = p * r + 1.0 / 24.0;
  p = p * r + 1.0 / 6.0;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  // 2^k in two halves, so that k = 1024 does not overflow before its time.
  const int64_t exponent = int64_t(bit_cast<uint64_t>(shifted) - bit_cast<uint64_t>(kShift));
  const int64_t half = exponent >> 1;
  const double scale_a = bit_cast<double>(uint64_t(half + 1023) << 52);
  const double scale_b = bit_cast<double>(uint64_t(exponent - half + 1023) << 52);
  const double result = p * scale_a * scale_b;
  return x < -708.0 ? 0.0 : (x > 709.782712893384 ? std::numeric_limits<double>::infinity() : result);
}

// A block's per-row quantities; capacity is at least the block's rows.
struct RowScratch {
  double* diag;    // D, 1 where masked
  double* weight;  // 1 / D, 0 where masked
};

static inline bool present(const Gaussian& g, int64_t row) {
  return !g.mask.data || static_cast<const uint8_t*>(g.mask.data)[row * g.mask.stride] != 0;
}

// D and 1/D of rows [begin, begin + n). Returns false when a D is not a positive finite number.
template <class T>
static bool read_diag(const Gaussian& g, int64_t begin, int64_t n, RowScratch rows) {
  const T* diag = static_cast<const T*>(g.diag.data);
  for (int64_t i = 0; i < n; ++i) rows.diag[i] = double(load(diag[(begin + i) * g.diag.stride]));
  if (g.exp_diag)
    for (int64_t i = 0; i < n; ++i) rows.diag[i] = g.eps + exp_branch_free(rows.diag[i]);
  if (g.mask.data)
    for (int64_t i = 0; i < n; ++i) rows.diag[i] = present(g, begin + i) ? rows.diag[i] : 1.0;
  int64_t bad = 0;
  for (int64_t i = 0; i < n; ++i) {
    const double d = rows.diag[i];
    bad += !(d > 0.0 && d <= std::numeric_limits<double>::max());
    rows.weight[i] = 1.0 / d;
  }
  if (g.mask.data)
    for (int64_t i = 0; i < n; ++i) rows.weight[i] = present(g, begin + i) ? rows.weight[i] : 0.0;
  return bad == 0;
}

// sum log of at most 1000 positive finite numbers with one call of log: exponents add, mantissas multiply.
static double sum_log(const double* x, int64_t n) {
  int64_t exponents = 0;
  double mantissas[8] = {1, 1, 1, 1, 1, 1, 1, 1};
  for (int64_t i = 0; i < n; ++i) {
    const bool subnormal = x[i] < std::numeric_limits<double>::min();
    const uint64_t bits = bit_cast<uint64_t>(subnormal ? x[i] * 0x1p54 : x[i]);
    exponents += int64_t(bits >> 52) - 1023 - (subnormal ? 54 : 0);
    mantissas[i & 7] *= bit_cast<double>((bits & 0x000fffffffffffffull) | 0x3ff0000000000000ull);
  }
  double product = 1.0;
  for (int lane = 0; lane < 8; ++lane) product *= mantissas[lane];
  return double(exponents) * 0x1.62e42fefa39efp-1 + std::log(product);
}

// r_n = value_n - loc_n of rows [begin, begin + count), 0 where masked.
template <class T>
static void read_diff(const Gaussian& g, int64_t n, int64_t begin, int64_t count, double* diff) {
  const T* value = static_cast<const T*>(g.value.data) + n * g.value_stride_n;
  for (int64_t i = 0; i < count; ++i) diff[i] = double(load(value[(begin + i) * g.value.stride]));
  if (g.loc.data) {
    const T* loc = static_cast<const T*>(g.loc.data) + n * g.loc_stride_n;
    for (int64_t i = 0; i < count; ++i) diff[i] -= double(load(loc[(begin + i) * g.loc.stride]));
  }
  if (g.mask.data)
    for (int64_t i = 0; i < count; ++i) diff[i] = present(g, begin + i) ? diff[i] : 0.0;
}

// Rows [begin, begin + n) of P into out [n, ld], each times scale[i] (or 1), zeros where masked.
template <class T, class A>
static void read_factor(const Gaussian& g, int64_t begin, int64_t n, const A* scale, A* out, int64_t ld) {
  const T* factor = static_cast<const T*>(g.factor) + begin * g.factor_stride_s;
  if (g.factor_stride_s == 1 && g.factor_stride_r != 1) {  // rank-major: columns are contiguous
    constexpr int64_t kTile = 8;
    int64_t i0 = 0;
    for (; i0 + kTile <= n; i0 += kTile) {
      for (int64_t j = 0; j < g.R; ++j) {
        const T* column = factor + i0 + j * g.factor_stride_r;
        for (int64_t i = 0; i < kTile; ++i) out[(i0 + i) * ld + j] = A(load(column[i]));
      }
    }
    for (; i0 < n; ++i0)
      for (int64_t j = 0; j < g.R; ++j) out[i0 * ld + j] = A(load(factor[i0 + j * g.factor_stride_r]));
  } else if (g.factor_stride_r == 1) {
    for (int64_t i = 0; i < n; ++i) {
      const T* row = factor + i * g.factor_stride_s;
      for (int64_t j = 0; j < g.R; ++j) out[i * ld + j] = A(load(row[j]));
    }
  } else {
    for (int64_t i = 0; i < n; ++i)
      for (int64_t j = 0; j < g.R; ++j)
        out[i * ld + j] = A(load(factor[i * g.factor_stride_s + j * g.factor_stride_r]));
  }
  if (scale)
    for (int64_t i = 0; i < n; ++i)
      for (int64_t j = 0; j < g.R; ++j) out[i * ld + j] *= scale[i];
  if (g.mask.data)
    for (int64_t i = 0; i < n; ++i)
      if (!present(g, begin + i))
        for (int64_t j = 0; j < g.R; ++j) out[i * ld + j] = A(0);
}

}  // namespace LRD_ISA_NAMESPACE
}  // namespace lrd
