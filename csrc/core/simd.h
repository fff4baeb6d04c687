// Native vectors of the instruction set being compiled, and the register-tiled product of the passes over high ranks.
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

}  // namespace LRD_ISA_NAMESPACE
}  // namespace lrd
