// Element types, and the inputs of the kernels on raw pointers. Strides count elements.
#pragma once

#include <cstdint>

namespace lrd {

enum class DType : int { f32 = 0, f64 = 1, bf16 = 2, f16 = 3 };
constexpr int kDTypes = 4;

// In what the S-sized products are formed. Block sums are always flushed to double.
enum class Compute : int { f32 = 0, f64 = 1 };
constexpr int kComputes = 2;

// A float64 input is never narrowed.
constexpr Compute compute_for(DType dtype, bool float32) {
  return float32 && dtype != DType::f64 ? Compute::f32 : Compute::f64;
}

// Storage of the two half types: bits only, converted by load()/store() in convert.h.
struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

// Strided read-only vector of S entries; a null pointer means "not given".
struct VectorView {
  const void* data = nullptr;
  int64_t stride = 0;
};

// Strided read-only matrix [S, R].
struct MatrixView {
  const void* data = nullptr;
  int64_t S = 0;
  int64_t R = 0;
  int64_t stride_s = 0;
  int64_t stride_r = 0;
};

// The inputs of one batch item: a covariance diag(D) + P P^T and N values scored against it.
struct GaussianInputs {
  MatrixView factor;  // P [S, R]
  int64_t N = 0;

  VectorView diag;        // D [S], or the raw diagonal when exp_diag is set
  bool exp_diag = false;  // D = eps + exp(diag)
  double eps = 0.0;

  VectorView mask;  // uint8 [S]; 0 means that this output does not exist

  VectorView value;  // [N, S]
  int64_t value_stride_n = 0;
  VectorView loc;  // [N, S]
  int64_t loc_stride_n = 0;
};

// The columns of a joint covariance where they lie: T blocks [S, R], then V vectors [S], each group times its scale and
// the vectors, where asked for, less their mean.
struct Stack {
  int64_t S = 0;
  int64_t T = 0;
  int64_t R = 0;
  int64_t V = 0;

  const void* factors = nullptr;  // [T, S, R]
  int64_t factor_stride_t = 0;
  int64_t factor_stride_s = 0;
  int64_t factor_stride_r = 0;
  double factor_scale = 1.0;

  const void* vectors = nullptr;  // [V, S]
  int64_t vector_stride_v = 0;
  int64_t vector_stride_s = 0;
  double vector_scale = 1.0;
  bool centre = false;

  int64_t columns() const { return T * R + V; }
};

}  // namespace lrd
