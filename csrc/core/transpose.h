// Blocks of eight rows and eight columns, transposed in registers. Included only by the per-instruction-set sources.
#pragma once

#include <cstdint>

namespace lrd {
namespace LRD_ISA_NAMESPACE {

template <class E>
struct Octet {
  typedef E Vector __attribute__((vector_size(8 * sizeof(E))));
  typedef E Unaligned __attribute__((vector_size(8 * sizeof(E)), aligned(sizeof(E)), may_alias));

  static inline __attribute__((always_inline)) Vector load(const E* p) {
    return *reinterpret_cast<const Unaligned*>(p);
  }
  static inline __attribute__((always_inline)) void store(E* p, Vector v) { *reinterpret_cast<Unaligned*>(p) = v; }

  // v[i][j] becomes v[j][i]: pairs, then pairs of pairs, then halves.
  static inline __attribute__((always_inline)) void transpose(Vector v[8]) {
    Vector t[8], s[8];
    for (int i = 0; i < 8; i += 2) {
      t[i] = __builtin_shufflevector(v[i], v[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
      t[i + 1] = __builtin_shufflevector(v[i], v[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
    for (int i = 0; i < 8; i += 4)
      for (int k = 0; k < 2; ++k) {
        s[i + 2 * k] = __builtin_shufflevector(t[i + k], t[i + k + 2], 0, 1, 8, 9, 4, 5, 12, 13);
        s[i + 2 * k + 1] = __builtin_shufflevector(t[i + k], t[i + k + 2], 2, 3, 10, 11, 6, 7, 14, 15);
      }
    for (int i = 0; i < 4; ++i) {
      v[i] = __builtin_shufflevector(s[i], s[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
      v[i + 4] = __builtin_shufflevector(s[i], s[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
  }
};

}  // namespace LRD_ISA_NAMESPACE
}  // namespace lrd
