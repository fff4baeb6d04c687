#include "large_outputs.h"

#ifdef __linux__
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <mutex>
#include <type_traits>

namespace lrd {
namespace {

constexpr size_t kHugePage = size_t(2) << 20;
constexpr size_t kMostKept = 4;  // the gradients of a call: factor, diagonal, mean, and one to spare

// Of a fixed size: deleters of tensors come here, where nothing may be allocated or thrown.
using Pieces = std::array<Piece, kMostKept>;  // oldest first; those without data are last

struct Kept {
  std::mutex mutex;
  Pieces pieces;
};

constinit Kept kept;
static_assert(std::is_trivially_destructible_v<Kept>, "tensors may outlive the statics of this library");

size_t round_up(size_t bytes) { return (bytes + kHugePage - 1) / kHugePage * kHugePage; }

// Takes a piece out, and leaves no gap.
Piece take_out(Pieces& pieces, Pieces::iterator which) {
  const Piece piece = *which;
  std::move(which + 1, pieces.end(), which);
  pieces.back() = {};
  return piece;
}

// The smallest kept piece that fits and does not waste much.
Piece take_kept(Pieces& pieces, size_t bytes) {
  auto best = pieces.end();
  for (auto piece = pieces.begin(); piece != pieces.end(); ++piece)
    if (piece->bytes >= bytes && piece->bytes - bytes <= bytes / 4 &&
        (best == pieces.end() || piece->bytes < best->bytes))
      best = piece;
  return best == pieces.end() ? Piece{} : take_out(pieces, best);
}

Piece map_fresh(size_t bytes) {
  void* mapped = mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return {};
  char* begin = static_cast<char*>(mapped);
  char* aligned = reinterpret_cast<char*>(round_up(reinterpret_cast<uintptr_t>(begin)));
  if (aligned > begin) munmap(begin, aligned - begin);
  munmap(aligned + bytes, kHugePage - (aligned - begin));
  madvise(aligned, bytes, MADV_HUGEPAGE);
  return {aligned, bytes};
}

}  // namespace

// The lock is only tried: a process forked while another thread held it must not wait for it forever.

Piece take_memory(size_t bytes) {
  bytes = round_up(bytes);
  Piece piece;
  if (const std::unique_lock lock(kept.mutex, std::try_to_lock); lock) piece = take_kept(kept.pieces, bytes);
  if (!piece.data) piece = map_fresh(bytes);
  return piece.data || !release_kept_memory() ? piece : map_fresh(bytes);
}

void give_back_memory(Piece piece) noexcept {
  if (!piece.data) return;
  madvise(piece.data, piece.bytes, MADV_FREE);  // its pages stay in place until the system needs them
  if (const std::unique_lock lock(kept.mutex, std::try_to_lock); lock) {
    const Piece oldest = kept.pieces.back().data ? take_out(kept.pieces, kept.pieces.begin()) : Piece{};
    *std::find_if(kept.pieces.begin(), kept.pieces.end(), [](const Piece& p) { return !p.data; }) = piece;
    piece = oldest;
  }
  if (piece.data) munmap(piece.data, piece.bytes);
}

bool release_kept_memory() noexcept {
  Pieces pieces;
  if (const std::unique_lock lock(kept.mutex, std::try_to_lock); lock) std::swap(pieces, kept.pieces);
  for (const Piece& piece : pieces)
    if (piece.data) munmap(piece.data, piece.bytes);
  return pieces.front().data != nullptr;
}

void advise_huge_pages(void* data, size_t bytes) {
  const uintptr_t begin = round_up(reinterpret_cast<uintptr_t>(data));
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / kHugePage * kHugePage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

}  // namespace lrd
#else
namespace lrd {

Piece take_memory(size_t) { return {}; }
void give_back_memory(Piece) noexcept {}
bool release_kept_memory() noexcept { return false; }
void advise_huge_pages(void*, size_t) {}

}  // namespace lrd
#endif
