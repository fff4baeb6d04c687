// Memory of large outputs. What malloc takes fresh from the system for each of them costs more in page faults than a
// kernel in arithmetic; so it is taken in huge pages, and kept for the next call.
#pragma once

#include <cstddef>

namespace lrd {

// Smaller outputs are malloc's.
constexpr size_t kLargeOutput = size_t(4) << 20;

struct Piece {
  void* data = nullptr;
  size_t bytes = 0;
};

// Page-aligned memory of at least that size, in huge pages where the system gives any; or none.
Piece take_memory(size_t bytes);

// Gives a piece back, unless it is none. A few are kept for later calls, but the system may have their pages whenever
// it is short.
void give_back_memory(Piece piece) noexcept;

// Gives all kept pieces to the system. Returns whether there were any.
bool release_kept_memory() noexcept;

// Asks for huge pages in memory that was allocated elsewhere and not yet written.
void advise_huge_pages(void* data, size_t bytes);

}  // namespace lrd
