#include "large_outputs.h"

#ifdef __linux__
#include <sys/mman.h>

#include <cstdint>
#include <mutex>
#include <vector>

namespace lrd {
namespace {

constexpr size_t kHugePage = size_t(2) << 20;
constexpr size_t kMostKept = 4;  // the gradients of a call: factor, diagonal, mean, and one to spare

struct Kept {
  std::mutex mutex;
  std::vector<Piece> pieces;  // oldest first
};

// Never destroyed: tensors may outlive the statics of this library.
Kept& kept() {
  static Kept& all = *new Kept;
  return all;
}

size_t round_up(size_t bytes) { return (bytes + kHugePage - 1) / kHugePage * kHugePage; }

// The smallest kept piece that fits and does not waste much.
Piece take_kept(std::vector<Piece>& pieces, size_t bytes) {
  auto best = pieces.end();
  for (auto piece = pieces.begin(); piece != pieces.end(); ++piece)
    if (piece->bytes >= bytes && piece->bytes - bytes <= bytes / 4 &&
        (best == pieces.end() || piece->bytes < best->bytes))
      best = piece;
  if (best == pieces.end()) return {};
  const Piece piece = *best;
  pieces.erase(best);
  return piece;
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
  if (const std::unique_lock lock(kept().mutex, std::try_to_lock); lock) piece = take_kept(kept().pieces, bytes);
  return piece.data ? piece : map_fresh(bytes);
}

void give_back_memory(Piece piece) {
  madvise(piece.data, piece.bytes, MADV_FREE);  // its pages stay in place until the system needs them
  if (const std::unique_lock lock(kept().mutex, std::try_to_lock); lock) {
    std::vector<Piece>& pieces = kept().pieces;
    pieces.push_back(piece);
    if (pieces.size() <= kMostKept) return;
    piece = pieces.front();
    pieces.erase(pieces.begin());
  }
  munmap(piece.data, piece.bytes);
}

void release_kept_memory() {
  std::vector<Piece> pieces;
  if (const std::unique_lock lock(kept().mutex, std::try_to_lock); lock) pieces.swap(kept().pieces);
  for (const Piece& piece : pieces) munmap(piece.data, piece.bytes);
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
void give_back_memory(Piece) {}
void release_kept_memory() {}
void advise_huge_pages(void*, size_t) {}

}  // namespace lrd
#endif
