// What the kernels share: numbers of the four dtypes, sums over a warp, the diagonal of a row.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "args.h"
#include "plans.h"

namespace lrd::cuda {

// Blocks that a multiprocessor is to hold at a time: as many as registers allow without spills.
template <class A>
constexpr int kResident = sizeof(A) == 8 ? 1 : 2;

template <class A, class T>
__device__ __forceinline__ A widen(T x) {
  if constexpr (sizeof(T) == 2)
    return static_cast<A>(static_cast<float>(x));
  else
    return static_cast<A>(x);
}

// By way of float32 where T is a half type.
template <class T, class A>
__device__ __forceinline__ T narrow(A x) {
  if constexpr (sizeof(T) == 2)
    return static_cast<T>(static_cast<float>(x));
  else
    return static_cast<T>(x);
}

template <class T>
__device__ __forceinline__ double at(const void* vector, int64_t offset) {
  return widen<double>(static_cast<const T*>(vector)[offset]);
}

__device__ __forceinline__ double nan_of_double() { return __longlong_as_double(0x7ff8000000000000ll); }
__device__ __forceinline__ double infinity_of_double() { return __longlong_as_double(0x7ff0000000000000ll); }

// Over all lanes; each gets the sum, always added in the same order.
__device__ __forceinline__ double warp_sum(double x) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

// D of a row that is present, and its derivative for the stored number.
template <class T>
__device__ __forceinline__ double diag_of(const Rows& rows, int64_t b, int64_t row, double* slope) {
  const double raw = at<T>(rows.diag, b * rows.diag_b + row * rows.diag_s);
  if (!rows.exp_diag) {
    *slope = 1.0;
    return raw;
  }
  *slope = exp(raw > rows.limit && raw < infinity_of_double() ? rows.limit : raw);
  return rows.eps + *slope;
}

__device__ __forceinline__ bool is_present(const Rows& rows, int64_t b, int64_t row) {
  return !rows.mask || rows.mask[b * rows.mask_b + row * rows.mask_s] != 0;
}

// value - loc of a row.
template <class T>
__device__ __forceinline__ double difference(const Rows& rows, int64_t b, int64_t n, int64_t row) {
  double r = at<T>(rows.value, b * rows.value_b + n * rows.value_n + row * rows.value_s);
  if (rows.loc) r -= at<T>(rows.loc, b * rows.loc_b + n * rows.loc_n + row * rows.loc_s);
  return r;
}

// ---- launches whose last block does what is left ----

// Before such a launch.
__device__ __forceinline__ void reset_tickets(int32_t* tickets, int64_t B) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (tickets && at < 2 * B) tickets[at] = 0;
}

// Whether this block is the last of `blocks` to come here: it sees what the others have written before.
__device__ __forceinline__ bool is_last(int32_t* ticket, int64_t blocks) {
  __threadfence();
  __syncthreads();
  int last = 0;
  if (threadIdx.x == 0) last = atomicAdd(ticket, 1) == blocks - 1;
  last = __syncthreads_or(last);
  __threadfence();
  return last;
}

// One number of a stack of columns, scaled and centred.
template <class T, class A>
__device__ __forceinline__ A column_entry(const Columns& columns, const T* factors, const T* vectors,
                                          const double* mean, int64_t row, int column) {
  if (column < columns.of_factors) {
    const int block = column / columns.R;
    const int64_t where = block * columns.factor_t + (column - block * columns.R) * columns.factor_r;
    return widen<A>(factors[where + row * columns.factor_s]) * static_cast<A>(columns.factor_scale);
  }
  double x = widen<double>(vectors[(column - columns.of_factors) * columns.vector_v + row * columns.vector_s]);
  if (mean) x -= mean[row];
  return static_cast<A>(x * columns.vector_scale);
}

// Walks a block of rows and columns, neighbouring threads along the contiguous dimension: the row and the column of a
// thread, and of its next ones, without divisions on the way.
class Walk {
 public:
  __device__ __forceinline__ Walk(int rows, int columns, bool along_rows)
      : along_rows_(along_rows), limit_(along_rows ? rows : columns) {
    inner_step_ = kThreads % limit_;
    outer_step_ = kThreads / limit_;
    inner_ = threadIdx.x % limit_;
    outer_ = threadIdx.x / limit_;
  }
  __device__ __forceinline__ int row() const { return along_rows_ ? inner_ : outer_; }
  __device__ __forceinline__ int column() const { return along_rows_ ? outer_ : inner_; }
  __device__ __forceinline__ void next() {
    inner_ += inner_step_;
    outer_ += outer_step_;
    if (inner_ >= limit_) {
      inner_ -= limit_;
      ++outer_;
    }
  }

 private:
  bool along_rows_;
  int limit_, inner_, outer_, inner_step_, outer_step_;
};

}  // namespace lrd::cuda
