// lrd::project_fold_fwd: the columns of a covariance in another basis, and the diagonal with what that leaves out.
#include <algorithm>
#include <cstdint>
#include <tuple>

#include "errors.h"
#include "scratch.h"
#include "stack_inputs.h"

namespace lrd {
namespace {

// The transpose of basis [columns, K] in the compute type, with the scales of the stack's columns and with rows of
// zeros up to a whole tile.
template <class A>
void pad_transposed(const StackInputs& in, const double* basis, int64_t K, A* to) {
  const int64_t columns = in.columns();
  for (int64_t k = 0; k < K; ++k)
    for (int64_t j = 0; j < columns; ++j)
      to[k * columns + j] = A(basis[j * K + k] * (j < in.T * in.R ? in.factor_scale : in.vector_scale));
  std::fill_n(to + K * columns, kMaxTileRows * columns, A(0));
}

std::tuple<Tensor, Tensor> project_fold_fwd_cpu(const Tensor& cov_factors, std::optional<Tensor> vectors,
                                                double factor_scale, double vector_scale, bool centre,
                                                const Tensor& cov_diag, const Tensor& basis, bool fold,
                                                bool rank_major) {
  const StackInputs in(cov_factors, vectors, factor_scale, vector_scale, centre);
  const int64_t B = in.B, S = in.S, columns = in.columns();
  STD_TORCH_CHECK(cov_diag.dim() == 2 && cov_diag.size(0) == B && cov_diag.size(1) == S && cov_diag.is_cpu() &&
                      cov_diag.scalar_type() == cov_factors.scalar_type(),
                  "lrd: cov_diag must be [B, S], with the dtype and the device of cov_factors");
  STD_TORCH_CHECK(basis.dim() == 3 && basis.size(0) == B && basis.size(1) == columns && basis.is_contiguous() &&
                      basis.is_cpu() && basis.scalar_type() == ScalarType::Double,
                  "lrd: basis must be contiguous float64 [B, columns, K] on the CPU");
  const int64_t K = basis.size(2);
  Tensor factor = empty({B, S, K}, cov_factors.scalar_type(), rank_major);
  Tensor folded = empty({B, S}, cov_factors.scalar_type());
  const Compute compute = compute_for(in.dtype, true);
  const int64_t element = static_cast<int64_t>(cov_factors.element_size());
  char* to_factor = static_cast<char*>(factor.mutable_data_ptr());
  char* to_folded = static_cast<char*>(folded.mutable_data_ptr());

  const int64_t basis_elements = (K + kMaxTileRows) * columns;
  Scratch bases(B * basis_elements * sizeof(double));
  for (int64_t b = 0; b < B; ++b) {
    const double* from = basis.const_data_ptr<double>() + b * columns * K;
    if (compute == Compute::f64)
      pad_transposed(in, from, K, bases.as<double>() + b * basis_elements);
    else
      pad_transposed(in, from, K, bases.as<float>() + b * basis_elements);
  }
  const Kernels& isa = kernels();
  const auto project = isa.project_fold_rows[static_cast<int>(in.dtype)][static_cast<int>(compute)];
  const int64_t rows = project_block_rows(columns, K);
  const int64_t blocks = (S + rows - 1) / rows;
  const auto work = [&](int64_t begin, int64_t end) {
    Scratch scratch(isa.project_scratch[static_cast<int>(compute)](columns, K));
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t b = unit / blocks, first = unit % blocks * rows;
      const size_t bytes = compute == Compute::f64 ? sizeof(double) : sizeof(float);
      const Projection to{bases.as<char>() + b * basis_elements * bytes,
                          columns,
                          K,
                          fold,
                          to_factor + b * factor.stride(0) * element,
                          factor.stride(1),
                          factor.stride(2),
                          {entry(cov_diag, b), cov_diag.stride(1)},
                          to_folded + b * S * element};
      project(in.item(b), to, first, std::min(S, first + rows), scratch.as<void>());
    }
  };
  if (B * S * (columns + K) < 16384)
    work(0, B * blocks);
  else
    in_parallel(B * blocks, work);
  return {factor, folded};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lrd, CPU, m) { m.impl("project_fold_fwd", boxed<&project_fold_fwd_cpu>); }

}  // namespace lrd
