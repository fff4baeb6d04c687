// What follows the sums, by one launch: slots are added, the capacitance is factorised, the certificate judged and the
// result written. And the second pass for the items that the certificate rejects; its last block finishes them.
#pragma once

#include "capacitance.cuh"
#include "gram.cuh"
#include "log_prob_fwd.cuh"
#include "row_sums.cuh"

namespace lrd::cuda {

// Block (32 numbers, b). The last block of an item has all that follows.
__global__ void __launch_bounds__(kThreads, 1) finish_kernel(const FinishArgs p) {
  extern __shared__ double memory[];
  const int64_t chunks = slot_chunks(p.add.columns, p.add.N, p.add.slots_have_gram), b = blockIdx.x / chunks;
  add_numbers(p.add, b, blockIdx.x % chunks * kWarp, memory);
  if (!is_last(p.tickets + 2 * b, chunks)) return;
  factorise(p.capacitance, b, memory);
  __syncthreads();
  if (p.judges && judge(p.judge, b) != kNothing) return;  // the next launch settles it
  settle(p.settle, b);
}

// ---- residuals ----

// rest - a b, in pairs or in float64.
__device__ __forceinline__ void subtract(Pair& rest, Pair a, float b) { add_to(rest, scaled(a, -b)); }
__device__ __forceinline__ void subtract(double& rest, double a, float b) { rest -= a * static_cast<double>(b); }

// The sum over neighbouring lanes.
template <int kLanes>
__device__ __forceinline__ Pair add_lanes(Pair x) {
#pragma unroll
  for (int offset = 1; offset < kLanes; offset *= 2)
    add_to(x, {__shfl_xor_sync(0xffffffffu, x.hi, offset), __shfl_xor_sync(0xffffffffu, x.lo, offset)});
  return x;
}

// u = P^T w (r - P z) and the sum of w (r - P z)^2 of block (split, b): kLanes lanes to a row, kOwn columns each.
template <class T, int kLanes, int kOwn, class Sum>
__device__ __forceinline__ void sum_residuals(const GramArgs& p, const double* z, int64_t block, double* memory) {
  constexpr int kRowsOfBlock = kThreads / kLanes, kWidth = kLanes * kOwn;
  const Rows& rows = p.rows;
  const int64_t split_of = block % p.splits, b = block / p.splits;
  const int tid = threadIdx.x, R = p.columns.total, place = tid % kLanes, column = kOwn * place;
  const T* factor = static_cast<const T*>(p.columns.factors) + b / p.columns.per_factor * p.columns.factor_b;
  const RowReader<T> read(rows, b);
  Sum along[kOwn];
#pragma unroll
  for (int k = 0; k < kOwn; ++k) {
    const double own = column + k < R ? z[b * R + column + k] : 0.0;
    if constexpr (std::is_same_v<Sum, double>)
      along[k] = own;
    else
      along[k] = split(own);
  }

  double totals[kOwn] = {}, quad = 0.0;
  const int64_t end = min((split_of + 1) * p.rows_per_split, rows.S);
  for (int64_t span = split_of * p.rows_per_split; span < end; span += kFlushRows * kRowsOfBlock) {
    float sums[kOwn] = {};
    Pair quads;
    const int64_t until = min(span + kFlushRows * kRowsOfBlock, end);
#pragma unroll 1
    for (int64_t first = span; first < until; first += kRowsOfBlock) {  // all lanes of a warp take part
      const int64_t row = first + tid / kLanes;
      float x[kOwn] = {}, slope;
      Pair rest, w;
      if (row < until && read.is_present(row)) {
        const T* from = factor + row * p.columns.factor_s + column * p.columns.factor_r;
        if (p.vector)
          load_row<T, kOwn, true>(from, 1, kOwn, x);
        else
          load_row<T, kOwn, false>(from, p.columns.factor_r, R - column, x);
        w = reciprocal(read.diag(row, &slope));
        if (place == 0) rest = read.difference(row);
      }
      Sum own = cast<Sum>(rest);
#pragma unroll
      for (int k = 0; k < kOwn; ++k) subtract(own, along[k], x[k]);
      if constexpr (std::is_same_v<Sum, double>)
        rest = split(own);
      else
        rest = own;
      rest = add_lanes<kLanes>(rest);
      rest = two_sum(rest.hi, rest.lo);  // which have cancelled: lo is small again
      const Pair weighted = product(w, rest);
      if (place == 0) add_to(quads, product(weighted, rest));
#pragma unroll
      for (int k = 0; k < kOwn; ++k) sums[k] += weighted.hi * x[k];
    }
#pragma unroll
    for (int k = 0; k < kOwn; ++k) totals[k] += static_cast<double>(sums[k]);
    quad += quads.wide();
  }
  // Over the rows of a warp, then over the warps: `memory` [warps, kWidth + 1].
#pragma unroll
  for (int offset = kLanes; offset < kWarp; offset *= 2)
#pragma unroll
    for (int k = 0; k < kOwn; ++k) totals[k] += __shfl_xor_sync(0xffffffffu, totals[k], offset);
  quad = warp_sum(quad);
  double* own = memory + tid / kWarp * (kWidth + 1);
  if (tid % kWarp < kLanes)
#pragma unroll
    for (int k = 0; k < kOwn; ++k) own[column + k] = totals[k];
  if (tid % kWarp == 0) own[kWidth] = quad;
  __syncthreads();
  const SlotLayout at(R, rows.N, p.slots_have_gram);
  double* slot = p.slots + (b * p.splits + split_of) * at.numbers;
  for (int e = tid; e <= kWidth; e += kThreads) {
    double sum = 0.0;
    for (int k = 0; k < kThreads / kWarp; ++k) sum += memory[k * (kWidth + 1) + e];
    if (e == kWidth)
      slot[at.quad] = sum;
    else if (e < R)
      slot[at.u + e] = sum;
  }
  __syncthreads();
}

// z and M by the sums over residuals r - P z of the z before: z minimises |sqrt(w) (r - P z)|^2 + |z|^2, so the step is
// small, and the correction of M quadratic in it. `y` has room for 2 R.
__device__ __forceinline__ void refine(const CapacitanceArgs& p, int64_t b, double* y) {
  const int R = p.R, lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  const double *u = p.u + b * R, *inverse = p.chol_inv + b * R * R;
  double* z = p.z + b * R;
  for (int i = warp; i < R; i += warps) {
    double sum = 0.0;
    for (int j = lane; j <= i; j += kWarp) sum += inverse[static_cast<int64_t>(i) * R + j] * (u[j] - z[j]);
    sum = warp_sum(sum);
    if (lane == 0) y[i] = sum;
  }
  for (int j = threadIdx.x; j < R; j += blockDim.x) y[R + j] = z[j];
  __syncthreads();
  for (int j = threadIdx.x; j < R; j += blockDim.x) {
    double sum = z[j];
    for (int i = j; i < R; ++i) sum += inverse[static_cast<int64_t>(i) * R + j] * y[i];
    z[j] = sum;
  }
  if (warp == 0) {
    double sum = 0.0;
    for (int i = lane; i < R; i += kWarp) sum += y[R + i] * y[R + i] - y[i] * y[i];
    sum = warp_sum(sum);
    if (lane == 0) p.maha[b] = p.quad[b] + sum;
  }
  __syncthreads();
}

// ---- the second pass ----

// Block (split, pair, b); nothing of the items for which it is not wanted.
template <class T, int kTile, class Sum>
__global__ void __launch_bounds__(kThreads, 1) again_kernel(const AgainArgs p) {
  extern __shared__ double memory[];
  const int64_t of_item = p.gram.splits * p.gram.pairs, b = blockIdx.x / of_item;
  const int kind = p.finish.judge.again[b];
  if (kind == kNothing) return;
  if (kind == kInFloat64)
    sum_tiles<T, double, kTile>(p.gram, blockIdx.x, memory);
  else
    sum_residuals<T, kTile / 16, 16, Sum>(p.gram, p.finish.capacitance.z, blockIdx.x, memory);
  if (!is_last(p.finish.tickets + 2 * b, of_item)) return;
  const AddArgs& add = p.finish.add;
  const SlotLayout at(add.columns, add.N, add.slots_have_gram);
  for (int64_t first = kind == kInFloat64 ? 0 : at.u; first < at.numbers; first += kWarp)
    if (kind == kInFloat64 || first < at.log_diag) add_numbers(add, b, first, memory);
  __syncthreads();
  if (kind == kInFloat64)
    factorise(p.finish.capacitance, b, memory);
  else
    refine(p.finish.capacitance, b, memory);
  __syncthreads();
  settle(p.finish.settle, b);
}

}  // namespace lrd::cuda
