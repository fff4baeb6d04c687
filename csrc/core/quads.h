// Rows of a factor in registers: vectors along the rows, one for each column, loaded from row-major or rank-major
// memory and stored to it. Row-major memory is read and written four columns at a time, transposed on the way. Included
// only by the per-instruction-set sources.
#pragma once

#if defined(__SSE2__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12: its own _mm512_undefined_ps
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

#include <cstdint>
#include <type_traits>

#include "simd.h"

namespace lrd {
namespace LRD_ISA_NAMESPACE {

#define LRD_INLINE static inline __attribute__((always_inline))

// kLanes elements E: a whole vector of E, or as many floats as a vector has doubles.
template <class E, int kLanes>
struct Lanes {
  typedef E Vector __attribute__((vector_size(kLanes * sizeof(E))));
  typedef E Unaligned __attribute__((vector_size(kLanes * sizeof(E)), aligned(sizeof(E)), may_alias));

  LRD_INLINE Vector load(const E* from) { return *reinterpret_cast<const Unaligned*>(from); }
  LRD_INLINE void store(E* to, Vector v) { *reinterpret_cast<Unaligned*>(to) = v; }
};

typedef Tile<double>::Vector Doubles;
typedef Tile<float>::Vector Floats;
constexpr int kDoubles = Tile<double>::kLanes;
typedef Lanes<float, kDoubles>::Vector HalfFloats;

// Conversions between float and double, in one instruction where there is one: GCC splits its builtin in two.
#if defined(__AVX512F__)
LRD_INLINE Doubles to_doubles(HalfFloats v) { return reinterpret_cast<Doubles>(_mm512_cvtps_pd((__m256)v)); }
LRD_INLINE HalfFloats to_floats(Doubles v) { return reinterpret_cast<HalfFloats>(_mm512_cvtpd_ps((__m512d)v)); }
LRD_INLINE HalfFloats half(Floats v, int part) {
  return (HalfFloats)(part == 0 ? _mm512_castps512_ps256((__m512)v) : _mm512_extractf32x8_ps((__m512)v, 1));
}
LRD_INLINE Floats join(HalfFloats low, HalfFloats high) {
  return (Floats)_mm512_insertf32x8(_mm512_castps256_ps512((__m256)low), (__m256)high, 1);
}
#elif defined(__AVX2__)
LRD_INLINE Doubles to_doubles(HalfFloats v) { return (Doubles)_mm256_cvtps_pd((__m128)v); }
LRD_INLINE HalfFloats to_floats(Doubles v) { return (HalfFloats)_mm256_cvtpd_ps((__m256d)v); }
LRD_INLINE HalfFloats half(Floats v, int part) {
  return (HalfFloats)(part == 0 ? _mm256_castps256_ps128((__m256)v) : _mm256_extractf128_ps((__m256)v, 1));
}
LRD_INLINE Floats join(HalfFloats low, HalfFloats high) {
  return (Floats)_mm256_insertf128_ps(_mm256_castps128_ps256((__m128)low), (__m128)high, 1);
}
#else
LRD_INLINE Doubles to_doubles(HalfFloats v) { return __builtin_convertvector(v, Doubles); }
LRD_INLINE HalfFloats to_floats(Doubles v) { return __builtin_convertvector(v, HalfFloats); }
LRD_INLINE HalfFloats half(Floats v, int part) {
  return part == 0 ? __builtin_shufflevector(v, v, 0, 1) : __builtin_shufflevector(v, v, 2, 3);
}
LRD_INLINE Floats join(HalfFloats low, HalfFloats high) { return __builtin_shufflevector(low, high, 0, 1, 2, 3); }
#endif

// What is stored as E, computed in A.
template <class A>
LRD_INLINE typename Tile<A>::Vector widen(typename Tile<A>::Vector v) {
  return v;
}
template <class A>
LRD_INLINE std::enable_if_t<std::is_same_v<A, double>, Doubles> widen(HalfFloats v) {
  return to_doubles(v);
}
template <class E>
LRD_INLINE typename Tile<E>::Vector narrow(typename Tile<E>::Vector v) {
  return v;
}
template <class E>
LRD_INLINE std::enable_if_t<std::is_same_v<E, float>, HalfFloats> narrow(Doubles v) {
  return to_floats(v);
}

// A vector of A as kParts vectors of double.
template <class A>
constexpr int kParts = Tile<A>::kLanes / kDoubles;
LRD_INLINE Doubles part_of(Doubles v, int) { return v; }
LRD_INLINE Doubles part_of(Floats v, int part) { return to_doubles(half(v, part)); }
LRD_INLINE Doubles from_parts(const Doubles (&parts)[1]) { return parts[0]; }
LRD_INLINE Floats from_parts(const Doubles (&parts)[2]) { return join(to_floats(parts[0]), to_floats(parts[1])); }

// Four columns of kLanes rows. load: v[c] holds column c of all rows; store: its inverse, in the order of the rows.
template <class E, int kLanes>
struct Quad {  // without wider registers, an entry at a time
  typedef typename Lanes<E, kLanes>::Vector Vector;

