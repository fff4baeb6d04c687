// The Gram matrix of a joint covariance's columns, read where the samples lie. Included only by the
// per-instruction-set sources.
#pragma once

#include <cstdint>

#include "gram.h"
#include "kernels.h"
#include "stack.h"

namespace lrd {
namespace LRD_ISA_NAMESPACE {

// Scratch: x [rows, ld] in A, then the means [rows] in double and scales [rows] in A.
template <class T, class A>
static void joint_gram_rows(const Stack& s, int64_t begin, int64_t end, void* scratch, GramSums out) {
  constexpr Compute compute = sizeof(A) == sizeof(double) ? Compute::f64 : Compute::f32;
  const int64_t columns = s.columns(), block = joint_block_rows(columns, compute);
  const int64_t ld = out.ld + kMaxTileRows;
  A* x = static_cast<A*>(scratch);
  double* mean = reinterpret_cast<double*>(x + block * ld);
  A* ones = reinterpret_cast<A*>(mean + block);
  const int64_t tiles = triangle_tiles<A>(columns);

  for (int64_t i0 = begin; i0 < end; i0 += block) {
    const int64_t n = end - i0 < block ? end - i0 : block;
    read_stack_rows<T, A>(s, i0, n, ones, mean, x, ld);
    const int64_t next = i0 + n, last = next + block < end ? next + block : end;
    int64_t tile = 0, t = 0;
    NextBlock<T> ahead(stack_vectors(s), next, last, tiles);
    add_products<A, kTileRows>(x, ld, n, 0, columns, columns, out, [&] {
      ahead.step();
      for (++tile; t * tiles < tile * s.T; ++t) NextBlock<T>(stack_block<T>(s, t), next, last, 1).step();
    });
  }
}

}  // namespace LRD_ISA_NAMESPACE
}  // namespace lrd
