#include "errors.h"

#include <cstring>
#include <string>

#include "newer_torch.h"

namespace lrd {
namespace {

// The reason of the last failure in this thread, from torch 2.13 on.
const char* (*const get_reason)() = find_in_torch<const char*()>("torch_exception_get_what_without_backtrace");

constexpr const char* kOutOfMemory = "lrd: DefaultCPUAllocator: can't allocate memory: ";

}  // namespace

void throw_out_of_memory(size_t bytes) {
  throw std::runtime_error(kOutOfMemory + ("you tried to allocate " + std::to_string(bytes)) + " bytes");
}

void rethrow_with_reason(const std::runtime_error& error) {
  if (!std::strstr(error.what(), "API call failed")) throw;
  const std::string reason = get_reason ? get_reason() : "";
  // The inputs were checked, so that before torch 2.13 as well memory is what a call into torch can have failed for.
  if (reason.empty() || reason.find("alloc") != std::string::npos) {
    const std::string where = reason.empty() ? error.what() : reason;
    throw std::runtime_error(kOutOfMemory + where);
  }
  throw std::runtime_error("lrd: " + reason);
}

}  // namespace lrd
