#include "tensors.h"

namespace lrd::cuda {
namespace {

double exp_limit(const Tensor& diag) {
  switch (diag.scalar_type()) {
    case ScalarType::Double:
      return kExpLimitFloat64;
    case ScalarType::BFloat16:
      return kExpLimitBFloat16;
    case ScalarType::Half:
      return kExpLimitFloat16;
    default:
      return kExpLimitFloat32;
  }
}

void check_vector(const Tensor& tensor, const Tensor& factor) {
  check_same_device(tensor, factor);
  STD_TORCH_CHECK(tensor.scalar_type() == factor.scalar_type(), "lrd: all floating inputs must share one dtype");
}

}  // namespace

Inputs::Inputs(const Tensor& factor_, const Tensor& diag, const std::optional<Tensor>& value,
               const std::optional<Tensor>& loc, const std::optional<Tensor>& mask, const std::optional<double>& eps)
    : factor(factor_), rows{} {
  STD_TORCH_CHECK(factor.dim() == 3 && diag.dim() == 2, "lrd: cov_factor must be [F, S, R] and cov_diag [B, S]");
  F = factor.size(0);
  S = factor.size(1);
  R = factor.size(2);
  B = diag.size(0);
  N = value ? value->size(1) : 0;
  STD_TORCH_CHECK(diag.size(1) == S && (F == 0 ? B == 0 : B % F == 0), "lrd: cov_diag does not fit cov_factor");
  STD_TORCH_CHECK(!loc || value, "lrd: loc without value");
  check_vector(diag, factor);
  rows.weighted = true;
  rows.diag = diag.const_data_ptr();
  rows.diag_b = diag.stride(0);
  rows.diag_s = diag.stride(1);
  rows.exp_diag = eps.has_value();
  rows.eps = eps.value_or(0.0);
  rows.limit = exp_limit(diag);
  rows.narrow_eps[0] = static_cast<float>(rows.eps);
  rows.narrow_eps[1] = static_cast<float>(rows.eps - static_cast<double>(rows.narrow_eps[0]));
  rows.narrow_limit = static_cast<float>(rows.limit);
  rows.S = S;
  rows.N = N;
  if (mask) {
    check_same_device(*mask, factor);
    STD_TORCH_CHECK(
        mask->dim() == 2 && mask->size(0) == B && mask->size(1) == S && mask->scalar_type() == ScalarType::Bool,
        "lrd: mask must be bool [B, S]");
    rows.mask = static_cast<const uint8_t*>(mask->const_data_ptr());
    rows.mask_b = mask->stride(0);
    rows.mask_s = mask->stride(1);
  }
  for (const std::optional<Tensor>* values : {&value, &loc}) {
    if (!*values) continue;
    const Tensor& tensor = **values;
    check_vector(tensor, factor);
    STD_TORCH_CHECK(tensor.dim() == 3 && tensor.size(0) == B && tensor.size(1) == N && tensor.size(2) == S,
                    "lrd: value and loc must be [B, N, S]");
    const bool is_loc = values == &loc;
    (is_loc ? rows.loc : rows.value) = tensor.const_data_ptr();
    (is_loc ? rows.loc_b : rows.value_b) = tensor.stride(0);
    (is_loc ? rows.loc_n : rows.value_n) = tensor.stride(1);
    (is_loc ? rows.loc_s : rows.value_s) = tensor.stride(2);
  }
}

Columns Inputs::columns() const {
  Columns columns{};
  columns.factors = factor.const_data_ptr();
  columns.factor_b = factor.stride(0);
  columns.factor_s = factor.stride(1);
  columns.factor_r = factor.stride(2);
  columns.per_factor = per_factor();
  columns.R = static_cast<int>(std::max<int64_t>(R, 1));
  columns.of_factors = columns.total = static_cast<int>(R);
  columns.rank_major = is_rank_major(factor);
  columns.factor_scale = 1.0;
  return columns;
}

StackInputs::StackInputs(const Tensor& factors_, const std::optional<Tensor>& vectors, double factor_scale,
                         double vector_scale)
    : factors(factors_), columns{} {
  STD_TORCH_CHECK(factors.dim() == 4, "lrd: cov_factors must be [B, T, S, R]");
  B = factors.size(0);
  T = factors.size(1);
  S = factors.size(2);
  R = factors.size(3);
  V = vectors ? vectors->size(1) : 0;
  columns.factors = factors.const_data_ptr();
  columns.factor_b = factors.stride(0);
  columns.factor_t = factors.stride(1);
  columns.factor_s = factors.stride(2);
  columns.factor_r = factors.stride(3);
  columns.per_factor = 1;
  columns.R = static_cast<int>(std::max<int64_t>(R, 1));
  columns.of_factors = static_cast<int>(T * R);
  columns.total = static_cast<int>(T * R + V);
  columns.rank_major = is_rank_major(factors);
  columns.factor_scale = factor_scale;
  columns.vector_scale = vector_scale;
  if (!vectors) return;
  check_vector(*vectors, factors);
  STD_TORCH_CHECK(vectors->dim() == 3 && vectors->size(0) == B && vectors->size(2) == S,
                  "lrd: vectors must be [B, V, S]");
  columns.vectors = vectors->const_data_ptr();
  columns.vector_b = vectors->stride(0);
  columns.vector_v = vectors->stride(1);
  columns.vector_s = vectors->stride(2);
}

}  // namespace lrd::cuda
