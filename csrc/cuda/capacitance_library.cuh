// L and L^-1 above kBlockedRank, by torch's own routines, which go to cuSOLVER and cuBLAS.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <array>

#include "common.cuh"
#include "ops.h"

namespace lrd::cuda {

__global__ void __launch_bounds__(kThreads, 1) prepare_kernel(const PrepareArgs p) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= p.B * p.R * p.R) return;
  const int64_t i = at / p.R % p.R, j = at % p.R;
  const double x = p.gram[at];
  // Every exact pivot is at least 1. Where rounding made one negative, as much is added as rounding may have taken.
  const double nudge = i == j ? static_cast<double>(p.R) * kPivotNudge * (1.0 + x) : 0.0;
  p.matrix[at] = x + (i == j ? 1.0 : 0.0);
  p.nudged[at] = p.matrix[at] + nudge;
  if (at < p.R * p.R) p.identity[at] = i == j ? 1.0 : 0.0;
}

__global__ void __launch_bounds__(kThreads, 1) take_kernel(const TakeArgs p) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t b = at / (p.R * p.R), i = at / p.R % p.R, j = at % p.R;
  if (b >= p.B || (p.again && !p.again[b])) return;
  const double* from = p.failed && p.failed[b] ? p.second : p.first;
  p.to[at] = j <= i ? from[b * p.stride_b + i * p.stride_i + j * p.stride_j] : 0.0;
}

namespace detail = torch::stable::detail;

// (L, info) of matrices [B, R, R]; nothing is looked at on the host.
inline std::array<Tensor, 2> library_cholesky(const Tensor& matrix) {
  std::array<StableIValue, 3> stack{detail::from(matrix), detail::from(false),
                                    detail::from(false)};  // upper, check_errors
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::linalg_cholesky_ex", "", stack.data(), TORCH_ABI_VERSION));
  return {detail::to<Tensor>(stack[0]), detail::to<Tensor>(stack[1])};
}

inline Tensor library_solve(const Tensor& lower, const Tensor& right) {
  std::array<StableIValue, 5> stack{detail::from(lower), detail::from(right), detail::from(false), detail::from(true),
                                    detail::from(false)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::linalg_solve_triangular", "", stack.data(), TORCH_ABI_VERSION));
  return detail::to<Tensor>(stack[0]);
}

// Writes args.chol and args.chol_inv.
inline void factorise_by_library(const Gpu& gpu, const Tensor& like, int64_t B, const CapacitancePlan& plan,
                                 const CapacitanceArgs& args) {
  const int64_t R = args.R;
  const Tensor matrix = empty_doubles(like, {B, R, R}), nudged = empty_doubles(like, {B, R, R});
  const Tensor identity = empty_doubles(like, {R, R}), chol = empty_doubles(like, {B, R, R});
  gpu.launch(prepare_kernel, plan.entries,
             PrepareArgs{args.gram, doubles(matrix), doubles(nudged), doubles(identity), B, R});
  const auto [first, failed] = library_cholesky(matrix);
  const Tensor second = library_cholesky(nudged)[0];
  TakeArgs take{nullptr,
                static_cast<const int32_t*>(failed.const_data_ptr()),
                const_doubles(first),
                const_doubles(second),
                first.stride(0),
                first.stride(1),
                first.stride(2),
                doubles(chol),
                B,
                R};
  gpu.launch(take_kernel, plan.entries, take);
  const Tensor inverse = library_solve(chol, identity);
  take = {args.again,        nullptr,           const_doubles(inverse), nullptr, inverse.stride(0),
          inverse.stride(1), inverse.stride(2), args.chol_inv,          B,       R};
  gpu.launch(take_kernel, plan.entries, take);
  take.first = const_doubles(chol);
  take.stride_b = R * R, take.stride_i = R, take.stride_j = 1;
  take.to = args.chol;
  gpu.launch(take_kernel, plan.entries, take);
}

}  // namespace lrd::cuda