  LRD_INLINE void load(const E* from, int64_t row, Vector v[4]) {
    for (int c = 0; c < 4; ++c) {
      Vector column = {};
      for (int i = 0; i < kLanes; ++i) column[i] = from[i * row + c];
      v[c] = column;
    }
  }
  LRD_INLINE void store(E* to, int64_t row, const Vector v[4]) {
    for (int i = 0; i < kLanes; ++i)
      for (int c = 0; c < 4; ++c) to[i * row + c] = v[c][i];
  }
};

#if defined(__AVX2__)

// Blocks of 4 x 4 within lanes of 128 bits.
LRD_INLINE void transpose(__m128 v[4]) {
  const __m128 a = _mm_unpacklo_ps(v[0], v[1]), b = _mm_unpackhi_ps(v[0], v[1]);
  const __m128 c = _mm_unpacklo_ps(v[2], v[3]), d = _mm_unpackhi_ps(v[2], v[3]);
  v[0] = _mm_movelh_ps(a, c), v[1] = _mm_movehl_ps(c, a), v[2] = _mm_movelh_ps(b, d), v[3] = _mm_movehl_ps(d, b);
}

LRD_INLINE void transpose(__m256 v[4]) {
  const __m256d a = (__m256d)_mm256_unpacklo_ps(v[0], v[1]), b = (__m256d)_mm256_unpackhi_ps(v[0], v[1]);
  const __m256d c = (__m256d)_mm256_unpacklo_ps(v[2], v[3]), d = (__m256d)_mm256_unpackhi_ps(v[2], v[3]);
  v[0] = (__m256)_mm256_unpacklo_pd(a, c), v[1] = (__m256)_mm256_unpackhi_pd(a, c);
  v[2] = (__m256)_mm256_unpacklo_pd(b, d), v[3] = (__m256)_mm256_unpackhi_pd(b, d);
}

// Blocks of 4 x 4 doubles within lanes of 256 bits.
LRD_INLINE void transpose(__m256d v[4]) {
  const __m256d a = _mm256_unpacklo_pd(v[0], v[1]), b = _mm256_unpackhi_pd(v[0], v[1]);
  const __m256d c = _mm256_unpacklo_pd(v[2], v[3]), d = _mm256_unpackhi_pd(v[2], v[3]);
  v[0] = _mm256_permute2f128_pd(a, c, 0x20), v[1] = _mm256_permute2f128_pd(b, d, 0x20);
  v[2] = _mm256_permute2f128_pd(a, c, 0x31), v[3] = _mm256_permute2f128_pd(b, d, 0x31);
}

template <>
struct Quad<float, 4> {
  typedef Lanes<float, 4>::Vector Vector;

  LRD_INLINE void load(const float* from, int64_t row, Vector v[4]) {
    __m128 t[4];
    for (int i = 0; i < 4; ++i) t[i] = _mm_loadu_ps(from + i * row);
    transpose(t);
    for (int c = 0; c < 4; ++c) v[c] = (Vector)t[c];
  }
  LRD_INLINE void store(float* to, int64_t row, const Vector v[4]) {
    __m128 t[4];
    for (int c = 0; c < 4; ++c) t[c] = (__m128)v[c];
    transpose(t);
    for (int i = 0; i < 4; ++i) _mm_storeu_ps(to + i * row, t[i]);
  }
};

template <>
struct Quad<float, 8> {
  typedef Lanes<float, 8>::Vector Vector;

