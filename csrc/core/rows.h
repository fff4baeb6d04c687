// Reading a block of rows into scratch: the diagonal, the differences, the factor. All bounds of the caller's memory
// are respected here; everything behind works on padded scratch. Included only by the per-instruction-set sources.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "arena.h"
#include "convert.h"
#include "kernels.h"
#include "policy.h"
#include "transpose.h"
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

// What elements are widened to before they are transposed.
template <class T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <class A>
constexpr Compute kComputeOf = sizeof(A) == sizeof(double) ? Compute::f64 : Compute::f32;

template <class T>
constexpr double kExpLimit = std::is_same_v<T, double>     ? kExpLimitFloat64
                             : std::is_same_v<T, float>    ? kExpLimitFloat32
                             : std::is_same_v<T, BFloat16> ? kExpLimitBFloat16
                                                           : kExpLimitFloat16;

// A block's per-row quantities; capacity is at least the block's rows.
struct RowScratch {
  double* diag;    // D, 1 where masked
  double* weight;  // 1 / D, 0 where masked

  template <class Memory>
  RowScratch(Memory& memory, int64_t rows) {
    memory.take(diag, rows);
    memory.take(weight, rows);
  }
};

static inline bool present(VectorView mask, int64_t row) {
  return !mask.data || static_cast<const uint8_t*>(mask.data)[row * mask.stride] != 0;
}

// Asks for the n entries after these n, as far as there are any: those of the next block, which is too short for the
// hardware to follow. `left` entries are there from `from` on.
template <class T>
static inline void prefetch_next(const T* from, int64_t n, int64_t left) {
  const int64_t end = 2 * n < left ? 2 * n : left;
  for (int64_t i = n; i < end; i += 64 / sizeof(T)) __builtin_prefetch(from + i);
}

// Entries [begin, begin + n) of a strided vector of S, in double.
template <class T>
static void read_vector(VectorView view, int64_t S, int64_t begin, int64_t n, double* out) {
  const T* from = static_cast<const T*>(view.data) + begin * view.stride;
  if (view.stride == 1) {
    prefetch_next(from, n, S - begin);
    for (int64_t i = 0; i < n; ++i) out[i] = double(load(from[i]));
  } else {
    for (int64_t i = 0; i < n; ++i) out[i] = double(load(from[i * view.stride]));
  }
}

// The product of at most 1000 positive finite numbers: exponents add, mantissas multiply.
struct Product {
  static constexpr int kWays = 16;  // independent products, so that they run as vectors
  int64_t exponents[kWays] = {};
  double mantissas[kWays];

  Product() {
    for (int way = 0; way < kWays; ++way) mantissas[way] = 1.0;
  }

  inline __attribute__((always_inline)) void take(const double* part) {
    for (int way = 0; way < kWays; ++way) {
      const bool subnormal = part[way] < std::numeric_limits<double>::min();
      const uint64_t bits = bit_cast<uint64_t>(subnormal ? part[way] * 0x1p54 : part[way]);
      exponents[way] += int64_t(bits >> 52) - (subnormal ? 1023 + 54 : 1023);
      mantissas[way] *= bit_cast<double>((bits & 0x000fffffffffffffull) | 0x3ff0000000000000ull);
    }
  }

  double log() const {
    int64_t exponent = 0;
    double product = 1.0;
    for (int way = 0; way < kWays; ++way) {
      exponent += exponents[way];
      product *= mantissas[way];
    }
    return double(exponent) * 0x1.62e42fefa39efp-1 + std::log(product);
  }
};

// w = 1 / d; returns sum log d where that is wanted, else 0. n is at most 1000.
template <bool kLog>
static double invert(const double* d, double* w, int64_t n) {
  if (!kLog) {
    for (int64_t i = 0; i < n; ++i) w[i] = 1.0 / d[i];
    return 0.0;
  }
  constexpr int kWays = Product::kWays;
  Product product;
  int64_t i = 0;
  for (; i + kWays <= n; i += kWays) product.take(d + i);
  double rest[kWays];
  for (int way = 0; way < kWays; ++way) rest[way] = i + way < n ? d[i + way] : 1.0;
  product.take(rest);
  for (i = 0; i < n; ++i) w[i] = 1.0 / d[i];
  return product.log();
}

