// The same above kFusedRank, by panels of kPanel columns: a launch for each panel of L, one for each panel of rows of
// L^-1. Within a launch no block reads what another writes.
#pragma once

#include "capacitance.cuh"

namespace lrd::cuda {

constexpr int kPitch = kPanel + 1;
constexpr int kSide = 16;  // threads along a side of a tile; each makes 2 x 2 of its numbers

// Tile [kPanel, kPanel] of an R x R matrix, 0 outside; with `transposed` its rows become columns.
__device__ __forceinline__ void load_panel(const double* matrix, int R, int row, int column, bool transposed,
                                           double* to) {
  for (int e = threadIdx.x; e < kPanel * kPanel; e += blockDim.x) {
    const int i = e / kPanel, j = e % kPanel;
    const bool inside = row + i < R && column + j < R;
    const double x = inside ? matrix[static_cast<int64_t>(row + i) * R + column + j] : 0.0;
    to[transposed ? j * kPitch + i : i * kPitch + j] = x;
  }
}

// sums += a^T b of tiles [k][i] and [k][j], 2 x 2 numbers of a thread.
__device__ __forceinline__ void multiply_panels(const double* a, const double* b, double (&sums)[2][2]) {
  const int i = threadIdx.x / kSide, j = threadIdx.x % kSide;
#pragma unroll 8
  for (int k = 0; k < kPanel; ++k) {
    const double a0 = a[k * kPitch + i], a1 = a[k * kPitch + i + kSide];
    const double b0 = b[k * kPitch + j], b1 = b[k * kPitch + j + kSide];
    sums[0][0] += a0 * b0;
    sums[0][1] += a0 * b1;
    sums[1][0] += a1 * b0;
    sums[1][1] += a1 * b1;
  }
}

// Tile (i, panel) of L: block (i - panel, b). Each block factorises the tile on the diagonal for itself.
__global__ void __launch_bounds__(kThreads, 1) factor_panel_kernel(const CapacitanceArgs p) {
  __shared__ double left[kPanel * kPitch], right[kPanel * kPitch], diagonal[kPanel * kPitch], own[kPanel * kPitch];
  const int R = p.R, below = p.panels - p.panel;
  const int64_t b = blockIdx.x / below;
  const int tile = p.panel + static_cast<int>(blockIdx.x % below), row = tile * kPanel, column = p.panel * kPanel;
  if (p.again && !p.again[b]) return;
  const double* gram = p.gram + b * R * R;
  double* chol = p.chol + b * R * R;

  double of_own[2][2] = {}, of_diagonal[2][2] = {};
  for (int q = 0; q < p.panel; ++q) {
    load_panel(chol, R, row, q * kPanel, true, left);
    load_panel(chol, R, column, q * kPanel, true, right);
    __syncthreads();
    multiply_panels(left, right, of_own);
    multiply_panels(right, right, of_diagonal);
    __syncthreads();
  }
  load_panel(gram, R, row, column, false, own);
  load_panel(gram, R, column, column, false, diagonal);
  __syncthreads();
  for (int m = 0; m < 2; ++m)
    for (int n = 0; n < 2; ++n) {
      const int i = threadIdx.x / kSide + m * kSide, j = threadIdx.x % kSide + n * kSide;
      own[i * kPitch + j] -= of_own[m][n];
      diagonal[i * kPitch + j] += (i == j ? 1.0 : 0.0) - of_diagonal[m][n];
    }
  __syncthreads();

  // Column k is not written from step k on: one barrier a step.
  for (int k = 0; k < kPanel; ++k) {
    const double inverse = 1.0 / mend_pivot(diagonal[k * kPitch + k]);
    for (int e = threadIdx.x; e < kPanel * kPanel; e += blockDim.x) {
      const int i = e / kPanel, j = e % kPanel;
      if (j <= k) continue;
      const double of_j = diagonal[j * kPitch + k] * inverse;
      if (i >= j) diagonal[i * kPitch + j] -= diagonal[i * kPitch + k] * of_j;
      own[i * kPitch + j] -= own[i * kPitch + k] * of_j;
    }
    __syncthreads();
  }
  for (int e = threadIdx.x; e < kPanel * kPanel; e += blockDim.x) {
    const int i = e / kPanel, j = e % kPanel;
    const double root = sqrt(mend_pivot(diagonal[j * kPitch + j]));
    if (tile == p.panel) {
      const double x = i == j ? root : i > j ? diagonal[i * kPitch + j] / root : 0.0;
      if (row + i < R && column + j < R) chol[static_cast<int64_t>(row + i) * R + column + j] = x;
    } else {
      if (row + i < R && column + j < R)
        chol[static_cast<int64_t>(row + i) * R + column + j] = own[i * kPitch + j] / root;
      // and zeros across the diagonal
      if (column + i < R && row + j < R) chol[static_cast<int64_t>(column + i) * R + row + j] = 0.0;
    }
  }
}

// Tile (panel, j) of L^-1: block (j, b). L_pp X_pj = [p = j] - sum over j <= k < p of L_pk X_kj.
__global__ void __launch_bounds__(kThreads, 1) inverse_panel_kernel(const CapacitanceArgs p) {
  __shared__ double left[kPanel * kPitch], right[kPanel * kPitch], diagonal[kPanel * kPitch], own[kPanel * kPitch];
  const int R = p.R;
  const int64_t b = blockIdx.x / p.panels;
  const int tile = static_cast<int>(blockIdx.x % p.panels), row = p.panel * kPanel, column = tile * kPanel;
  if (p.again && !p.again[b]) return;
  const double* chol = p.chol + b * R * R;
  double* chol_inv = p.chol_inv + b * R * R;

  double sums[2][2] = {};
  for (int k = tile; k < p.panel; ++k) {
    load_panel(chol, R, row, k * kPanel, true, left);
    load_panel(chol_inv, R, k * kPanel, column, false, right);
    __syncthreads();
    multiply_panels(left, right, sums);
    __syncthreads();
  }
  load_panel(chol, R, row, row, false, diagonal);
  for (int m = 0; m < 2; ++m)
    for (int n = 0; n < 2; ++n) {
      const int i = threadIdx.x / kSide + m * kSide, j = threadIdx.x % kSide + n * kSide;
      own[i * kPitch + j] = (tile == p.panel && i == j ? 1.0 : 0.0) - sums[m][n];
    }
  __syncthreads();
  const int rows = min(static_cast<int>(kPanel), R - row);
  for (int k = 0; k < rows; ++k) {
    const double inverse = 1.0 / diagonal[k * kPitch + k];
    for (int e = threadIdx.x; e < kPanel * kPanel; e += blockDim.x) {
      const int i = e / kPanel, j = e % kPanel;
      if (i > k) own[i * kPitch + j] -= diagonal[i * kPitch + k] * inverse * own[k * kPitch + j];
    }
    __syncthreads();
  }
  for (int e = threadIdx.x; e < kPanel * kPanel; e += blockDim.x) {
    const int i = e / kPanel, j = e % kPanel;
    const double x = tile <= p.panel && column + j <= row + i ? own[i * kPitch + j] / diagonal[i * kPitch + i] : 0.0;
    if (row + i < R && column + j < R) chol_inv[static_cast<int64_t>(row + i) * R + column + j] = x;
  }
}

// log det and growth: block per b.
__global__ void __launch_bounds__(kThreads, 1) capacitance_finish_kernel(const CapacitanceArgs p) {
  __shared__ double found[kThreads / kWarp];
  const int R = p.R, lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t b = blockIdx.x;
  if (p.again && !p.again[b]) return;
  const double *gram = p.gram + b * R * R, *chol = p.chol + b * R * R, *chol_inv = p.chol_inv + b * R * R;
  double most = 0.0;
  for (int i = warp; i < R; i += kThreads / kWarp) {
    double sum = 0.0;
    for (int j = lane; j <= i; j += kWarp) {
      const double x = chol_inv[static_cast<int64_t>(i) * R + j];
      sum += x * x * gram[static_cast<int64_t>(j) * R + j];
    }
    sum = warp_sum(sum);
    if (!(sum <= most)) most = sum;
  }
  const double growth = largest_growth(most, found);
  if (warp == 0) {
    double logs = 0.0;
    for (int i = lane; i < R; i += kWarp) logs += 2.0 * log(chol[static_cast<int64_t>(i) * R + i]);
    logs = warp_sum(logs);
    if (lane == 0) store_summary(p, b, p.log_diag[b] + logs, growth);
  }
}

// z and M by a known L^-1: block (n, b).
__global__ void __launch_bounds__(kThreads, 1) solve_kernel(const CapacitanceArgs p) {
  extern __shared__ double memory[];
  const int64_t b = blockIdx.x / p.N, n = blockIdx.x % p.N;
  if (p.again && !p.again[b]) return;
  const int R = p.R;
  const double* chol_inv = p.chol_inv + b * R * R;
  solve_value(p, b, n, memory, [=](int i, int j) { return chol_inv[static_cast<int64_t>(i) * R + j]; });
}

}  // namespace lrd::cuda
