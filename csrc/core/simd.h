// Native vectors of the instruction set being compiled, and the one register-tiled product all passes share.
// Included only by the per-instruction-set sources.
#pragma once

#include <cstdint>

#include "kernels.h"
#include "types.h"

namespace lrd {
namespace LRD_ISA_NAMESPACE {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
constexpr int kTileVectors = 2;  // 16 accumulators of 32 registers
constexpr int kTileRows = 8;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
constexpr int kTileVectors = 2;  // 12 accumulators of 16 registers
constexpr int kTileRows = 6;
#else
constexpr int kVectorBytes = 16;
constexpr int kTileVectors = 2;  // 8 accumulators of 16 registers
constexpr int kTileRows = 4;
#endif

static_assert(kTileRows <= kMaxTileRows, "scratch is padded by kMaxTileRows");

// kRows x (kVectors whole vectors) of accumulators.
template <class A, int kRows = kTileRows, int kVectors = kTileVectors>
struct Tile {
  typedef A Vector __attribute__((vector_size(kVectorBytes)));
  typedef A Unaligned __attribute__((vector_size(kVectorBytes), aligned(sizeof(A)), may_alias));
  static constexpr int kLanes = kVectorBytes / sizeof(A);
  static constexpr int kColumns = kLanes * kVectors;
  Vector acc[kRows][kVectors];

  inline __attribute__((always_inline)) void store(int64_t m, A* out) const {
    for (int v = 0; v < kVectors; ++v) *reinterpret_cast<Unaligned*>(out + v * kLanes) = acc[m][v];
  }

  inline __attribute__((always_inline)) void add(int64_t m, const A* from) {
    for (int v = 0; v < kVectors; ++v) acc[m][v] += *reinterpret_cast<const Unaligned*>(from + v * kLanes);
  }

  // acc[m][c] = sum over k in [0, count) of a[m * a_row + k * a_step] * b[k * b_step + c]
  inline __attribute__((always_inline)) void product(const A* a, int64_t a_row, int64_t a_step, const A* b,
                                                     int64_t b_step, int64_t count) {
    for (int m = 0; m < kRows; ++m)
      for (int v = 0; v < kVectors; ++v) acc[m][v] = Vector{};
    for (int64_t k = 0; k < count; ++k, a += a_step, b += b_step) {
      Vector column[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) column[v] = *reinterpret_cast<const Unaligned*>(b + v * kLanes);
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) {
        const A row = a[m * a_row];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) acc[m][v] += row * column[v];
      }
    }
  }
};

// A number of columns rounded up to whole tiles.
template <class A>
static int64_t whole_tiles(int64_t columns) {
  constexpr int64_t kColumns = Tile<A>::kColumns;
  return (columns + kColumns - 1) / kColumns * kColumns;
}

// Sums along contiguous rows: acc[a][b] += sum_i w_i x_a[i] x_b[i] for kDotRows columns a and kDotColumns columns b.
#if defined(__AVX512F__)
constexpr int kDotRows = 4;
#elif defined(__AVX2__)
constexpr int kDotRows = 3;
#else
constexpr int kDotRows = 2;
#endif
constexpr int kDotColumns = 4;

// On the diagonal only b <= a is wanted.
template <class A, int kRows, bool kDiagonal = false>
static inline void add_dots(const A* xa, const A* xb, int64_t ld, const A* w, int64_t n, A* sums, int64_t sums_ld) {
  typedef typename Tile<A>::Vector Vector;
  typedef typename Tile<A>::Unaligned Unaligned;
  constexpr int kLanes = Tile<A>::kLanes;
  Vector acc[kRows][kDotColumns];
  for (int a = 0; a < kRows; ++a)
    for (int b = 0; b < kDotColumns; ++b)
      acc[a][b] = *reinterpret_cast<const Unaligned*>(sums + (a * sums_ld + b) * kLanes);
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vector weight = *reinterpret_cast<const Unaligned*>(w + i);
    Vector weighted[kRows];
#pragma GCC unroll 4
    for (int a = 0; a < kRows; ++a) weighted[a] = weight * *reinterpret_cast<const Unaligned*>(xa + a * ld + i);
#pragma GCC unroll 4
    for (int b = 0; b < kDotColumns; ++b) {
      const Vector column = *reinterpret_cast<const Unaligned*>(xb + b * ld + i);
#pragma GCC unroll 4
      for (int a = 0; a < kRows; ++a)
        if (!kDiagonal || b <= a) acc[a][b] += weighted[a] * column;
    }
  }
  for (int a = 0; a < kRows; ++a)
    for (int b = 0; b < kDotColumns; ++b) *reinterpret_cast<Unaligned*>(sums + (a * sums_ld + b) * kLanes) = acc[a][b];
}

}  // namespace LRD_ISA_NAMESPACE
}  // namespace lrd
