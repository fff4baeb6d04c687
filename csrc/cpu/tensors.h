// From stable-ABI tensors to the core's raw pointers, with the checks that keep a wrong call from reading astray.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <optional>

#include "../core/kernels.h"
#include "../core/policy.h"
#include "../core/types.h"

namespace lrd {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline DType dtype_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return DType::f32;
    case ScalarType::Double:
      return DType::f64;
    case ScalarType::BFloat16:
      return DType::bf16;
    case ScalarType::Half:
      return DType::f16;
    default:
      STD_TORCH_CHECK(false, "lrd: cov_factor must be float32, float64, bfloat16 or float16");
  }
}

// S, not R, is the contiguous dimension of [..., S, R].
inline bool is_rank_major(const Tensor& factor) {
  return factor.stride(factor.dim() - 1) != 1 && factor.stride(factor.dim() - 2) == 1;
}

// Where entry `index` of the first dimension begins.
inline const void* entry(const Tensor& tensor, int64_t index) {
  return static_cast<const char*>(tensor.const_data_ptr()) +
         index * tensor.stride(0) * static_cast<int64_t>(tensor.element_size());
}

// The inputs of the S-sized ops: F factors serve B Gaussians, B / F consecutive ones each; N values per Gaussian.
struct Inputs {
  const Tensor& factor;                // [F, S, R]
  const Tensor& diag;                  // [B, S]
  const std::optional<Tensor>& value;  // [B, N, S]
  const std::optional<Tensor>& loc;    // [B, N, S]
  const std::optional<Tensor>& mask;   // [B, S], bool
  const std::optional<double>& eps;    // given: D = eps + exp(diag)
  int64_t F, B, N, S, R;
  DType dtype;

  Inputs(const Tensor& factor_, const Tensor& diag_, const std::optional<Tensor>& value_,
         const std::optional<Tensor>& loc_, const std::optional<Tensor>& mask_, const std::optional<double>& eps_,
         Precision precision)
      : factor(factor_), diag(diag_), value(value_), loc(loc_), mask(mask_), eps(eps_) {
    STD_TORCH_CHECK(factor.dim() == 3 && diag.dim() == 2, "lrd: cov_factor must be [F, S, R] and cov_diag [B, S]");
    STD_TORCH_CHECK(precision >= Precision::automatic && precision <= Precision::float32,
                    "lrd: precision must be 0 (auto), 1 (float64) or 2 (float32)");
    F = factor.size(0);
    S = factor.size(1);
    R = factor.size(2);
    B = diag.size(0);
    N = value ? value->size(1) : 0;
    dtype = dtype_of(factor);
    STD_TORCH_CHECK(diag.size(1) == S && (F == 0 ? B == 0 : B % F == 0), "lrd: cov_diag does not fit cov_factor");
    check_vector(diag);
    if (mask) {
      STD_TORCH_CHECK(mask->dim() == 2 && mask->size(0) == B && mask->size(1) == S, "lrd: mask must be [B, S]");
      STD_TORCH_CHECK(mask->scalar_type() == ScalarType::Bool && mask->is_cpu(), "lrd: mask must be bool on the CPU");
    }
    if (value) check_values(*value);
    STD_TORCH_CHECK(!loc || value, "lrd: loc without value");
    if (loc) check_values(*loc);
  }

  int64_t items_per_factor() const { return F ? B / F : 0; }

  GaussianInputs item(int64_t b) const {
    GaussianInputs g;
    g.factor = {entry(factor, b / items_per_factor()), S, R, factor.stride(1), factor.stride(2)};
    g.N = N;
    g.diag = {entry(diag, b), diag.stride(1)};
    g.exp_diag = eps.has_value();
    g.eps = eps.value_or(0.0);
    if (mask) g.mask = {entry(*mask, b), mask->stride(1)};
    if (value) {
      g.value = {entry(*value, b), value->stride(2)};
      g.value_stride_n = value->stride(1);
    }
    if (loc) {
      g.loc = {entry(*loc, b), loc->stride(2)};
      g.loc_stride_n = loc->stride(1);
    }
    return g;
  }

 private:
  void check_vector(const Tensor& tensor) const {
    STD_TORCH_CHECK(tensor.scalar_type() == factor.scalar_type(), "lrd: all floating inputs must share one dtype");
    STD_TORCH_CHECK(tensor.is_cpu(), "lrd: all inputs must be on the CPU");
  }

  void check_values(const Tensor& tensor) const {
    STD_TORCH_CHECK(tensor.dim() == 3 && tensor.size(0) == B && tensor.size(1) == N && tensor.size(2) == S,
                    "lrd: value and loc must be [B, N, S]");
    check_vector(tensor);
  }
};

// What the forward op leaves of a covariance: L^-1 [B, R, R] and the summary [B, 2], growth and log det Sigma.
inline void check_factorisation(const Inputs& in, const Tensor& chol_inv, const Tensor& summary) {
  for (const Tensor* tensor : {&chol_inv, &summary})
    STD_TORCH_CHECK(tensor->scalar_type() == ScalarType::Double && tensor->is_contiguous() && tensor->is_cpu(),
                    "lrd: L^-1 and summary must be contiguous float64 on the CPU");
  STD_TORCH_CHECK(chol_inv.numel() == in.B * in.R * in.R && summary.numel() == 2 * in.B,
                  "lrd: sizes of L^-1 and summary do not fit the inputs");
}

inline int32_t shim_dtype(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float:
      return aoti_torch_dtype_float32();
    case ScalarType::Double:
      return aoti_torch_dtype_float64();
    case ScalarType::BFloat16:
      return aoti_torch_dtype_bfloat16();
    case ScalarType::Half:
      return aoti_torch_dtype_float16();
    case ScalarType::Int:
      return aoti_torch_dtype_int32();
    default:
      STD_TORCH_CHECK(false, "lrd: no such output");
  }
}

// An uninitialised CPU tensor (tensors.cpp).
Tensor allocate(int64_t dims, const int64_t* sizes, const int64_t* strides, int32_t dtype);

// A fresh CPU tensor of at most three dimensions, contiguous, or with the last two dimensions' memory swapped. Made by
// the shim itself: by way of the dispatcher it would cost as much as a small kernel.
inline Tensor empty(std::initializer_list<int64_t> shape, ScalarType dtype, bool swapped = false) {
  int64_t sizes[3], strides[3];
  const int64_t dims = static_cast<int64_t>(shape.size());
  std::copy(shape.begin(), shape.end(), sizes);
  int64_t stride = 1;
  for (int64_t d = dims - 1; d >= 0; --d) {
    strides[d] = stride;
    stride *= sizes[d] > 1 ? sizes[d] : 1;  // as torch counts for empty dimensions
  }
  if (swapped) {
    strides[dims - 1] = sizes[dims - 2] > 1 ? sizes[dims - 2] : 1;
    strides[dims - 2] = 1;
  }
  return allocate(dims, sizes, strides, shim_dtype(dtype));
}

}  // namespace lrd