// The same for numbers whose products of four stay within double.
template <bool kLog>
static double invert_by_fours(const double* d, double* w, int64_t n) {
  constexpr int kWays = Product::kWays;
  Product product;
  int64_t i = 0;
  for (; i + 4 * kWays <= n; i += 4 * kWays) {
    double all[kWays];
    for (int way = 0; way < kWays; ++way) {
      const double a = d[i + way], b = d[i + kWays + way], c = d[i + 2 * kWays + way], e = d[i + 3 * kWays + way];
      const double ab = a * b, ce = c * e;
      all[way] = ab * ce;
      const double inverse = 1.0 / all[way];
      const double inverse_ab = inverse * ce, inverse_ce = inverse * ab;
      w[i + way] = inverse_ab * b;
      w[i + kWays + way] = inverse_ab * a;
      w[i + 2 * kWays + way] = inverse_ce * e;
      w[i + 3 * kWays + way] = inverse_ce * c;
    }
    if (kLog) product.take(all);
  }
  return (kLog ? product.log() : 0.0) + (i < n ? invert<kLog>(d + i, w + i, n - i) : 0.0);
}

// D and 1/D of rows [begin, begin + n), and where it is wanted sum log D: NaN when a D is not a positive finite number.
template <class T, bool kLog>
static double read_diag(const GaussianInputs& g, int64_t begin, int64_t n, RowScratch rows) {
  read_vector<T>(g.diag, g.factor.S, begin, n, rows.diag);
  if (g.exp_diag) {
    constexpr double kLimit = kExpLimit<T>;  // above, finite numbers count as this one
    for (int64_t i = 0; i < n; ++i) {
      const double raw = rows.diag[i];
      const bool above = raw > kLimit && raw <= std::numeric_limits<double>::max();
      rows.diag[i] = g.eps + exp_branch_free(above ? kLimit : raw);
    }
  }
  if (g.mask.data)
    for (int64_t i = 0; i < n; ++i) rows.diag[i] = present(g.mask, begin + i) ? rows.diag[i] : 1.0;
  int64_t bad = 0;
  for (int64_t i = 0; kLog && i < n; ++i)
    bad += !(rows.diag[i] > 0.0 && rows.diag[i] <= std::numeric_limits<double>::max());
  // Four numbers within float's range may be multiplied in double: one division and one logarithm serve all four.
  const bool narrow = !std::is_same_v<T, double> && !g.exp_diag;
  const double log_diag =
      narrow ? invert_by_fours<kLog>(rows.diag, rows.weight, n) : invert<kLog>(rows.diag, rows.weight, n);
  if (g.mask.data)
    for (int64_t i = 0; i < n; ++i) rows.weight[i] = present(g.mask, begin + i) ? rows.weight[i] : 0.0;
  return bad == 0 ? log_diag : std::numeric_limits<double>::quiet_NaN();
}

// dD becomes d/d raw = dD exp(raw) where D comes from it. That is dD (D - eps) unless this cancels; a masked row has
// D = 1 and dD = 0.
template <class T>
static inline void scale_grad_diag(const GaussianInputs& g, RowScratch rows, int64_t begin, double* grad_diag,
                                   int64_t n) {
  constexpr double kCancels = 0x1p-20;
  for (int64_t i = 0; g.exp_diag && i < n; ++i) {
    double slope = rows.diag[i] - g.eps;
    if (slope < kCancels * rows.diag[i] && grad_diag[i] != 0.0)
      slope = std::exp(load(static_cast<const T*>(g.diag.data)[(begin + i) * g.diag.stride]));
    grad_diag[i] *= slope;
  }
}

// sum w_i r_i^2 in sixteen independent sums.
static double weighted_square(const double* r, const double* w, int64_t n) {
  constexpr int kWays = 16;
  double sums[kWays] = {};
  int64_t i = 0;
  for (; i + kWays <= n; i += kWays)
    for (int way = 0; way < kWays; ++way) sums[way] += r[i + way] * r[i + way] * w[i + way];
  for (; i < n; ++i) sums[0] += r[i] * r[i] * w[i];
  double total = 0.0;
  for (int way = 0; way < kWays; ++way) total += sums[way];
  return total;
}

// r_n = value_n - loc_n of rows [begin, begin + count), 0 where masked.
template <class T>
static void read_diff(const GaussianInputs& g, int64_t n, int64_t begin, int64_t count, double* diff) {
  const T* value = static_cast<const T*>(g.value.data) + n * g.value_stride_n;
  read_vector<T>({value, g.value.stride}, g.factor.S, begin, count, diff);
  if (g.loc.data) {
    const T* loc = static_cast<const T*>(g.loc.data) + n * g.loc_stride_n + begin * g.loc.stride;
    if (g.loc.stride == 1) {
      prefetch_next(loc, count, g.factor.S - begin);
      for (int64_t i = 0; i < count; ++i) diff[i] -= double(load(loc[i]));
    } else {
      for (int64_t i = 0; i < count; ++i) diff[i] -= double(load(loc[i * g.loc.stride]));
    }
  }
  if (g.mask.data)
    for (int64_t i = 0; i < count; ++i) diff[i] = present(g.mask, begin + i) ? diff[i] : 0.0;
}

