// The backward pass of small ranks, of one value at most: one thread per row, v = L^-1 p and q = L^-T v in the place of
// p. No float64 instruction per row.
#pragma once

#include "gradient_weights.cuh"
#include "row_parts.cuh"

namespace lrd::cuda {

// Block (block of rows, f).
template <class T, int kR, bool kVector>
__global__ void __launch_bounds__(kThreads, kR <= 8 ? 2 : 1) row_grads_kernel(const BackwardArgs p) {
  constexpr int kHalf = kR * (kR + 1) / 2;
  __shared__ __align__(16) float lower[kHalf];  // L^-1, zeros beyond R; read by all lanes at once
  __shared__ __align__(16) Pair along[kR];      // z
  const int tid = threadIdx.x, R = p.R;
  const int64_t b = blockIdx.x / p.blocks, begin = blockIdx.x % p.blocks * p.block_rows, S = p.rows.S;
  const double growth = p.summary[2 * b];
  const bool good = isfinite(growth), used = good && p.rows.N > 0 && p.value_info[b] == 0;
  for (int e = tid; e < kR * kR; e += kThreads) {
    const int i = e / kR, j = e % kR;
    if (j <= i) lower[i * (i + 1) / 2 + j] = i < R ? static_cast<float>(p.chol_inv[(b * R + i) * R + j]) : 0.0f;
  }
  if (tid < kR) along[tid] = split(used && tid < R ? p.z[b * R + tid] : 0.0);
  __syncthreads();
  const float of_maha = used ? static_cast<float>(p.maha * grad_of(p, b, 0)) : 0.0f;
  const float of_logdet = p.need_logdet ? static_cast<float>(logdet_weight(p, b)) : 0.0f;
  const T* factor = static_cast<const T*>(p.factor) + b * p.factor_b;
  T* grad_factor = p.grad_factor ? static_cast<T*>(p.grad_factor) + b * p.out_b : nullptr;
  T* grad_diag = p.grad_diag ? static_cast<T*>(p.grad_diag) + b * S : nullptr;
  T* grad_loc = p.grad_loc ? static_cast<T*>(p.grad_loc) + b * S : nullptr;
  const RowReader<T> read(p.rows, b);

  int imprecise = p.flag_uncertain && p.need_logdet && !certified(growth);
  const int64_t end = min(begin + p.block_rows, S);
#pragma unroll 1
  for (int64_t row = begin + tid; row < end; row += kThreads) {
    float x[kR], of_diag = 0.0f, a = 0.0f;
    if (good && read.is_present(row)) {
      float slope;
      load_row<T, kR, kVector>(factor + row * p.factor_s, p.factor_r, R, x);
      const Pair d = read.diag(row, &slope);
      imprecise |= !is_ordinary(d.hi);
      const float w = reciprocal(d).hi;
      if (used) {
        Pair rest = read.difference(row);  // r - p . z
#pragma unroll
        for (int k = 0; k < kR; ++k) add_to(rest, scaled(along[k], -x[k]));
        a = w * (rest.hi + rest.lo);
      }
      const float coefficient = 2.0f * of_maha * a;
      of_diag = -of_maha * a * a;
      a = coefficient;
      if (p.need_logdet) {
        float norm = 0.0f;
#pragma unroll
        for (int m = kR - 1; m >= 0; --m) {
          float v = 0.0f;
#pragma unroll
          for (int j = 0; j <= m; ++j) v += lower[m * (m + 1) / 2 + j] * x[j];
          x[m] = v;
          norm += v * v;
        }
        const float leverage = w * norm, pull = 2.0f * of_logdet * w;
        imprecise |= p.flag_uncertain && !(leverage <= static_cast<float>(kHighLeverage));
        of_diag += of_logdet * w * (1.0f - leverage);
#pragma unroll
        for (int k = 0; k < kR; ++k) {
          float q = 0.0f;
#pragma unroll
          for (int m = k; m < kR; ++m) q += lower[m * (m + 1) / 2 + k] * x[m];
          x[k] = pull * q - coefficient * along[k].hi;
        }
      } else {
#pragma unroll
        for (int k = 0; k < kR; ++k) x[k] = -coefficient * along[k].hi;
      }
      of_diag *= slope;
    } else {
#pragma unroll
      for (int k = 0; k < kR; ++k) x[k] = 0.0f;
    }
    if (grad_factor) store_row<T, kR, kVector>(grad_factor + row * p.out_s, p.out_r, R, x);
    if (grad_diag) grad_diag[row] = narrow<T>(of_diag);
    if (grad_loc) grad_loc[row] = narrow<T>(-a);
  }
  imprecise = __syncthreads_or(imprecise);
  if (p.flags && tid == 0) p.flags[blockIdx.x] = imprecise != 0;
}

}  // namespace lrd::cuda
