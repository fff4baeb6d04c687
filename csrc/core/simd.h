// Native vectors of the instruction set being compiled, and the one register-tiled product all passes share.
// Included only by the per-instruction-set sources.
#pragma once

#include <cstdint>

#include "types.h"

namespace lrd {
namespace LRD_ISA_NAMESPACE {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
constexpr int kTileVectors = 1;  // 12 accumulators of 32 registers
constexpr int kTileRows = 12;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
constexpr int kTileVectors = 2;  // 12 accumulators of 16 registers
constexpr int kTileRows = 6;
#else
constexpr int kVectorBytes = 16;
constexpr int kTileVectors = 2;  // 8 accumulators of 16 registers
constexpr int kTileRows = 4;
#endif

template <class A>
struct Tile {
  typedef A Vector __attribute__((vector_size(kVectorBytes)));
  typedef A Unaligned __attribute__((vector_size(kVectorBytes), aligned(sizeof(A)), may_alias));
  static constexpr int kLanes = kVectorBytes / sizeof(A);
  static constexpr int kColumns = kLanes * kTileVectors;
  Vector acc[kTileRows][kTileVectors];

  // acc[m][c] = sum over k in [0, count) of a[m * a_row + k * a_step] * b[k * b_step + c]
  inline __attribute__((always_inline)) void product(const A* a, int64_t a_row, int64_t a_step, const A* b,
                                                     int64_t b_step, int64_t count) {
    for (int m = 0; m < kTileRows; ++m)
      for (int v = 0; v < kTileVectors; ++v) acc[m][v] = Vector{};
    for (int64_t k = 0; k < count; ++k, a += a_step, b += b_step) {
      Vector column[kTileVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kTileVectors; ++v) column[v] = *reinterpret_cast<const Unaligned*>(b + v * kLanes);
#pragma GCC unroll 16
      for (int m = 0; m < kTileRows; ++m) {
        const A row = a[m * a_row];
#pragma GCC unroll 4
        for (int v = 0; v < kTileVectors; ++v) acc[m][v] += row * column[v];
      }
    }
  }
};

}  // namespace LRD_ISA_NAMESPACE
}  // namespace lrd
