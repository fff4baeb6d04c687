// The R-sized algebra in double: C = I + G, its factor L, L^-1, z = C^-1 u, M, log det and growth. One block per matrix
// up to kFusedRank; the blocked kernels are in capacitance_blocked.cuh.
#pragma once

#include "common.cuh"

namespace lrd::cuda {

// C is at least the identity, so every exact pivot is at least 1: a smaller one is rounding, and is put right.
__device__ __forceinline__ double mend_pivot(double pivot) {
  if (!isfinite(pivot)) return nan_of_double();
  return pivot < 1.0 ? 1.0 : pivot;
}

__device__ __forceinline__ int packed(int i, int j) { return i * (i + 1) / 2 + j; }

// The largest of what the warps found and at least 1, infinity where one found a number that is not finite. `found` has
// room for a number of each warp; only thread 0 gets the result.
__device__ __forceinline__ double largest_growth(double own, double* found) {
  const int warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  if (threadIdx.x % kWarp == 0) found[warp] = own;
  __syncthreads();
  double growth = 1.0;
  if (threadIdx.x == 0)
    for (int w = 0; w < warps; ++w) {
      if (!isfinite(found[w])) growth = infinity_of_double();
      if (found[w] > growth) growth = found[w];
    }
  return growth;
}

__device__ __forceinline__ void store_summary(const CapacitanceArgs& p, int64_t b, double logdet, double growth) {
  p.logdet[b * p.stride] = logdet;
  p.growth[b * p.stride] = isfinite(logdet) ? growth : infinity_of_double();
}

// z and M of value n by L^-1: y = L^-1 u, z = L^-T y, M = quad - |y|^2. `inverse(i, j)` reads L^-1, `y` has room for R.
template <class Inverse>
__device__ void solve_value(const CapacitanceArgs& p, int64_t b, int64_t n, double* y, Inverse inverse) {
  const int R = p.R, lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  const double* u = p.u + (b * p.N + n) * R;
  for (int i = warp; i < R; i += warps) {
    double sum = 0.0;
    for (int j = lane; j <= i; j += kWarp) sum += inverse(i, j) * u[j];
    sum = warp_sum(sum);
    if (lane == 0) y[i] = sum;
  }
  __syncthreads();
  double* z = p.z + (b * p.N + n) * R;
  for (int j = threadIdx.x; j < R; j += blockDim.x) {
    double sum = 0.0;
    for (int i = j; i < R; ++i) sum += inverse(i, j) * y[i];
    z[j] = sum;
  }
  if (warp == 0) {
    double norm = 0.0;
    for (int i = lane; i < R; i += kWarp) norm += y[i] * y[i];
    norm = warp_sum(norm);
    if (lane == 0) p.maha[b * p.N + n] = p.quad[b * p.N + n] - norm;
  }
  __syncthreads();  // before y is used again
}

// One sweep makes both factors: with C = M^-1 diag(d) M^-T, step k subtracts column k from the columns to its right,
// and row k of M from those of the rows below, in place; M takes the room of the columns that are done. Column k itself
// is kept aside, so that one barrier a step is enough.
// By a whole block, for matrix b; `memory` for a CapacitanceShared.
__device__ __forceinline__ void factorise(const CapacitanceArgs& p, int64_t b, double* memory) {
  __shared__ double found[kThreads / kWarp];
  const int R = p.R, tid = threadIdx.x, threads = blockDim.x, lane = tid % kWarp, warp = tid / kWarp;
  Arena arena(memory);
  const CapacitanceShared shared(arena, R);
  double *tri = shared.tri, *gram_diag = shared.gram_diag, *pivots = shared.pivots, *y = shared.y;
  double* columns = shared.columns;  // in turn
  const double* gram = p.gram + b * R * R;
  double* chol = p.chol ? p.chol + b * R * R : nullptr;
  const int across = 16, tx = tid % across, ty = tid / across, down = threads / across;

  for (int i = ty; i < R; i += down)
    for (int j = tx; j <= i; j += across) {
      const double x = gram[static_cast<int64_t>(i) * R + j];
      if (i == j) gram_diag[i] = x;
      tri[packed(i, j)] = i == j ? 1.0 + x : x;
      if (j == 0) columns[i] = i == 0 ? 1.0 + x : x;
    }
  __syncthreads();

  for (int k = 0; k < R; ++k) {
    const double* own = columns + k % 2 * R;
    double* next = columns + (k + 1) % 2 * R;
    const double pivot = mend_pivot(own[k]), inverse = 1.0 / pivot;
    if (tid == 0) pivots[k] = pivot;
    for (int i = k + 1 + ty; i < R; i += down) {
      const double factor = own[i] * inverse;
      for (int j = tx; j <= i; j += across) {
        double& x = tri[packed(i, j)];
        if (j == k) {
          x = -factor;
        } else {
          x -= factor * (j < k ? tri[packed(k, j)] : own[j]);
          if (j == k + 1) next[i] = x;
        }
      }
    }
    if (chol) {
      const double root = sqrt(pivot);
      for (int i = k + tid; i < R; i += threads) chol[static_cast<int64_t>(i) * R + k] = i == k ? root : own[i] / root;
      for (int j = k + 1 + tid; j < R; j += threads) chol[static_cast<int64_t>(k) * R + j] = 0.0;
    }
    __syncthreads();
  }

  double* chol_inv = p.chol_inv + b * R * R;
  for (int i = ty; i < R; i += down) {
    const double scale = 1.0 / sqrt(pivots[i]);
    for (int j = tx; j < R; j += across) {
      const double x = j < i ? tri[packed(i, j)] * scale : j == i ? scale : 0.0;
      if (j <= i) tri[packed(i, j)] = x;
      chol_inv[static_cast<int64_t>(i) * R + j] = x;
    }
  }
  __syncthreads();

  double most = 0.0;
  for (int i = warp; i < R; i += threads / kWarp) {
    double sum = 0.0;
    for (int j = lane; j <= i; j += kWarp) sum += tri[packed(i, j)] * tri[packed(i, j)] * gram_diag[j];
    sum = warp_sum(sum);
    if (!(sum <= most)) most = sum;
  }
  const double growth = largest_growth(most, found);
  if (warp == 0) {
    double logs = 0.0;
    for (int i = lane; i < R; i += kWarp) logs += log(pivots[i]);
    logs = warp_sum(logs);
    if (lane == 0) store_summary(p, b, p.log_diag[b] + logs, growth);
  }
  if (p.N <= kFusedValues)
    for (int64_t n = 0; n < p.N; ++n) solve_value(p, b, n, y, [=](int i, int j) { return tri[packed(i, j)]; });
}

}  // namespace lrd::cuda
