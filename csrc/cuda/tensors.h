// From stable-ABI tensors to the kernels' arguments, with the checks that keep a wrong call from reading astray.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <optional>

#include "../core/policy.h"
#include "args.h"

namespace lrd::cuda {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline bool is_wide(const Tensor& tensor) { return tensor.scalar_type() == ScalarType::Double; }

// S, not R, is the contiguous dimension of [..., S, R].
inline bool is_rank_major(const Tensor& factor) {
  return factor.stride(factor.dim() - 1) != 1 && factor.stride(factor.dim() - 2) == 1;
}

inline int64_t element_size(const Tensor& tensor) {
  return is_wide(tensor) ? 8 : tensor.scalar_type() == ScalarType::Float ? 4 : 2;
}

// Whether rows are contiguous and begin where 16 bytes can be read at a time.
inline bool is_aligned(const void* data, int64_t stride_b, int64_t stride_s, int64_t stride_r, int64_t size) {
  return stride_r == 1 && reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride_b * size % 16 == 0 &&
         stride_s * size % 16 == 0;
}

inline void check_same_device(const Tensor& tensor, const Tensor& other) {
  STD_TORCH_CHECK(tensor.device() == other.device(), "lrd: all inputs must be on one device");
}

inline bool is_aligned(const Columns& columns, const Tensor& factor) {
  return is_aligned(columns.factors, columns.factor_b, columns.factor_s, columns.factor_r, element_size(factor));
}

inline void check_doubles(const Tensor& tensor, const Tensor& like, int64_t numbers, const char* name) {
  check_same_device(tensor, like);
  STD_TORCH_CHECK(is_wide(tensor) && tensor.is_contiguous() && tensor.numel() == numbers, "lrd: ", name,
                  " must be contiguous float64 of the size that the other inputs ask for");
}

// Uninitialised, on the device of `like`, contiguous or with the memory of the last two dimensions swapped.
inline Tensor empty(const Tensor& like, std::initializer_list<int64_t> shape, int32_t dtype, bool swapped = false) {
  int64_t sizes[4] = {}, strides[4] = {}, stride = 1;
  const int64_t dims = static_cast<int64_t>(shape.size());
  std::copy(shape.begin(), shape.end(), sizes);
  for (int64_t d = dims - 1; d >= 0; --d) {
    strides[d] = stride;
    stride *= std::max<int64_t>(sizes[d], 1);
  }
  if (swapped) {
    strides[dims - 1] = std::max<int64_t>(sizes[dims - 2], 1);
    strides[dims - 2] = 1;
  }
  int32_t device = 0, dtype_of_like = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &dtype_of_like));
  AtenTensorHandle handle = nullptr;
  const AOTITorchError failed = aoti_torch_empty_strided(dims, sizes, strides, dtype < 0 ? dtype_of_like : dtype,
                                                         device, like.get_device_index(), &handle);
  // Callers that try again with less look for these words.
  STD_TORCH_CHECK(!failed, "lrd: CUDA out of memory: cannot allocate ", stride, " numbers");
  return Tensor(handle);
}

constexpr int32_t kSameDtype = -1;

inline Tensor empty_like(const Tensor& like, std::initializer_list<int64_t> shape, bool swapped = false) {
  return empty(like, shape, kSameDtype, swapped);
}
inline Tensor empty_doubles(const Tensor& like, std::initializer_list<int64_t> shape) {
  return empty(like, shape, aoti_torch_dtype_float64());
}

inline double* doubles(const Tensor& tensor) { return static_cast<double*>(tensor.mutable_data_ptr()); }
inline const double* const_doubles(const Tensor& tensor) { return static_cast<const double*>(tensor.const_data_ptr()); }

// The inputs of the S-sized ops: F factors serve B Gaussians, B / F consecutive ones each; N values per Gaussian.
struct Inputs {
  const Tensor& factor;  // [F, S, R]
  int64_t F, B, N, S, R;
  Rows rows;

  Inputs(const Tensor& factor_, const Tensor& diag, const std::optional<Tensor>& value,
         const std::optional<Tensor>& loc, const std::optional<Tensor>& mask, const std::optional<double>& eps);

  int64_t per_factor() const { return F ? B / F : 0; }
  // The columns of the factor itself.
  Columns columns() const;
};

// T blocks of columns, then V vectors.
struct StackInputs {
  const Tensor& factors;  // [B, T, S, R]
  int64_t B, T, S, R, V;
  Columns columns;

  StackInputs(const Tensor& factors_, const std::optional<Tensor>& vectors, double factor_scale, double vector_scale);
};

}  // namespace lrd::cuda
