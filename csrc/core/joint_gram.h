// The Gram matrix of a joint covariance's columns, read where the samples lie. Included only by the
// per-instruction-set sources.
#pragma once

#include <cstdint>

#include "arena.h"
#include "gram.h"
#include "kernels.h"
#include "stack.h"

namespace lrd {
namespace LRD_ISA_NAMESPACE {

template <class A>
struct JointGramScratch {
  int64_t block;  // rows
  int64_t ld;     // columns in whole tiles, and what the last tile of rows reads on
  double* mean;   // [block]
  A* ones;        // [block]
  A* x;           // [block, ld]

  template <class Memory>
  JointGramScratch(Memory& memory, int64_t columns)
      : block(joint_block_rows(columns, kComputeOf<A>)), ld(whole_tiles<A>(columns) + kMaxTileRows) {
    memory.take(mean, block);
    memory.take(ones, block);
    memory.take(x, block * ld);
  }
};

template <class A>
static int64_t joint_gram_scratch(int64_t columns) {
  return bytes_of<JointGramScratch<A>>(columns);
}

template <class T, class A>
static void joint_gram_rows(const Stack& s, int64_t begin, int64_t end, void* scratch, GramSums out) {
  const int64_t columns = s.columns();
  Arena arena(scratch);
  const JointGramScratch<A> held(arena, columns);
  const int64_t block = held.block, ld = held.ld;
  A* x = held.x;
  const int64_t tiles = triangle_tiles<A>(columns);

  for (int64_t i0 = begin; i0 < end; i0 += block) {
    const int64_t n = end - i0 < block ? end - i0 : block;
    read_stack_rows<T, A>(s, i0, n, held.ones, held.mean, x, ld);
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