  LRD_INLINE void load(const float* from, int64_t row, Vector v[4]) {
    __m256 t[4];
    for (int i = 0; i < 4; ++i) {
      const __m256 low = _mm256_castps128_ps256(_mm_loadu_ps(from + i * row));
      t[i] = _mm256_insertf128_ps(low, _mm_loadu_ps(from + (i + 4) * row), 1);
    }
    transpose(t);
    for (int c = 0; c < 4; ++c) v[c] = (Vector)t[c];
  }
  LRD_INLINE void store(float* to, int64_t row, const Vector v[4]) {
    __m256 t[4];
    for (int c = 0; c < 4; ++c) t[c] = (__m256)v[c];
    transpose(t);
    for (int i = 0; i < 4; ++i) _mm_storeu_ps(to + i * row, _mm256_castps256_ps128(t[i]));
    for (int i = 0; i < 4; ++i) _mm_storeu_ps(to + (i + 4) * row, _mm256_extractf128_ps(t[i], 1));
  }
};

template <>
struct Quad<double, 4> {
  typedef Lanes<double, 4>::Vector Vector;

  LRD_INLINE void load(const double* from, int64_t row, Vector v[4]) {
    __m256d t[4];
    for (int i = 0; i < 4; ++i) t[i] = _mm256_loadu_pd(from + i * row);
    transpose(t);
    for (int c = 0; c < 4; ++c) v[c] = (Vector)t[c];
  }
  LRD_INLINE void store(double* to, int64_t row, const Vector v[4]) {
    __m256d t[4];
    for (int c = 0; c < 4; ++c) t[c] = (__m256d)v[c];
    transpose(t);
    for (int i = 0; i < 4; ++i) _mm256_storeu_pd(to + i * row, t[i]);
  }
};

#endif
#if defined(__AVX512F__)

LRD_INLINE void transpose(__m512 v[4]) {
  const __m512d a = (__m512d)_mm512_unpacklo_ps(v[0], v[1]), b = (__m512d)_mm512_unpackhi_ps(v[0], v[1]);
  const __m512d c = (__m512d)_mm512_unpacklo_ps(v[2], v[3]), d = (__m512d)_mm512_unpackhi_ps(v[2], v[3]);
  v[0] = (__m512)_mm512_unpacklo_pd(a, c), v[1] = (__m512)_mm512_unpackhi_pd(a, c);
  v[2] = (__m512)_mm512_unpacklo_pd(b, d), v[3] = (__m512)_mm512_unpackhi_pd(b, d);
}

LRD_INLINE void transpose(__m512d v[4]) {
  const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13);
  const __m512i high = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
  const __m512d a = _mm512_unpacklo_pd(v[0], v[1]), b = _mm512_unpackhi_pd(v[0], v[1]);
  const __m512d c = _mm512_unpacklo_pd(v[2], v[3]), d = _mm512_unpackhi_pd(v[2], v[3]);
  v[0] = _mm512_permutex2var_pd(a, low, c), v[1] = _mm512_permutex2var_pd(b, low, d);
  v[2] = _mm512_permutex2var_pd(a, high, c), v[3] = _mm512_permutex2var_pd(b, high, d);
}

template <>
struct Quad<float, 16> {
  typedef Lanes<float, 16>::Vector Vector;

  LRD_INLINE void load(const float* from, int64_t row, Vector v[4]) {
    __m512 t[4];
    for (int i = 0; i < 4; ++i) {
      const float* p = from + i * row;
      t[i] = _mm512_castps128_ps512(_mm_loadu_ps(p));
      t[i] = _mm512_insertf32x4(t[i], _mm_loadu_ps(p + 4 * row), 1);
      t[i] = _mm512_insertf32x4(t[i], _mm_loadu_ps(p + 8 * row), 2);
      t[i] = _mm512_insertf32x4(t[i], _mm_loadu_ps(p + 12 * row), 3);
    }
    transpose(t);
    for (int c = 0; c < 4; ++c) v[c] = (Vector)t[c];
  }
  LRD_INLINE void store(float* to, int64_t row, const Vector v[4]) {
    __m512 t[4];
    for (int c = 0; c < 4; ++c) t[c] = (__m512)v[c];
    transpose(t);
    for (int i = 0; i < 4; ++i) _mm_storeu_ps(to + i * row, _mm512_castps512_ps128(t[i]));
    for (int i = 0; i < 4; ++i) _mm_storeu_ps(to + (i + 4) * row, _mm512_extractf32x4_ps(t[i], 1));
    for (int i = 0; i < 4; ++i) _mm_storeu_ps(to + (i + 8) * row, _mm512_extractf32x4_ps(t[i], 2));
    for (int i = 0; i < 4; ++i) _mm_storeu_ps(to + (i + 12) * row, _mm512_extractf32x4_ps(t[i], 3));
  }
};

template <>
struct Quad<double, 8> {
  typedef Lanes<double, 8>::Vector Vector;

