// Scratch and shared memory laid out once. A layout is a class whose constructor takes its arrays from a Memory and the
// sizes: a Counter yields the bytes that it needs, an Arena the addresses.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace lrd {

// Arrays follow one another without gaps: wider elements come first, or counts are such that the next ones are aligned.
class Counter {
 public:
  template <class T>
  LRD_HOST_DEVICE void take(T*& array, int64_t count) {
    array = nullptr;
    bytes_ += count * static_cast<int64_t>(sizeof(T));
  }
  LRD_HOST_DEVICE int64_t bytes() const { return bytes_; }

 private:
  int64_t bytes_ = 0;
};

class Arena {
 public:
  LRD_HOST_DEVICE explicit Arena(void* memory) : next_(static_cast<char*>(memory)) {}
  template <class T>
  LRD_HOST_DEVICE void take(T*& array, int64_t count) {
    array = reinterpret_cast<T*>(next_);
    next_ += count * static_cast<int64_t>(sizeof(T));
  }

 private:
  char* next_;
};

template <class Layout, class... Sizes>
LRD_HOST_DEVICE int64_t bytes_of(Sizes... sizes) {
  Counter counter;
  Layout(counter, sizes...);
  return counter.bytes();
}

}  // namespace lrd
