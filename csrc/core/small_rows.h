// Where the kernels for small ranks find the rows of a block, and where the backward pass leaves them. Included only by
// the per-instruction-set sources.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kernels.h"
#include "quads.h"
#include "rows.h"

namespace lrd {
namespace LRD_ISA_NAMESPACE {

// Room behind a buffer of rows, for what RowVectors touches there.
constexpr int64_t kRowSlack = 4;

// One column is rank-major whatever its strides.
static inline bool reads_by_rows(const MatrixView& P) { return P.R > 1 && (P.stride_r == 1 || P.stride_s != 1); }

// A block of rows, E by E, in one of the two layouts: entry (i, j) is at i * stride + j if `by_rows`, else i + j *
// stride.
template <class E>
struct RowBlock {
  const E* data;
  int64_t stride;
  bool by_rows;
  int64_t whole;  // so many rows, whole vectors of them, may be loaded from there
  int64_t rows;   // of the memory from `data` on, for a prefetch

  const E* at(int64_t i) const { return data + i * (by_rows ? stride : 1); }
  int64_t step() const { return by_rows ? 1 : stride; }  // from one column to the next
};

// Rows [begin, begin + n) of P copied to `out`, widened.
template <class T>
static void copy_rows(const MatrixView& P, int64_t begin, int64_t n, bool by_rows, Wide<T>* out, int64_t stride) {
  typedef Wide<T> E;
  const T* from = static_cast<const T*>(P.data) + begin * P.stride_s;
  if (by_rows && P.stride_r == 1 && P.stride_s == P.R && stride == P.R) {
    for (int64_t k = 0; k < n * P.R; ++k) out[k] = E(load(from[k]));
  } else if (by_rows) {
    for (int64_t i = 0; i < n; ++i)
      for (int64_t j = 0; j < P.R; ++j) out[i * stride + j] = E(load(from[i * P.stride_s + j * P.stride_r]));
  } else if (P.stride_s == 1) {
    for (int64_t j = 0; j < P.R; ++j) {
      prefetch_next(from + j * P.stride_r, n, P.S - begin);
      for (int64_t i = 0; i < n; ++i) out[j * stride + i] = E(load(from[j * P.stride_r + i]));
    }
  } else {
    for (int64_t j = 0; j < P.R; ++j)
      for (int64_t i = 0; i < n; ++i) out[j * stride + i] = E(load(from[j * P.stride_r + i * P.stride_s]));
  }
}

// Whether lines of so many columns evict one another from the first-level cache before they are used up: a vector takes
// a part of each, and columns a power of two apart share a set of, as a rule, eight lines.
static inline bool columns_collide(int64_t R, int64_t stride, int64_t vector_bytes, int64_t element) {
  constexpr int64_t kLine = 64, kSets = 2048;
  return vector_bytes < kLine && R * (kLine / vector_bytes) > 16 && stride * element % kSets == 0;
}

// Rows [begin, begin + n) of P, where they lie if they can be loaded from there, else in `buffer`, of ld rows, ld a
// multiple of every vector's length, and kRowSlack.
template <class T>
static RowBlock<Wide<T>> row_block(const MatrixView& P, int64_t begin, int64_t n, int64_t lanes, Wide<T>* buffer,
                                   int64_t ld) {
  const bool by_rows = reads_by_rows(P);
  if constexpr (std::is_same_v<T, Wide<T>>) {
    const bool collide = !by_rows && columns_collide(P.R, P.stride_r, lanes * sizeof(T), sizeof(T));
    if (by_rows ? P.stride_r == 1 && P.stride_s >= P.R : P.stride_s == 1 && !collide) {
      int64_t whole = n / lanes * lanes;
      if (by_rows && P.R < 4 && begin + whole == P.S && whole > 0) whole -= lanes;  // four entries are touched
      return {static_cast<const T*>(P.data) + begin * P.stride_s, by_rows ? P.stride_s : P.stride_r, by_rows, whole,
              P.S - begin};
    }
  }
  const int64_t stride = by_rows ? P.R : ld;
  copy_rows<T>(P, begin, n, by_rows, buffer, stride);
  return {buffer, stride, by_rows, n / lanes * lanes, 0};
}

// The rows of a block behind its whole vectors, at most two vectors, copied to `buffer`, with zeros behind them.
template <class E>
static RowBlock<E> rest_of(const RowBlock<E>& block, int64_t R, int64_t n, int64_t lanes, E* buffer) {
  const int64_t count = n - block.whole, padded = (count + lanes - 1) / lanes * lanes;
  std::fill_n(buffer, padded * R + kRowSlack, E(0));
  const int64_t stride = block.by_rows ? R : padded;
  const E* from = block.at(block.whole);
  for (int64_t i = 0; i < count; ++i)
    for (int64_t j = 0; j < R; ++j)
      buffer[block.by_rows ? i * stride + j : j * stride + i] =
          from[i * (block.by_rows ? block.stride : 1) + j * block.step()];
  return {buffer, stride, block.by_rows, padded, 0};
}

// Elements of such a buffer.
template <class A>
constexpr int64_t kRestElements = 2 * Tile<A>::kLanes * kSmallRank + kRowSlack;

// Sets the rows of weight zero, which are masked and may hold anything, to zero.
template <class Vector>
LRD_INLINE void keep_weighted(Vector weight, Vector& x) {
  x = weight != 0 ? x : Vector{};
}

// n entries from a buffer to memory, past the caches if `streamed`: what is written so is not read before.
template <class T>
static void copy_out(const T* from, T* to, int64_t n, [[maybe_unused]] bool streamed) {
  int64_t i = 0;
#if defined(__SSE2__)
  if (streamed) {
    constexpr int64_t kLine = 64 / sizeof(T);
    const int64_t misaligned = int64_t(reinterpret_cast<uintptr_t>(to) % 64 / sizeof(T));
    const int64_t head = std::min(n, (kLine - misaligned) % kLine);
    for (; i < head; ++i) to[i] = from[i];
    for (; i + kLine <= n; i += kLine) {
      const char* line = reinterpret_cast<const char*>(from + i);
      char* out = reinterpret_cast<char*>(to + i);
#if defined(__AVX512F__)
      _mm512_stream_si512(reinterpret_cast<__m512i*>(out), _mm512_loadu_si512(line));
#else
      for (int part = 0; part < 4; ++part)
        _mm_stream_si128(reinterpret_cast<__m128i*>(out) + part,
                         _mm_loadu_si128(reinterpret_cast<const __m128i*>(line) + part));
#endif
    }
  }
#endif
  for (; i < n; ++i) to[i] = from[i];
}

// Before others read what was streamed.
static inline void end_streaming() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace LRD_ISA_NAMESPACE
}  // namespace lrd