  LRD_INLINE void load(const double* from, int64_t row, Vector v[4]) {
    __m512d t[4];
    for (int i = 0; i < 4; ++i) {
      t[i] = _mm512_castpd256_pd512(_mm256_loadu_pd(from + i * row));
      t[i] = _mm512_insertf64x4(t[i], _mm256_loadu_pd(from + (i + 4) * row), 1);
    }
    transpose(t);
    for (int c = 0; c < 4; ++c) v[c] = (Vector)t[c];
  }
  LRD_INLINE void store(double* to, int64_t row, const Vector v[4]) {
    __m512d t[4];
    for (int c = 0; c < 4; ++c) t[c] = (__m512d)v[c];
    transpose(t);
    for (int i = 0; i < 4; ++i) _mm256_storeu_pd(to + i * row, _mm512_castpd512_pd256(t[i]));
    for (int i = 0; i < 4; ++i) _mm256_storeu_pd(to + (i + 4) * row, _mm512_extractf64x4_pd(t[i], 1));
  }
};

#endif

// Rows of R entries as vectors of A, one for each column. Of row-major rows shorter than four, four entries are touched
// nevertheless: the memory has room for them behind the last row, and what is stored there means nothing.
template <class E, class A, int R, bool kRowMajor>
struct RowVectors {
  static constexpr int kLanes = Tile<A>::kLanes;
  typedef typename Tile<A>::Vector Vector;
  typedef Lanes<E, kLanes> Stored;

  // The first column of the four that column c is read and written with.
  static constexpr int first_of(int c) { return R < 4 ? 0 : (c + 4 <= R ? c : R - 4); }

  // Columns [c, c + 4) as far as there are any, c a multiple of 4.
  LRD_INLINE void load(int c, const E* from, int64_t stride, Vector x[R]) {
    if constexpr (kRowMajor) {
      typename Stored::Vector four[4];
      const int first = first_of(c);
      Quad<E, kLanes>::load(from + first, stride, four);
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k)
        if (first + k >= c && first + k < R) x[first + k] = widen<A>(four[k]);
    } else {
#pragma GCC unroll 4
      for (int k = c; k < c + 4; ++k)
        if (k < R) x[k] = widen<A>(Stored::load(from + k * stride));
    }
  }

  LRD_INLINE void store(E* to, int64_t stride, const Vector x[R]) {
    if constexpr (kRowMajor) {
#pragma GCC unroll 4
      for (int c = 0; c < R; c += 4) {
        typename Stored::Vector four[4];
        const int first = first_of(c);
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) four[k] = narrow<E>(x[first + k < R ? first + k : 0]);
        Quad<E, kLanes>::store(to + first, stride, four);
      }
    } else {
#pragma GCC unroll 16
      for (int c = 0; c < R; ++c) Stored::store(to + c * stride, narrow<E>(x[c]));
    }
  }

  // Asks for the kLanes rows that come about 4 KB later, for the second-level cache, if the memory, of `rows` rows,
  // goes on so far.
  LRD_INLINE void prefetch(const E* from, int64_t stride, int64_t at, int64_t rows) {
    constexpr int64_t kBytes = R * sizeof(E), kLine = 64 / sizeof(E);
    constexpr int64_t kAhead = (4096 / kBytes + kLanes - 1) / kLanes * kLanes;
    if (at + kAhead + kLanes > rows) return;
    from += (at + kAhead) * (kRowMajor ? stride : 1);
    if constexpr (kRowMajor) {
      constexpr int64_t kStep = kBytes >= 64 ? 1 : 64 / kBytes;
#pragma GCC unroll 16
      for (int64_t i = 0; i < kLanes; i += kStep)
        for (int64_t j = 0; j < R; j += kLine) __builtin_prefetch(from + i * stride + j, 0, 2);
    } else if (kLanes >= kLine || at % kLine == 0) {
#pragma GCC unroll 16
      for (int64_t j = 0; j < R; ++j) __builtin_prefetch(from + j * stride, 0, 2);
    }
  }
};

}  // namespace LRD_ISA_NAMESPACE
}  // namespace lrd
