// The Gram pass of small ranks: one thread per row, which adds the row's half of G and its u to sums in registers. One
// value at most. Per-row numbers that need more than float32 are pairs: no float64 instruction per row.
#pragma once

#include <type_traits>

#include "row_parts.cuh"

namespace lrd::cuda {

// ---- sums of products: of float32 numbers, which are flushed to float64; of pairs; or of float64 ----

template <class Sum>
__device__ __forceinline__ Sum cast(Pair x) {
  if constexpr (sizeof(Sum) == 4)
    return x.hi;
  else if constexpr (std::is_same_v<Sum, double>)
    return x.wide();
  else
    return x;
}

__device__ __forceinline__ float times(float a, float b) { return a * b; }
__device__ __forceinline__ double times(double a, float b) { return a * static_cast<double>(b); }
__device__ __forceinline__ Pair times(Pair a, float b) { return scaled(a, b); }

__device__ __forceinline__ void add_product(float& sum, float a, float b) { sum += a * b; }
__device__ __forceinline__ void add_product(double& sum, double a, float b) { sum += a * static_cast<double>(b); }
__device__ __forceinline__ void add_product(Pair& sum, Pair a, float b) { add_to(sum, scaled(a, b)); }

// What lane holds of a number, in float32: of a float64 number one half after the other.
template <class Sum>
constexpr int kParts = sizeof(Sum) == 4 ? 1 : 2;
__device__ __forceinline__ float part_of(float x, int) { return x; }
__device__ __forceinline__ float part_of(Pair x, int part) { return part == 0 ? x.hi : x.lo; }
__device__ __forceinline__ float part_of(double x, int part) { return part_of(split(x), part); }

// Adds `sums` over the lanes of a warp: sum 32 c + lane to totals[c] of that lane, as pairs. Of float32 sums four lanes
// are added in float32 first. `room` of a warp is [32, 33].
template <int kSums, class Sum>
__device__ __forceinline__ void flush(Sum (&sums)[kSums], float* room, double (&totals)[(kSums + 31) / 32]) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int c = 0; c < (kSums + 31) / 32; ++c)
#pragma unroll
    for (int part = 0; part < kParts<Sum>; ++part) {
#pragma unroll
      for (int k = 0; k < kWarp; ++k)
        if (32 * c + k < kSums) room[k * 33 + lane] = part_of(sums[32 * c + k], part);
      __syncwarp();
      if (32 * c + lane < kSums) {
        const float* own = room + lane * 33;
        Pair total;
        if constexpr (kParts<Sum> == 1) {
#pragma unroll
          for (int k = 0; k < kWarp; k += 4) add_to(total, {(own[k] + own[k + 1]) + (own[k + 2] + own[k + 3]), 0.0f});
        } else {
#pragma unroll
          for (int k = 0; k < kWarp; ++k) add_to(total, {own[k], 0.0f});
        }
        totals[c] += total.wide();
      }
      __syncwarp();
    }
#pragma unroll
  for (int e = 0; e < kSums; ++e) sums[e] = Sum{};
}

// Block (split, b).
template <class T, int kR, bool kVector, class Sum>
__global__ void __launch_bounds__(kThreads, kR <= 8 && sizeof(Sum) == 4 ? 2 : 1) row_sums_kernel(const GramArgs p) {
  constexpr int kHalf = kR * (kR + 1) / 2, kSums = kHalf + kR, kChunks = (kSums + 31) / 32, kWarps = kThreads / kWarp;
  constexpr bool kIsDouble = std::is_same_v<Sum, double>;
  __shared__ float room[kWarps][32 * 33];
  __shared__ double of_warps[kWarps][kSums], of_scalars[kWarps * 4];
  const Rows& rows = p.rows;
  const int tid = threadIdx.x, lane = tid % kWarp, warp = tid / kWarp, R = p.columns.total;
  const int64_t split_of = blockIdx.x % p.splits, b = blockIdx.x / p.splits;
  reset_tickets(p.tickets, p.B);
  const T* factor = static_cast<const T*>(p.columns.factors) + b / p.columns.per_factor * p.columns.factor_b;
  const RowReader<T> read(rows, b);

  Sum sums[kSums] = {};
  double totals[kChunks] = {};
  ScalarSums scalars;
  int odd = 0;
  const int64_t end = min((split_of + 1) * p.rows_per_split, rows.S);
  for (int64_t begin = split_of * p.rows_per_split; begin < end; begin += kFlushTurns<Sum> * kThreads) {
    const int64_t until = min(begin + kFlushTurns<Sum> * kThreads, end);
#pragma unroll 1
    for (int64_t row = begin + tid; row < until; row += kThreads) {
      if (!read.is_present(row)) continue;
      float x[kR], slope;
      load_row<T, kR, kVector>(factor + row * p.columns.factor_s, p.columns.factor_r, R, x);
      const Pair d = read.diag(row, &slope), w = reciprocal(d);
      odd |= !is_ordinary(d.hi);
      const Pair r = read.difference(row), wr = product(w, r);
      scalars.add(d, w, product(wr, r));
#pragma unroll
      for (int i = 0; i < kR; ++i) {
        const Sum weighted = times(cast<Sum>(w), x[i]);
#pragma unroll
        for (int j = 0; j <= i; ++j) add_product(sums[i * (i + 1) / 2 + j], weighted, x[j]);
        add_product(sums[kHalf + i], cast<Sum>(wr), x[i]);
      }
    }
    if constexpr (!kIsDouble) flush(sums, room[warp], totals);
    scalars.settle();
  }
  if constexpr (kIsDouble) flush(sums, room[warp], totals);

#pragma unroll
  for (int c = 0; c < kChunks; ++c)
    if (32 * c + lane < kSums) of_warps[warp][32 * c + lane] = totals[c];
  scalars.add_threads(of_scalars);
  odd = __syncthreads_or(odd);
  const SlotLayout at(R, p.rows.N);
  double* slot = p.slots + (b * p.splits + split_of) * at.numbers;
  for (int e = tid; e < kSums; e += kThreads) {
    double sum = 0.0;
    for (int k = 0; k < kWarps; ++k) sum += of_warps[k][e];
    if (e < kHalf) {
      if (e < at.u) slot[e] = sum;
    } else if (e - kHalf < R && p.values > 0) {
      slot[at.u + e - kHalf] = sum;
    }
  }
  if (tid == 0) {
    if (p.values > 0) slot[at.quad] = scalars.quad;
    slot[at.log_diag] = scalars.rest;
    slot[at.odd] = odd != 0;
  }
}

}  // namespace lrd::cuda
