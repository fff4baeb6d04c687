// Errors that callers recognise, also where it is torch's part of a call that fails.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <stdexcept>

namespace lrd {

// Throws what torch's own allocator would: callers that try again with less look for its words.
[[noreturn]] void throw_out_of_memory(size_t bytes);

// Throws an exception of torch's headers again. Where it says only which call into torch failed, that is replaced by
// the reason: memory that ran out, as a rule.
[[noreturn]] void rethrow_with_reason(const std::runtime_error& error);

// TORCH_BOX with the errors above.
template <auto function>
void boxed(StableIValue* stack, uint64_t num_args, uint64_t num_outputs) {
  try {
    TORCH_BOX(function)(stack, num_args, num_outputs);
  } catch (const std::runtime_error& error) {
    rethrow_with_reason(error);
  }
}

// work(begin, end) for parts of [0, end) in torch's threads. What a worker throws is thrown here as it is: torch would
// say no more than that its parallel_for failed.
template <class Work>
void in_parallel(int64_t end, const Work& work) {
  std::exception_ptr thrown;
  std::atomic_flag taken;
  torch::stable::parallel_for(0, end, 1, [&](int64_t first, int64_t last) {
    try {
      work(first, last);
    } catch (...) {
      if (!taken.test_and_set()) thrown = std::current_exception();
    }
  });
  if (thrown) std::rethrow_exception(thrown);
}

}  // namespace lrd
