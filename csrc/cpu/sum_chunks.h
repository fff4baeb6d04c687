// Sums over rows in parallel. Chunks of rows are summed by whoever is free and committed in order, so that the result
// does not depend on the number of threads, while each worker holds one set of sums only.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "../core/arena.h"
#include "../core/kernels.h"
#include "errors.h"
#include "scratch.h"

namespace lrd {

// Rows [k * step, k * step + rows) for all k < count. They depend on the problem alone, never on the threads.
struct Chunks {
  int64_t count, step, rows;
};

inline Chunks all_rows(int64_t S) {
  const int64_t rows = std::max<int64_t>(2048, (S + 255) / 256);
  return {std::max<int64_t>(1, (S + rows - 1) / rows), rows, rows};
}

// Room for `rows` rows of `ld` sums, N squares and one logarithm; and what one row of the input costs.
struct SumSizes {
  int64_t rows, ld, N, cost;
};

// A worker's sums.
struct SumLayout {
  GramSums sums;

  template <class Memory>
  SumLayout(Memory& memory, const SumSizes& sizes) {
    sums.ld = sizes.ld;
    memory.take(sums.sums, sizes.rows * sizes.ld);
    memory.take(sums.quad, sizes.N);
    memory.take(sums.log_diag, 1);
  }
};

// Calls rows(scratch, item, begin, end, sums) for every chunk of rows of every given item, in parallel, each with sums
// that start at zero, and then commit(item, sums, first, last) in the order of the chunks.
template <class Rows, class Commit>
void sum_chunks(const std::vector<int64_t>& items, int64_t S, const Chunks& chunks, int64_t scratch_bytes,
                const SumSizes& sizes, const Rows& rows, const Commit& commit) {
  const int64_t units = static_cast<int64_t>(items.size()) * chunks.count;
  if (units == 0) return;
  const int64_t sum_bytes = bytes_of<SumLayout>(sizes);

  std::atomic<int64_t> next{0};
  std::vector<std::atomic<int64_t>> turn(items.size());  // how many chunks of each item are committed
  const auto work = [&](int64_t, int64_t) {
    Scratch scratch(scratch_bytes);
    Scratch memory(sum_bytes);
    Arena arena(memory.as<void>());
    const GramSums sums = SumLayout(arena, sizes).sums;
    for (int64_t unit = next.fetch_add(1); unit < units; unit = next.fetch_add(1)) {
      const int64_t position = unit / chunks.count;
      const int64_t chunk = unit % chunks.count;
      const int64_t begin = chunk * chunks.step;
      std::fill_n(memory.as<double>(), sum_bytes / static_cast<int64_t>(sizeof(double)), 0.0);
      rows(scratch.as<void>(), items[position], begin, std::min(S, begin + chunks.rows), sums);
      // Units are handed out in order, so whoever holds the earliest open chunk never waits.
      while (turn[position].load(std::memory_order_acquire) != chunk) std::this_thread::yield();
      commit(items[position], sums, chunk == 0, chunk == chunks.count - 1);
      turn[position].store(chunk + 1, std::memory_order_release);
    }
  };
  const int64_t workers = std::min<int64_t>(units, torch::stable::get_num_threads());
  if (workers == 1 || units * std::min(chunks.rows, S) * sizes.cost < 32768)
    work(0, 1);
  else
    in_parallel(workers, work);
}

// One chunk's sums to the total.
inline void add(double* to, const double* from, int64_t count, bool first) {
  if (first)
    std::copy(from, from + count, to);
  else
    for (int64_t i = 0; i < count; ++i) to[i] += from[i];
}

// The lower triangles of B matrices [R, R] to the upper ones.
inline void mirror(double* gram, int64_t B, int64_t R) {
  for (int64_t b = 0; b < B; ++b)
    for (int64_t j = 0; j < R; ++j)
      for (int64_t k = 0; k < j; ++k) gram[(b * R + k) * R + j] = gram[(b * R + j) * R + k];
}

}  // namespace lrd
