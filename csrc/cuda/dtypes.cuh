// From a tensor's dtype and the choice of compute type to the types of a kernel.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "tensors.h"

namespace lrd::cuda {

template <class T_, class A_>
struct Types {
  using T = T_;  // of the tensors
  using A = A_;  // of the products
};

// Calls `use` with the element type.
template <class Use>
void with_dtype(const Tensor& tensor, Use use) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return use(Types<float, float>());
    case ScalarType::Double:
      return use(Types<double, double>());
    case ScalarType::BFloat16:
      return use(Types<__nv_bfloat16, float>());
    case ScalarType::Half:
      return use(Types<__half, float>());
    default:
      STD_TORCH_CHECK(false, "lrd: cov_factor must be float32, float64, bfloat16 or float16");
  }
}

// Calls `use` with the element type and the compute type: double where it is wide, or the elements are.
template <class Use>
void with_types(const Tensor& tensor, bool wide, Use use) {
  with_dtype(tensor, [&](auto types) {
    using T = typename decltype(types)::T;
    if constexpr (sizeof(T) == 8)
      use(types);
    else if (wide)
      use(Types<T, double>());
    else
      use(types);
  });
}

}  // namespace lrd::cuda
