// Products of a block of rows in shared memory with tiles of a small matrix.
#pragma once

#include "common.cuh"

namespace lrd::cuda {

// What a thread makes: column `column` of a tile, of the rows first, first + step, ... of the block.
struct Share {
  int column, first, step;
  __device__ __forceinline__ explicit Share(int width)
      : column(threadIdx.x % width), first(threadIdx.x / width), step(kThreads / width) {}
};

// sums[k] += sum over e < count of block[row k][from + e] * small(e), small(e) being one of the thread's own.
template <class A, class Small>
__device__ __forceinline__ void add_products(const A* block, int pitch, int rows, int from, int count, Share share,
                                             Small small, A (&sums)[kRowsOfThread]) {
  for (int e = 0; e < count; ++e) {
    const A x = small(e);
#pragma unroll
    for (int k = 0; k < kRowsOfThread; ++k) {
      const int row = share.first + k * share.step;
      if (row < rows) sums[k] += block[row * pitch + from + e] * x;
    }
  }
}

// Column `column` of the block, of which there are `columns`, becomes `sums`.
template <class A>
__device__ __forceinline__ void put_column(A* block, int pitch, int rows, int column, int columns, Share share,
                                           const A (&sums)[kRowsOfThread]) {
  if (column >= columns) return;
#pragma unroll
  for (int k = 0; k < kRowsOfThread; ++k) {
    const int row = share.first + k * share.step;
    if (row < rows) block[row * pitch + column] = sums[k];
  }
}

// Rows [row, row + height) and columns [column, column + width) of a matrix [rows, columns] to `small`, 0 outside.
template <class A>
__device__ __forceinline__ void load_small(const double* matrix, int64_t rows, int64_t columns, int row, int height,
                                           int column, int width, A* small) {
  for (int e = threadIdx.x; e < height * width; e += kThreads) {
    const int i = e / width, j = e % width;
    const bool inside = row + i < rows && column + j < columns;
    small[i * kSmallPitch + j] = inside ? static_cast<A>(matrix[(row + i) * columns + column + j]) : A(0);
  }
}

}  // namespace lrd::cuda
