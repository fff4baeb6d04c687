// Sums over rows: G = X^T X, u = X^T y, quad = |y|^2 and sum log D, where X are the columns and y the differences, both
// times sqrt(1 / D). A block sums a run of rows for one tile of G into a slot of its own; a second kernel adds the
// slots in their order: no atomics, always the same bits.
#pragma once

#include "common.cuh"

namespace lrd::cuda {

template <class A, int kTile>
constexpr int kGramRows = gram_rows(kTile, sizeof(A) == 8);
template <class A, int kTile>
constexpr int kGramPitch = gram_pitch(kTile, sizeof(A) == 8);

// A sum of logarithms by a product of mantissas and a sum of exponents: one logarithm for many numbers.
struct LogSum {
  double product = 1.0;
  int64_t exponents = 0;

  __device__ __forceinline__ void add(double d) {
    const int64_t bits = __double_as_longlong(d);
    const int64_t exponent = bits >> 52;  // sign included: 0 and above 2046 are not positive normal numbers
    if (exponent > 0 && exponent < 2047) {
      product *= __longlong_as_double((bits & 0x000fffffffffffffll) | 0x3ff0000000000000ll);
      exponents += exponent - 1023;
    } else {  // subnormal numbers are put right, all others are no variance
      product *= d > 0.0 && d < infinity_of_double() ? d * 0x1p512 * 0x1p512 : nan_of_double();
      exponents -= 1024;
    }
    const int64_t grown = __double_as_longlong(product);
    exponents += ((grown >> 52) & 2047) - 1023;
    if (isfinite(product)) product = __longlong_as_double((grown & 0x000fffffffffffffll) | 0x3ff0000000000000ll);
  }
  __device__ __forceinline__ double value() const { return log(product) + exponents * 0.69314718055994530942; }
};

// Columns [first, first + count) of rows [begin, end) to `to` [kRows, kLd], times `scale` [kRows], 0 where that is
// negative: the row is not there, and nothing of it is read.
template <class T, class A, int kTile>
__device__ __forceinline__ void load_tile(const Columns& columns, const T* factors, const T* vectors,
                                          const double* mean, int64_t begin, int first, int count, const A* scale,
                                          A* to) {
  constexpr int kRows = kGramRows<A, kTile>, kLd = kGramPitch<A, kTile>;
  Walk walk(kRows, count, columns.rank_major);
#pragma unroll 4
  for (int e = threadIdx.x; e < kRows * count; e += kThreads, walk.next()) {
    const A weight = scale[walk.row()];
    A x = 0;
    if (!(weight < 0))
      x = column_entry<T, A>(columns, factors, vectors, mean, begin + walk.row(), first + walk.column()) * weight;
    to[walk.row() * kLd + walk.column()] = x;
  }
}

// Adds the `count` numbers that threads (part, place) have over the parts, in their order; threads of part 0 get the
// sums. `room` for count * places numbers.
template <int count>
__device__ __forceinline__ void add_parts(double (&own)[count], int part, int parts, int place, int places,
                                          double* room) {
  for (int turn = 1; turn < parts; ++turn) {
    __syncthreads();
    if (part == turn)
#pragma unroll
      for (int e = 0; e < count; ++e) room[e * places + place] = own[e];
    __syncthreads();
    if (part == 0)
#pragma unroll
      for (int e = 0; e < count; ++e) own[e] += room[e * places + place];
  }
}

// The sums of block (split, pair, b), `block` of them.
template <class T, class A, int kTile>
__device__ __forceinline__ void sum_tiles(const GramArgs& p, int64_t block, double* memory) {
  constexpr int kRows = kGramRows<A, kTile>, kLd = kGramPitch<A, kTile>;
  constexpr int kAcross = kTile / 4, kParts = kThreads / (kAcross * kAcross);  // threads of a tile, 4 x 4 numbers each
  constexpr int kFlush = sizeof(A) == 8 ? 1 : kFlushRows * kParts / kRows;     // blocks of rows, of float32 sums
  const Rows& rows = p.rows;
  const int64_t split = block % p.splits, b = block / p.splits / p.pairs;
  int i = static_cast<int>(block / p.splits % p.pairs), j = i;
  if (p.want_gram) {  // pair -> (i, j), j <= i
    j = i;
    for (i = 0; j > i; ++i) j -= i + 1;
  }
  Arena arena(memory);
  const GramShared<A> shared(arena, kRows, kLd, i != j);
  double* differences = shared.differences;
  A *scale = shared.scale, *left = shared.left, *right = shared.right;
  const int tid = threadIdx.x, part = tid / (kAcross * kAcross);
  const int ty = tid / kAcross % kAcross * 4, tx = tid % kAcross * 4;
  const int total = p.columns.total;
  const int left_count = min(kTile, total - i * kTile), right_count = min(kTile, total - j * kTile);
  const T* factors = static_cast<const T*>(p.columns.factors) + b / p.columns.per_factor * p.columns.factor_b;
  const T* vectors = static_cast<const T*>(p.columns.vectors) + b * p.columns.vector_b;
  const double* mean = p.columns.mean ? p.columns.mean + b * rows.S : nullptr;
  // Columns that do not exist are 0 throughout.
  for (int e = tid; e < kRows * kLd * (right == left ? 1 : 2); e += kThreads) left[e] = 0;

  // Thread (slice of the rows, value, column) of u; as many values as a power of two.
  const int padded = p.values <= 2 ? max(p.values, 1) : kGramValues;
  const int u_column = tid % kTile, u_value = tid / kTile % padded, u_slice = tid / kTile / padded;
  const int u_slices = kThreads / kTile / padded;
  const bool has_values = p.values > 0 && i == j;

  double sums[16] = {}, u[1] = {}, quads[kGramValues] = {};
  A block_sums[16] = {};  // of float32
  LogSum logs;
  int blocks = 0;
  const int64_t end = min((split + 1) * p.rows_per_split, rows.S);
  for (int64_t begin = split * p.rows_per_split; begin < end; begin += kRows) {
    __syncthreads();
    if (tid < kRows) {
      const int64_t row = begin + tid;
      A own = -1;
      double ys[kGramValues] = {};
      if (row < end && is_present(rows, b, row)) {
        own = 1;
        if (rows.weighted) {
          double slope;
          const double d = diag_of<T>(rows, b, row, &slope);
          const double root = sqrt(1.0 / d);
          own = static_cast<A>(root);
          if (i == 0 && j == 0) logs.add(d);
          if (has_values)
#pragma unroll
            for (int n = 0; n < kGramValues; ++n) {
              if (n >= p.values) break;
              ys[n] = difference<T>(rows, b, p.first_value + n, row) * root;
              quads[n] += ys[n] * ys[n];
            }
        }
      }
      scale[tid] = own;
      if (has_values)
#pragma unroll
        for (int n = 0; n < kGramValues; ++n)
          if (n < padded) differences[n * kRows + tid] = ys[n];
    }
    __syncthreads();
    if (left_count > 0)
      load_tile<T, A, kTile>(p.columns, factors, vectors, mean, begin, i * kTile, left_count, scale, left);
    if (right != left)
      load_tile<T, A, kTile>(p.columns, factors, vectors, mean, begin, j * kTile, right_count, scale, right);
    __syncthreads();
    if (p.want_gram) {
#pragma unroll 2
      for (int s = part; s < kRows; s += kParts) {
        A a[4], c[4];
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          a[m] = left[s * kLd + ty + m];
          c[m] = right[s * kLd + tx + m];
        }
#pragma unroll
        for (int m = 0; m < 4; ++m)
#pragma unroll
          for (int n = 0; n < 4; ++n)
            if constexpr (sizeof(A) == 8)
              sums[4 * m + n] += a[m] * c[n];
            else
              block_sums[4 * m + n] += a[m] * c[n];
      }
      if (sizeof(A) < 8 && (++blocks % kFlush == 0 || begin + kRows >= end))
#pragma unroll
        for (int e = 0; e < 16; ++e) {
          sums[e] += static_cast<double>(block_sums[e]);
          block_sums[e] = 0;
        }
    }
    if (has_values)
      for (int s = u_slice; s < kRows; s += u_slices)
        u[0] += static_cast<double>(left[s * kLd + u_column]) * differences[u_value * kRows + s];
  }

