// Between and after the R-sized algebra: whether the sums were accurate enough, and the number that is wanted.
#pragma once

#include "common.cuh"

namespace lrd::cuda {

// By a whole block: what is to be done again of item b. Every thread gets it.
__device__ __forceinline__ int judge(const JudgeArgs& p, int64_t b) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp, R = p.R;
  const double growth = p.summary[2 * b], logdet = p.summary[2 * b + 1];
  const double* gram = p.gram + b * R * R;
  int wide = p.odd && p.odd[b], cancels = 0;
  if (p.by_certificate) {
    wide |= !(growth <= p.growth_limit);
    for (int64_t n = warp; n < p.N; n += warps) {
      const int64_t at = b * p.N + n;
      double weighted = 0.0;
      for (int j = lane; j < R; j += kWarp) {
        const double z = p.z[at * R + j];
        weighted += z * z * gram[static_cast<int64_t>(j) * R + j];
      }
      weighted = warp_sum(weighted);
      const double quad = p.quad[at], maha = p.maha[at];
      const double error = maha_error(p.sum_error, weighted, quad) + p.quad_error * quad;
      if (!tolerable(error, maha, logdet, p.S)) cancels = 1;
    }
  }
  wide = __syncthreads_or(wide || (cancels && !p.by_residuals));
  cancels = __syncthreads_or(cancels);
  const int again = wide ? kInFloat64 : cancels ? kByResiduals : kNothing;
  if (threadIdx.x == 0) p.again[b] = again;
  return again;
}

// By a whole block: results of item b; what is not finite has failed, is NaN, and pulls at nothing.
__device__ __forceinline__ void settle(const SettleArgs& p, int64_t b) {
  const bool good = isfinite(p.summary[2 * b]);
  const double base = p.of_logdet * p.summary[2 * b + 1] + p.constant;
  const int64_t results = p.N > 0 ? p.N : 1;
  for (int64_t n = threadIdx.x; n < results; n += blockDim.x) {
    double number = base;
    bool failed = !good;
    if (p.N > 0) {
      const double maha = p.maha[b * p.N + n];
      failed = failed || !isfinite(maha);
      number += p.of_maha * (maha < 0.0 ? 0.0 : maha);  // a sum of squares: below zero it is rounding
      p.value_info[b * p.N + n] = failed;
    }
    if (failed) number = nan_of_double();
    if (p.wide)
      static_cast<double*>(p.result)[b * results + n] = number;
    else
      static_cast<float*>(p.result)[b * results + n] = static_cast<float>(number);
  }
  for (int64_t e = threadIdx.x; e < p.N * p.R; e += blockDim.x)
    if (!good || !isfinite(p.maha[b * p.N + e / p.R])) p.z[b * p.N * p.R + e] = 0.0;
}

// Block per item.
__global__ void __launch_bounds__(128) judge_kernel(const JudgeArgs p) { judge(p, blockIdx.x); }
__global__ void __launch_bounds__(128) settle_kernel(const SettleArgs p) { settle(p, blockIdx.x); }

}  // namespace lrd::cuda