// p . s of one contiguous row, in sixteen independent sums.
template <class T>
static inline double row_dot(const T* p, const double* s, int64_t R) {
  constexpr int kWays = 16;
  double sums[kWays] = {};
  int64_t j = 0;
  for (; j + kWays <= R; j += kWays)
    for (int way = 0; way < kWays; ++way) sums[way] += double(load(p[j + way])) * s[j + way];
  for (int way = 0; j < R; ++j, ++way) sums[way] += double(load(p[j])) * s[j];
  double total = 0.0;
  for (int way = 0; way < kWays; ++way) total += sums[way];
  return total;
}

// Rows [begin, begin + n) of P into out [n, ld], each times scale[i], zeros where masked. ld >= R + 8, and
// n <= kFlushRows, a multiple of 8; rows of `out` and `scale` up to the next multiple of 8 exist. With a shift
// [R], not null, shifts[i] = p_i . shift of every row that is there, in double.
template <class T, class A>
static void read_factor(const MatrixView& P, VectorView mask, int64_t begin, int64_t n, const A* scale, A* out,
                        int64_t ld, const double* shift, double* shifts) {
  const T* factor = static_cast<const T*>(P.data) + begin * P.stride_s;
  if (P.stride_s == 1 && P.stride_r != 1) {  // rank-major: columns are contiguous
    typedef Wide<T> E;
    typedef A Stored __attribute__((vector_size(8 * sizeof(A)), aligned(sizeof(A)), may_alias));
    for (int64_t i = 0; shift && i < n; ++i) shifts[i] = 0.0;
    // Eight columns at a time through a small stage: read across, columns a power of two apart would evict one another.
    E stage[8][kFlushRows];
    for (int64_t j0 = 0; j0 < P.R; j0 += 8) {
      for (int64_t j = 0; j < 8; ++j) {
        const T* column = factor + (j0 + j) * P.stride_r;
        if (j0 + j < P.R)
          for (int64_t i = 0; i < n; ++i) stage[j][i] = E(load(column[i]));
        else
          for (int64_t i = 0; i < n; ++i) stage[j][i] = E(0);
      }
      if (shift) {
        double s[8];
        for (int64_t j = 0; j < 8; ++j) s[j] = j0 + j < P.R ? shift[j0 + j] : 0.0;
        for (int64_t i = 0; i < n; ++i)
          for (int j = 0; j < 8; ++j) shifts[i] += double(stage[j][i]) * s[j];
      }
      for (int64_t i0 = 0; i0 < n; i0 += 8) {
        typename Octet<E>::Vector tile[8];
        for (int j = 0; j < 8; ++j) tile[j] = Octet<E>::load(&stage[j][i0]);
        Octet<E>::transpose(tile);
        for (int i = 0; i < 8; ++i)  // ld has room for the whole tile; rows past n are within the block
          *reinterpret_cast<Stored*>(out + (i0 + i) * ld + j0) =
              __builtin_convertvector(tile[i], Stored) * scale[i0 + i];
      }
    }
  } else if (P.stride_r == 1 && P.R == 8 && !shift) {  // of a joint covariance: a length worth knowing
    for (int64_t i = 0; i < n; ++i)
      for (int64_t j = 0; j < 8; ++j) out[i * ld + j] = A(load(factor[i * P.stride_s + j])) * scale[i];
  } else if (P.stride_r == 1) {
    for (int64_t i = 0; i < n; ++i) {
      const T* row = factor + i * P.stride_s;
      for (int64_t j = 0; j < P.R; ++j) out[i * ld + j] = A(load(row[j])) * scale[i];
      if (shift) shifts[i] = row_dot(row, shift, P.R);
    }
  } else {
    for (int64_t i = 0; i < n; ++i) {
      const T* row = factor + i * P.stride_s;
      double sum = 0.0;
      for (int64_t j = 0; j < P.R; ++j) {
        const T entry = row[j * P.stride_r];
        out[i * ld + j] = A(load(entry)) * scale[i];
        if (shift) sum += double(load(entry)) * shift[j];
      }
      if (shift) shifts[i] = sum;
    }
  }
  if (mask.data)  // what is masked may hold anything
    for (int64_t i = 0; i < n; ++i)
      if (!present(mask, begin + i)) {
        for (int64_t j = 0; j < P.R; ++j) out[i * ld + j] = A(0);
        if (shift) shifts[i] = 0.0;
      }
}

}  // namespace LRD_ISA_NAMESPACE
}  // namespace lrd
