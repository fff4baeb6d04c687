// A block of rows of a stack in another basis, and the diagonal with what that leaves out. One read of the stack.
#pragma once

#include "rows.cuh"

namespace lrd::cuda {

// Block (block of rows, b).
template <class T, class A>
__global__ void __launch_bounds__(kThreads, 1) project_fold_kernel(const ProjectArgs p) {
  extern __shared__ double memory[];
  const int rows = p.block_rows, pitch = p.pitch, columns = p.columns.total, width = p.width, tid = threadIdx.x;
  Arena arena(memory);
  const ProjectShared<A> shared(arena, rows, pitch);
  double* lost = shared.lost;
  A *made = shared.made, *small = shared.small, *block = shared.block;
  const int64_t b = blockIdx.x / p.blocks, begin = blockIdx.x % p.blocks * rows;
  const int present = static_cast<int>(min(static_cast<int64_t>(rows), p.S - begin));
  const T* factors = static_cast<const T*>(p.columns.factors) + b * p.columns.factor_b;
  const T* vectors = static_cast<const T*>(p.columns.vectors) + b * p.columns.vector_b;
  const double* mean = p.columns.mean ? p.columns.mean + b * p.S : nullptr;
  const double* basis = p.basis + b * columns * p.K;
  T* factor = static_cast<T*>(p.factor) + b * p.out_b;
  const Share share(width);

  if (columns > 0) {
    Walk walk(rows, columns, p.columns.rank_major);
#pragma unroll 4
    for (int e = tid; e < rows * columns; e += kThreads, walk.next()) {
      A x = 0;
      if (walk.row() < present)
        x = column_entry<T, A>(p.columns, factors, vectors, mean, begin + walk.row(), walk.column());
      block[walk.row() * pitch + walk.column()] = x;
    }
  }
  __syncthreads();
  for (int i = tid / kWarp; i < rows; i += kThreads / kWarp) {
    double sum = 0.0;
    for (int j = tid % kWarp; j < columns; j += kWarp) {
      const double x = static_cast<double>(block[i * pitch + j]);
      sum += x * x;
    }
    sum = warp_sum(sum);
    if (tid % kWarp == 0) lost[i] = sum;
  }

  for (int first = 0; first < p.K; first += width) {
    A sums[kRowsOfThread] = {};
    for (int j = 0; j < columns; j += kBasisTile) {
      load_small(basis, columns, p.K, j, kBasisTile, first, width, small);
      __syncthreads();
      add_products(
          block, pitch, rows, j, min(kBasisTile, columns - j), share,
          [=](int e) { return small[e * kSmallPitch + share.column]; }, sums);
      __syncthreads();
    }
#pragma unroll
    for (int k = 0; k < kRowsOfThread; ++k) sums[k] = widen<A>(narrow<T>(sums[k]));  // as it will be stored
    put_column(made, kSmallPitch, rows, share.column, width, share, sums);
    __syncthreads();
    const int count = min(width, p.K - first);
    Walk walk(rows, count, p.out_rank_major);
    for (int e = tid; e < rows * count; e += kThreads, walk.next())
      if (walk.row() < present)
        factor[(begin + walk.row()) * p.out_s + (first + walk.column()) * p.out_r] =
            narrow<T>(made[walk.row() * kSmallPitch + walk.column()]);
    // what is folded is what was not stored
    for (int i = tid; i < rows; i += kThreads)
      for (int c = 0; c < count; ++c) {
        const double x = static_cast<double>(made[i * kSmallPitch + c]);
        lost[i] -= x * x;
      }
    __syncthreads();
  }
  __syncthreads();
  for (int i = tid; i < present; i += kThreads) {
    double d = at<T>(p.diag, b * p.diag_b + (begin + i) * p.diag_s);
    if (p.fold) d += lost[i] < 0.0 ? 0.0 : lost[i];
    static_cast<T*>(p.folded)[b * p.S + begin + i] = narrow<T>(d);
  }
}

}  // namespace lrd::cuda
