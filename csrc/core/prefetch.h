// Included only by the per-instruction-set sources.
#pragma once

#include <cstdint>

#include "types.h"

namespace lrd {
namespace LRD_ISA_NAMESPACE {

// Asks for rows [begin, end) of P, a share at each step, while the rows before them are being worked on. A block is
// read in one go, so that without this memory would idle between two of them.
template <class T>
class NextBlock {
 public:
  NextBlock(const MatrixView& P, int64_t begin, int64_t end, int64_t steps) : steps_(steps) {
    const bool by_rows = P.stride_r == 1;
    if (begin >= end || (!by_rows && P.stride_s != 1)) return;
    from_ = static_cast<const T*>(P.data) + begin * P.stride_s;
    stride_ = by_rows ? P.stride_s : P.stride_r;
    length_ = by_rows ? P.R : end - begin;
    runs_ = by_rows ? end - begin : P.R;
  }

  inline __attribute__((always_inline)) void step() {
    ++step_;
    for (; done_ * steps_ < step_ * runs_; ++done_, next_ += stride_)
      for (int64_t i = 0; i < length_; i += kLine) __builtin_prefetch(from_ + next_ + i, 0, 2);
  }

 private:
  static constexpr int64_t kLine = 64 / sizeof(T);
  const T* from_ = nullptr;
  int64_t next_ = 0;  // where the next contiguous run begins: a row, or what the block has of a column
  int64_t stride_ = 0, length_ = 0, runs_ = 0, done_ = 0, step_ = 0, steps_;
};

}  // namespace LRD_ISA_NAMESPACE
}  // namespace lrd