  const SlotLayout at(total, rows.N, p.slots_have_gram);
  double* slot = p.slots + (b * p.splits + split) * at.numbers;
  if (p.want_gram) {
    add_parts(sums, part, kParts, tid % (kAcross * kAcross), kAcross * kAcross, memory);
    // By way of shared memory, so that neighbouring threads store neighbouring numbers: every fourth row at a time.
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      __syncthreads();
      if (part == 0)
#pragma unroll
        for (int n = 0; n < 4; ++n) memory[ty / 4 * kTile + tx + n] = sums[4 * m + n];
      __syncthreads();
      for (int e = tid; e < kAcross * kTile; e += kThreads) {
        const int64_t row = i * kTile + e / kTile * 4 + m, column = j * kTile + e % kTile;
        if (row < total && column <= row) slot[row * (row + 1) / 2 + column] = memory[e];
      }
    }
    __syncthreads();
  }
  if (has_values) {
    add_parts(u, u_slice, u_slices, tid % (kTile * padded), kTile * padded, memory);
    const int column = i * kTile + u_column;
    if (u_slice == 0 && u_value < p.values && column < total)
      slot[at.u + (p.first_value + u_value) * total + column] = u[0];
  }
  if (i == 0 && j == 0 && rows.weighted) {
    double of_rows[kGramValues + 1];  // of the warp, then of the block
    for (int n = 0; n < kGramValues; ++n) of_rows[n] = warp_sum(quads[n]);
    of_rows[kGramValues] = warp_sum(logs.value());
    add_parts(of_rows, tid / kWarp, kThreads / kWarp, tid % kWarp, kWarp, memory);
    if (tid == 0) {
#pragma unroll
      for (int n = 0; n < kGramValues; ++n)
        if (n < p.values) slot[at.quad + p.first_value + n] = of_rows[n];
      if (p.first_value == 0) slot[at.log_diag] = of_rows[kGramValues], slot[at.odd] = 0.0;
    }
  }
}

