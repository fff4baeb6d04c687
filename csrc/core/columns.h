// A block of rows held as columns, x[j * ld + i]: vectors run along the rows of the block, so that any rank fits
// without padding and rank-major memory is read and written as it lies. Included only by the per-instruction-set
// sources.
#pragma once

#include <cstdint>

#include "convert.h"
#include "rows.h"
#include "transpose.h"
#include "types.h"

namespace lrd {
namespace LRD_ISA_NAMESPACE {

// How far apart the columns of a block of rows are kept: an odd number of cache lines, or a power of two would put all
// of them into a few sets of the first-level cache. The rows are whole tiles.
template <class A>
constexpr int64_t apart(int64_t rows) {
  return rows + 64 / int64_t(sizeof(A));
}

// One contiguous column, n entries; the lines of the next block are asked for on the way, because a block is too short
// for the hardware to follow its many streams: those `ahead` entries further on, of the `left` that are there.
template <class T, class A>
static void read_column(const T* from, int64_t n, int64_t ahead, int64_t left, A* to) {
  constexpr int64_t kLine = 64 / sizeof(T);
  int64_t i = 0;
  for (; i + kLine <= n; i += kLine) {
    if (i + ahead < left) __builtin_prefetch(from + i + ahead);
    for (int64_t lane = 0; lane < kLine; ++lane) to[i + lane] = A(load(from[i + lane]));
  }
  for (; i < n; ++i) to[i] = A(load(from[i]));
}

// Rows [begin, begin + n) of P, n <= ld, as columns; zeros below them up to a multiple of 8 and where masked.
template <class T, class A>
static void read_columns(const MatrixView& P, VectorView mask, int64_t begin, int64_t n, A* out, int64_t ld) {
  typedef Wide<T> E;
  typedef A Stored __attribute__((vector_size(8 * sizeof(A)), aligned(sizeof(A)), may_alias));
  const T* factor = static_cast<const T*>(P.data) + begin * P.stride_s;
  const int64_t row = P.stride_s, column = P.stride_r;
  constexpr int64_t kLine = 64 / sizeof(T);
  if (column == 1 && row >= P.R && P.R >= 4) {  // row-major
    // How far from `factor` may be read: a short last tile of columns reads on into the next row, if there is one.
    const int64_t readable = (P.S - 1 - begin) * row + P.R;
    for (int64_t i0 = 0; i0 < n; i0 += 8) {
      for (int64_t i = i0 + n; i < i0 + n + 8 && begin + i < P.S; ++i)  // as in read_column
        for (int64_t j = 0; j < P.R; j += kLine) __builtin_prefetch(factor + i * row + j);
      for (int64_t j0 = 0; j0 < P.R; j0 += 8) {
        const int64_t columns = P.R - j0 < 8 ? P.R - j0 : 8;
        const int64_t rows = n - i0 < 8 ? n - i0 : 8;
        A* to = out + j0 * ld + i0;
        typename Octet<E>::Vector tile[8];
        if (std::is_same_v<T, E> && rows == 8 && (i0 + 7) * row + j0 + 8 <= readable) {
          const E* from = reinterpret_cast<const E*>(factor) + i0 * row + j0;
          for (int i = 0; i < 8; ++i) tile[i] = Octet<E>::load(from + i * row);
        } else {
          E part[8][8] = {};
          for (int64_t i = 0; i < rows; ++i)
            for (int64_t j = 0; j < columns; ++j) part[i][j] = E(load(factor[(i0 + i) * row + j0 + j]));
          for (int i = 0; i < 8; ++i) tile[i] = Octet<E>::load(part[i]);
        }
        Octet<E>::transpose(tile);
        if (columns == 8) {
          for (int j = 0; j < 8; ++j)
            *reinterpret_cast<Stored*>(to + j * ld) = __builtin_convertvector(tile[j], Stored);
        } else {
          for (int j = 0; j < 8; ++j)
            if (j < columns) *reinterpret_cast<Stored*>(to + j * ld) = __builtin_convertvector(tile[j], Stored);
        }
      }
    }
  } else {
    const int64_t padded = (n + 7) / 8 * 8;
    for (int64_t j = 0; j < P.R; ++j) {
      const T* from = factor + j * column;
      A* to = out + j * ld;
      if (row == 1)
        read_column<T, A>(from, n, n, P.S - begin, to);
      else
        for (int64_t i = 0; i < n; ++i) to[i] = A(load(from[i * row]));
      for (int64_t i = n; i < padded; ++i) to[i] = A(0);
    }
  }
  if (mask.data)
    for (int64_t i = 0; i < n; ++i)
      if (!present(mask, begin + i))
        for (int64_t j = 0; j < P.R; ++j) out[j * ld + i] = A(0);
}

// Columns x [R, ld] to rows [begin, begin + n) of a matrix in the input's dtype.
template <class T, class A>
static void write_columns(const A* x, int64_t ld, int64_t R, int64_t n, T* out, int64_t row, int64_t column) {
  typedef Wide<T> E;
  typedef A Stored __attribute__((vector_size(8 * sizeof(A)), aligned(sizeof(A)), may_alias));
  if (column != 1 || R < 4) {
    for (int64_t j = 0; j < R; ++j) {
      T* to = out + j * column;
      const A* from = x + j * ld;
      if (row == 1)
        for (int64_t i = 0; i < n; ++i) store(to[i], double(from[i]));
      else
        for (int64_t i = 0; i < n; ++i) store(to[i * row], double(from[i]));
    }
    return;
  }
  for (int64_t i0 = 0; i0 < n; i0 += 8) {
    const int64_t rows = n - i0 < 8 ? n - i0 : 8;
    for (int64_t j0 = 0; j0 < R; j0 += 8) {
      const int64_t columns = R - j0 < 8 ? R - j0 : 8;
      typename Octet<E>::Vector tile[8];
      for (int64_t j = 0; j < 8; ++j) {
        const A* from = x + (j0 + (j < columns ? j : 0)) * ld + i0;
        tile[j] = __builtin_convertvector(*reinterpret_cast<const Stored*>(from), typename Octet<E>::Vector);
      }
      Octet<E>::transpose(tile);
      T* to = out + i0 * row + j0;
      if (std::is_same_v<T, E> && columns == 8 && rows == 8) {
        for (int i = 0; i < 8; ++i) Octet<E>::store(reinterpret_cast<E*>(to + i * row), tile[i]);
      } else {
        E part[8][8];
        for (int i = 0; i < 8; ++i) Octet<E>::store(part[i], tile[i]);
        for (int64_t i = 0; i < rows; ++i)
          for (int64_t j = 0; j < columns; ++j) store(to[i * row + j], double(part[i][j]));
      }
    }
  }
}

// sum += x^T z along the rows: four columns at a time, in double.
template <class A>
static void add_projection(const A* x, int64_t ld, const double* z, int64_t R, int64_t n, double* sum) {
  int64_t j = 0;
  for (; j + 4 <= R; j += 4) {
    const A *x0 = x + j * ld, *x1 = x0 + ld, *x2 = x1 + ld, *x3 = x2 + ld;
    const double z0 = z[j], z1 = z[j + 1], z2 = z[j + 2], z3 = z[j + 3];
    for (int64_t i = 0; i < n; ++i)
      sum[i] += (double(x0[i]) * z0 + double(x1[i]) * z1) + (double(x2[i]) * z2 + double(x3[i]) * z3);
  }
  for (; j < R; ++j)
    for (int64_t i = 0; i < n; ++i) sum[i] += double(x[j * ld + i]) * z[j];
}

}  // namespace LRD_ISA_NAMESPACE
}  // namespace lrd
