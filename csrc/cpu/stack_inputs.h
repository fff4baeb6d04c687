// The columns of a joint covariance, from tensors to the core's raw pointers.
#pragma once

#include <cstdint>
#include <optional>

#include "tensors.h"

namespace lrd {

struct StackInputs {
  const Tensor& factors;                 // [B, T, S, R]
  const std::optional<Tensor>& vectors;  // [B, V, S]
  double factor_scale, vector_scale;
  bool centre;
  int64_t B, T, S, R, V;
  DType dtype;

  StackInputs(const Tensor& factors_, const std::optional<Tensor>& vectors_, double factor_scale_, double vector_scale_,
              bool centre_)
      : factors(factors_),
        vectors(vectors_),
        factor_scale(factor_scale_),
        vector_scale(vector_scale_),
        centre(centre_),
        dtype(dtype_of(factors_)) {
    STD_TORCH_CHECK(factors.dim() == 4 && factors.is_cpu(), "lrd: cov_factors must be [B, T, S, R] on the CPU");
    B = factors.size(0);
    T = factors.size(1);
    S = factors.size(2);
    R = factors.size(3);
    V = vectors ? vectors->size(1) : 0;
    STD_TORCH_CHECK(!vectors || (vectors->dim() == 3 && vectors->size(0) == B && vectors->size(2) == S),
                    "lrd: vectors must be [B, V, S]");
    STD_TORCH_CHECK(!vectors || (vectors->scalar_type() == factors.scalar_type() && vectors->is_cpu()),
                    "lrd: vectors must have the dtype and the device of cov_factors");
  }

  int64_t columns() const { return T * R + V; }

  Stack item(int64_t b) const {
    Stack s;
    s.S = S;
    s.T = T;
    s.R = R;
    s.V = V;
    s.factors = entry(factors, b);
    s.factor_stride_t = factors.stride(1);
    s.factor_stride_s = factors.stride(2);
    s.factor_stride_r = factors.stride(3);
    s.factor_scale = factor_scale;
    if (vectors) {
      s.vectors = entry(*vectors, b);
      s.vector_stride_v = vectors->stride(1);
      s.vector_stride_s = vectors->stride(2);
    }
    s.vector_scale = vector_scale;
    s.centre = centre;
    return s;
  }
};

}  // namespace lrd
