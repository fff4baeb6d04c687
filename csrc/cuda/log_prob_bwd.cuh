// Gradients of a block of rows: one read of P and one write of its gradient. The block stays in shared memory, where
// V = P L^-T and then Q = V L^-1 take its place, a tile of columns at a time; tiles of L^-1 come from the cache.
#pragma once

#include "gradient_weights.cuh"
#include "rows.cuh"

namespace lrd::cuda {

// V = P L^-T in place: tile m of V needs the tiles of P up to m, so the last comes first.
template <class A>
__device__ void multiply_by_inverse_transposed(const double* chol_inv, int R, A* block, int pitch, int rows, int width,
                                               A* small) {
  const Share share(width);
  for (int m = (R - 1) / width * width; m >= 0; m -= width) {
    A sums[kRowsOfThread] = {};
    for (int j = 0; j <= m; j += width) {
      load_small(chol_inv, R, R, m, width, j, width, small);
      __syncthreads();
      add_products(
          block, pitch, rows, j, min(width, R - j), share, [=](int e) { return small[share.column * kSmallPitch + e]; },
          sums);
      __syncthreads();
    }
    put_column(block, pitch, rows, m + share.column, R, share, sums);
    __syncthreads();
  }
}

// Q = V L^-1 in place: tile k of Q needs the tiles of V from k on, so the first comes first.
template <class A>
__device__ void multiply_by_inverse(const double* chol_inv, int R, A* block, int pitch, int rows, int width, A* small) {
  const Share share(width);
  for (int k = 0; k < R; k += width) {
    A sums[kRowsOfThread] = {};
    for (int m = k; m < R; m += width) {
      load_small(chol_inv, R, R, m, width, k, width, small);
      __syncthreads();
      add_products(
          block, pitch, rows, m, min(width, R - m), share, [=](int e) { return small[e * kSmallPitch + share.column]; },
          sums);
      __syncthreads();
    }
    put_column(block, pitch, rows, k + share.column, R, share, sums);
    __syncthreads();
  }
}

// Block (block of rows, f).
template <class T, class A>
__global__ void __launch_bounds__(kThreads, 1) log_prob_bwd_kernel(const BackwardArgs p) {
  extern __shared__ double memory[];
  const int rows = p.block_rows, R = p.R, pitch = p.pitch, tid = threadIdx.x, lane = tid % kWarp, warp = tid / kWarp;
  Arena arena(memory);
  const BackwardShared<A> shared(arena, rows, pitch, R, p.separate_total);
  double *w = shared.w, *slope = shared.slope, *there = shared.there, *of_diag = shared.of_diag;
  double *summed = shared.summed, *coefficients = shared.coefficients, *held = shared.held;
  const bool holds = R <= kHeldRank;
  A *small = shared.small, *block = shared.block, *total = shared.total;
  const int64_t f = blockIdx.x / p.blocks, begin = blockIdx.x % p.blocks * rows, S = p.rows.S, N = p.rows.N;
  const T* factor = static_cast<const T*>(p.factor) + f * p.factor_b;
  if (p.wanted && !p.wanted[f * p.wanted_blocks + begin / p.wanted_rows]) return;

  if (p.separate_total || p.per_factor == 0)
    for (int e = tid; e < rows * pitch; e += kThreads) total[e] = 0;
  int imprecise = 0;
  for (int64_t b = f * p.per_factor; b < (f + 1) * p.per_factor; ++b) {
    __syncthreads();
    const double growth = p.summary[2 * b];
    const bool good = isfinite(growth);  // what has failed in the forward pass gets zeros
    for (int i = tid; i < rows; i += kThreads) {
      const bool present = good && begin + i < S && is_present(p.rows, b, begin + i);
      w[i] = slope[i] = of_diag[i] = summed[i] = 0.0;
      there[i] = present;
      if (present) w[i] = 1.0 / diag_of<T>(p.rows, b, begin + i, &slope[i]);
    }
    __syncthreads();
    if (R > 0) {
      Walk walk(rows, R, p.rank_major);
#pragma unroll 4
      for (int e = tid; e < rows * R; e += kThreads, walk.next()) {
        A x = 0;
        if (there[walk.row()] != 0.0)
          x = widen<A>(factor[(begin + walk.row()) * p.factor_s + walk.column() * p.factor_r]);
        block[walk.row() * pitch + walk.column()] = x;
      }
    }

    for (int64_t first = 0; first < N; first += kBackwardValues) {
      const int values = static_cast<int>(min(N - first, static_cast<int64_t>(kBackwardValues)));
      __syncthreads();
      for (int e = tid; e < values * rows; e += kThreads) {
        const int n = e / rows, i = e % rows;
        const bool used = there[i] != 0.0 && p.value_info[b * N + first + n] == 0;
        coefficients[e] = used ? difference<T>(p.rows, b, first + n, begin + i) : 0.0;
      }
      const double* z = p.z + (b * N + first) * R;
      if (holds)
        for (int e = tid; e < values * R; e += kThreads) held[e] = z[e];
      const auto z_of = [=](int n, int j) { return holds ? held[n * R + j] : z[n * R + j]; };
      __syncthreads();
      double weight = 0.0;  // lane n has what is of value n
      if (lane < values && p.value_info[b * N + first + lane] == 0) weight = p.maha * grad_of(p, b, first + lane);
      for (int i = warp; i < rows; i += kThreads / kWarp) {
        double own = 0.0, of_row = 0.0;
        for (int n = 0; n < values; ++n) {
          double along = 0.0;
          for (int j = lane; j < R; j += kWarp) along += static_cast<double>(block[i * pitch + j]) * z_of(n, j);
          along = warp_sum(along);
          if (lane == n) own = along;
        }
        if (lane < values) {
          const double a = w[i] * (coefficients[lane * rows + i] - own);
          of_row = -weight * a * a;
          coefficients[lane * rows + i] = 2.0 * weight * a;
        }
        of_row = warp_sum(of_row);
        if (lane == 0) of_diag[i] += of_row;
      }
      __syncthreads();
      if (p.grad_loc)
        for (int e = tid; e < values * rows; e += kThreads) {
          const int n = e / rows, i = e % rows;
          if (!p.sum_loc && begin + i < S)
            static_cast<T*>(p.grad_loc)[(b * N + first + n) * S + begin + i] = narrow<T>(-coefficients[e]);
        }
      if (p.grad_loc && p.sum_loc)
        for (int i = tid; i < rows; i += kThreads)
          for (int n = 0; n < values; ++n) summed[i] -= coefficients[n * rows + i];
      if (p.grad_factor && p.separate_total && R > 0) {
        Walk walk(rows, R, false);
        for (int e = tid; e < rows * R; e += kThreads, walk.next()) {
          A pull = 0;
          for (int n = 0; n < values; ++n)
            pull += static_cast<A>(coefficients[n * rows + walk.row()]) * static_cast<A>(z_of(n, walk.column()));
          total[walk.row() * pitch + walk.column()] -= pull;
        }
      }
    }
    __syncthreads();

    double weight = 0.0;
    if (p.need_logdet) {
      weight = logdet_weight(p, b);
      const double* chol_inv = p.chol_inv + b * R * R;
      if (R > 0) multiply_by_inverse_transposed(chol_inv, R, block, pitch, rows, p.width, small);
      for (int i = warp; i < rows; i += kThreads / kWarp) {
        double norm = 0.0;
        for (int j = lane; j < R; j += kWarp) {
          const double v = static_cast<double>(block[i * pitch + j]);
          norm += v * v;
        }
        const double leverage = w[i] * warp_sum(norm);
        if (leverage > kHighLeverage || !certified(growth)) imprecise = 1;
        if (lane == 0) of_diag[i] += weight * w[i] * (1.0 - leverage);
      }
      __syncthreads();
      if (p.grad_factor && R > 0) multiply_by_inverse(chol_inv, R, block, pitch, rows, p.width, small);
    }
    if (p.grad_factor && R > 0 && (p.need_logdet || !p.separate_total)) {
      const int values = p.separate_total ? 0 : static_cast<int>(N);
      const double* z = p.z + b * N * R;
      Walk walk(rows, R, false);
      for (int e = tid; e < rows * R; e += kThreads, walk.next()) {
        const int i = walk.row(), at = i * pitch + walk.column();
        A pull = p.need_logdet ? block[at] * static_cast<A>(2.0 * weight * w[i]) : A(0);
        for (int n = 0; n < values; ++n)
          pull -= static_cast<A>(coefficients[n * rows + i]) *
                  static_cast<A>(holds ? held[n * R + walk.column()] : z[n * R + walk.column()]);
        total[at] = p.separate_total ? total[at] + pull : pull;
      }
    }
    for (int i = tid; i < rows; i += kThreads) {
      if (begin + i >= S) continue;
      if (p.grad_diag)
        static_cast<T*>(p.grad_diag)[b * S + begin + i] = narrow<T>(there[i] != 0.0 ? of_diag[i] * slope[i] : 0.0);
      if (p.grad_loc && p.sum_loc) static_cast<T*>(p.grad_loc)[b * S + begin + i] = narrow<T>(summed[i]);
    }
  }
  if (p.flags) {
    const int any = __syncthreads_or(imprecise);
    if (tid == 0) p.flags[blockIdx.x] = any != 0;
  }
  __syncthreads();
  if (!p.grad_factor || R == 0) return;
  T* out = static_cast<T*>(p.grad_factor) + f * p.out_b;
  Walk walk(rows, R, p.rank_major);
  for (int e = tid; e < rows * R; e += kThreads, walk.next())
    if (begin + walk.row() < S)
      out[(begin + walk.row()) * p.out_s + walk.column() * p.out_r] =
          narrow<T>(total[walk.row() * pitch + walk.column()]);
}

}  // namespace lrd::cuda
