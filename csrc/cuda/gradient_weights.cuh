// The weights of M and of log det Sigma in a gradient.
#pragma once

#include "common.cuh"

namespace lrd::cuda {

__device__ __forceinline__ double grad_of(const BackwardArgs& p, int64_t b, int64_t n) {
  const int64_t at = b * p.grad_b + n * p.grad_n;
  return p.wide_grad ? static_cast<const double*>(p.grad)[at] : static_cast<const float*>(p.grad)[at];
}

// The weight of log det Sigma: over the values that have not failed.
__device__ __forceinline__ double logdet_weight(const BackwardArgs& p, int64_t b) {
  if (p.rows.N == 0) return p.logdet * grad_of(p, b, 0);
  double sum = 0.0;
  for (int64_t n = 0; n < p.rows.N; ++n)
    if (p.value_info[b * p.rows.N + n] == 0) sum += grad_of(p, b, n);
  return p.logdet * sum;
}

}  // namespace lrd::cuda