template <class T, class A, int kTile>
__global__ void __launch_bounds__(kThreads, kResident<A>) gram_kernel(const GramArgs p) {
  extern __shared__ double memory[];
  reset_tickets(p.tickets, p.B);
  if (p.again && !p.again[blockIdx.x / p.splits / p.pairs]) return;
  sum_tiles<T, A, kTile>(p, blockIdx.x, memory);
}

// Numbers [first, first + 32) of an item's sums, over its slots: a warp's lanes have one number each, and a warp every
// eighth slot. Needs room for kThreads numbers; G is mirrored.
__device__ __forceinline__ void add_numbers(const AddArgs& p, int64_t b, int64_t first, double* room) {
  const SlotLayout at(p.columns, p.N, p.slots_have_gram);
  const int64_t e = first + threadIdx.x % kWarp;
  double sum = 0.0;
  if (e < at.numbers) {
    const double* from = p.slots + b * p.splits * at.numbers + e;
#pragma unroll 4
    for (int64_t split = threadIdx.x / kWarp; split < p.splits; split += kThreads / kWarp)
      sum += from[split * at.numbers];
  }
  __syncthreads();
  room[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x >= kWarp || e >= at.numbers) return;
  for (int k = 1; k < kThreads / kWarp; ++k) sum += room[k * kWarp + threadIdx.x];
  if (e < at.u) {
    int64_t i = static_cast<int64_t>((sqrt(8.0 * static_cast<double>(e) + 1.0) - 1.0) / 2.0);
    if (i * (i + 1) / 2 > e) --i;  // the square root may have been rounded
    if ((i + 1) * (i + 2) / 2 <= e) ++i;
    const int64_t j = e - i * (i + 1) / 2;
    double* gram = p.gram + b * p.columns * p.columns;
    gram[i * p.columns + j] = sum;
    gram[j * p.columns + i] = sum;
  } else if (e < at.quad) {
    p.u[b * p.N * p.columns + e - at.u] = sum;
  } else if (e < at.log_diag) {
    p.quad[b * p.N + e - at.quad] = sum;
  } else if (e == at.log_diag) {
    if (p.log_diag) p.log_diag[b] = sum;
  } else if (p.odd) {
    p.odd[b] = sum != 0.0;
  }
}

// Thread per output.
template <class T>
__global__ void __launch_bounds__(kThreads, 1) mean_kernel(const MeanArgs p) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= p.B * p.S) return;
  const T* vectors = static_cast<const T*>(p.vectors) + at / p.S * p.vector_b + at % p.S * p.vector_s;
  double sum = 0.0;
  for (int64_t v = 0; v < p.V; ++v) sum += widen<double>(vectors[v * p.vector_v]);
  p.mean[at] = sum / static_cast<double>(p.V);
}

}  // namespace lrd::cuda
