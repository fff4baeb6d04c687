// Sums over rows in parallel. Chunks of rows are summed by whoever is free and committed in order, so that the result
// does not depend on the number of threads.
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

// Sums of chunks that wait for their turn to be committed: a ring of slots, of which unit u takes number u modulo their
// count. Nobody waits for an earlier chunk as long as there is a slot, and whoever finishes a chunk commits all whose
// turn it is.
template <class Commit>
class Ring {
 public:
  Ring(int64_t units, int64_t slots, const SumSizes& sizes, const Commit& commit)
      : units_(units),
        slots_(slots),
        sizes_(sizes),
        stride_((bytes_of<SumLayout>(sizes) + kApart - 1) / kApart * kApart),
        commit_(commit),
        memory_(slots * stride_),
        finished_(slots) {}

  static int64_t slots(int64_t units, int64_t workers, const SumSizes& sizes) {
    return std::max(workers, std::min({units, kSlotsPerWorker * workers, kBytes / bytes_of<SumLayout>(sizes)}));
  }

  // The sums of a unit, all zero. Units are handed out in order, so whoever holds the earliest open one never waits.
  GramSums take(int64_t unit) {
    while (committed_.load() + slots_ <= unit) std::this_thread::yield();
    const GramSums sums = sums_of(unit);
    std::fill_n(sums.sums, bytes_of<SumLayout>(sizes_) / static_cast<int64_t>(sizeof(double)), 0.0);
    return sums;
  }

  void finish(int64_t unit) {
    finished_[unit % slots_].store(unit + 1);
    while (!committing_.test_and_set()) {
      int64_t next = committed_.load();
      for (; is_finished(next); committed_.store(++next)) commit_(next, sums_of(next));
      committing_.clear();
      if (!is_finished(next)) return;  // else it was finished between the two, by one who found this one committing
    }
  }

 private:
  static constexpr int64_t kApart = 128;  // so that no two workers write to one line, or a pair of them
  static constexpr int64_t kSlotsPerWorker = 8, kBytes = int64_t(1) << 20;

  bool is_finished(int64_t unit) const { return unit < units_ && finished_[unit % slots_].load() == unit + 1; }
  GramSums sums_of(int64_t unit) const {
    Arena arena(memory_.template as<char>() + unit % slots_ * stride_);
    return SumLayout(arena, sizes_).sums;
  }

  const int64_t units_, slots_;
  const SumSizes sizes_;
  const int64_t stride_;
  const Commit& commit_;
  const Scratch memory_;
  std::vector<std::atomic<int64_t>> finished_;  // by slot, the unit that finished there plus one
  alignas(kApart) std::atomic<int64_t> committed_{0};
  alignas(kApart) std::atomic_flag committing_;
};

// Calls rows(scratch, item, begin, end, sums) for every chunk of rows of every given item, in parallel, each with sums
// that start at zero, and then commit(item, sums, first, last) in the order of the chunks.
template <class Rows, class Commit>
void sum_chunks(const std::vector<int64_t>& items, int64_t S, const Chunks& chunks, int64_t scratch_bytes,
                const SumSizes& sizes, const Rows& rows, const Commit& commit) {
  const int64_t count = static_cast<int64_t>(items.size()), units = count * chunks.count;
  if (units == 0) return;
  const auto add_rows = [&](void* scratch, int64_t unit, const GramSums& sums) {
    const int64_t begin = unit % chunks.count * chunks.step;
    rows(scratch, items[unit / chunks.count], begin, std::min(S, begin + chunks.rows), sums);
  };
  const auto commit_unit = [&](int64_t unit, const GramSums& sums) {
    const int64_t chunk = unit % chunks.count;
    commit(items[unit / chunks.count], sums, chunk == 0, chunk == chunks.count - 1);
  };
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t workers = units * std::min(chunks.rows, S) * sizes.cost < 32768 ? 1 : std::min<int64_t>(units, threads);

  // Of many items each is one worker's, chunk by chunk: nobody waits for anybody.
  constexpr int64_t kTurns = 8;
  if (workers == 1 || count >= kTurns * workers) {
    const int64_t step = workers == 1 ? units : std::max<int64_t>(1, count / (kTurns * workers)) * chunks.count;
    std::atomic<int64_t> next{0};
    const auto work = [&](int64_t, int64_t) {
      const Scratch scratch(scratch_bytes);
      const int64_t sum_bytes = bytes_of<SumLayout>(sizes);
      const Scratch memory(sum_bytes);
      Arena arena(memory.as<void>());
      const GramSums sums = SumLayout(arena, sizes).sums;
      for (int64_t first = next.fetch_add(step); first < units; first = next.fetch_add(step))
        for (int64_t unit = first; unit < std::min(first + step, units); ++unit) {
          std::fill_n(memory.as<double>(), sum_bytes / static_cast<int64_t>(sizeof(double)), 0.0);
          add_rows(scratch.as<void>(), unit, sums);
          commit_unit(unit, sums);
        }
    };
    if (workers == 1)
      work(0, 1);
    else
      in_parallel(workers, work);
    return;
  }

  using Units = Ring<decltype(commit_unit)>;
  Units ring(units, Units::slots(units, workers, sizes), sizes, commit_unit);
  std::atomic<int64_t> next{0};
  const auto work = [&](int64_t, int64_t) {
    const Scratch scratch(scratch_bytes);
    for (int64_t unit = next.fetch_add(1); unit < units; unit = next.fetch_add(1)) {
      add_rows(scratch.as<void>(), unit, ring.take(unit));
      ring.finish(unit);
    }
  };
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
