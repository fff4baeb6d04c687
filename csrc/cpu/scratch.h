// A worker's private memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "errors.h"

namespace lrd {

class Scratch {
 public:
  explicit Scratch(int64_t bytes) {
    const size_t rounded = static_cast<size_t>((bytes + 63) / 64 * 64 + 64);
    data_ = std::aligned_alloc(64, rounded);
    if (!data_) throw_out_of_memory(rounded);
    if (poisoned()) std::memset(data_, 0xff, rounded);
  }
  ~Scratch() { std::free(data_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  // LRD_POISON_SCRATCH=1 fills scratch with NaN, so that a read of what was never written shows in the result.
  static bool poisoned() {
    static const bool yes = [] {
      const char* flag = std::getenv("LRD_POISON_SCRATCH");
      return flag && *flag && std::strcmp(flag, "0") != 0;
    }();
    return yes;
  }

  void* data_;
};

}  // namespace lrd
