// lrd::project_basis_bwd and lrd::project_fold_bwd: the gradients of project_fold_fwd for the basis and for the stack.
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <tuple>
#include <vector>

#include "errors.h"
#include "scratch.h"
#include "stack_inputs.h"
#include "sum_chunks.h"

namespace lrd {
namespace {

// What comes back to a projection, as tensors: projected and grad_factor [B, S, K], grad_diag [B, S].
struct PullInputs {
  const Tensor &projected, &grad_factor;
  const std::optional<Tensor>& grad_diag;
  int64_t K;

  PullInputs(const StackInputs& in, const Tensor& projected_, const Tensor& grad_factor_,
             const std::optional<Tensor>& grad_diag_)
      : projected(projected_), grad_factor(grad_factor_), grad_diag(grad_diag_) {
    for (const Tensor* tensor : {&projected, &grad_factor})
      STD_TORCH_CHECK(tensor->dim() == 3 && tensor->size(0) == in.B && tensor->size(1) == in.S && is_like(in, *tensor),
                      "lrd: projected and grad_factor must be [B, S, K], with the dtype and the device of cov_factors");
    K = projected.size(2);
    STD_TORCH_CHECK(grad_factor.size(2) == K, "lrd: grad_factor must have the columns of projected");
    STD_TORCH_CHECK(!grad_diag || (grad_diag->dim() == 2 && grad_diag->size(0) == in.B && grad_diag->size(1) == in.S &&
                                   is_like(in, *grad_diag)),
                    "lrd: grad_diag must be [B, S], with the dtype and the device of cov_factors");
  }

  Pull item(int64_t b) const {
    Pull pull{matrix(grad_factor, b), matrix(projected, b), {}};
    if (grad_diag) pull.diag = {entry(*grad_diag, b), grad_diag->stride(1)};
    return pull;
  }

 private:
  static bool is_like(const StackInputs& in, const Tensor& tensor) {
    return tensor.is_cpu() && tensor.scalar_type() == in.factors.scalar_type();
  }
  static MatrixView matrix(const Tensor& tensor, int64_t b) {
    return {entry(tensor, b), tensor.size(1), tensor.size(2), tensor.stride(1), tensor.stride(2)};
  }
};

Tensor project_basis_bwd_cpu(const Tensor& cov_factors, std::optional<Tensor> vectors, double factor_scale,
                             double vector_scale, bool centre, const Tensor& projected, const Tensor& grad_factor,
                             std::optional<Tensor> grad_diag) {
  const StackInputs in(cov_factors, vectors, factor_scale, vector_scale, centre);
  const PullInputs pulls(in, projected, grad_factor, grad_diag);
  const int64_t B = in.B, K = pulls.K, columns = in.columns();
  Tensor grad_basis = empty({B, columns, K}, ScalarType::Double);
  double* to = grad_basis.mutable_data_ptr<double>();
  std::vector<int64_t> items(B);
  std::iota(items.begin(), items.end(), 0);
  const Kernels& isa = kernels();
  const auto add_rows = isa.project_basis_bwd_rows[static_cast<int>(in.dtype)];
  sum_chunks(
      items, in.S, all_rows(in.S), isa.project_basis_bwd_scratch(columns, K),
      SumSizes{K, isa.padded_columns[static_cast<int>(Compute::f64)](columns), 0, columns + K},
      [&](void* scratch, int64_t b, int64_t begin, int64_t end, const GramSums& sums) {
        add_rows(in.item(b), pulls.item(b), begin, end, scratch, sums);
      },
      [&](int64_t b, const GramSums& sums, bool first, bool) {
        double* item = to + b * columns * K;
        for (int64_t j = 0; j < columns; ++j)
          for (int64_t k = 0; k < K; ++k)
            item[j * K + k] = (first ? 0.0 : item[j * K + k]) + sums.sums[k * sums.ld + j];
      });
  return grad_basis;
}

// The matrices of StackGrads from basis and turn [columns, K] of one item.
void fill_matrices(const StackInputs& in, const double* basis, const double* turn, int64_t K, double* turned,
                   double* back) {
  const int64_t columns = in.columns();
  for (int64_t j = 0; j < columns; ++j) {
    const double scale = j < in.T * in.R ? in.factor_scale : in.vector_scale;
    for (int64_t k = 0; k < K; ++k) {
      turned[k * columns + j] = back[j * 2 * K + K + k] = scale * turn[j * K + k];
      back[j * 2 * K + k] = scale * basis[j * K + k];
    }
  }
  std::fill_n(turned + K * columns, kMaxTileRows * columns, 0.0);
  std::fill_n(back + columns * 2 * K, kMaxTileRows * 2 * K, 0.0);
}

std::tuple<Tensor, Tensor> project_fold_bwd_cpu(const Tensor& cov_factors, std::optional<Tensor> vectors,
                                                double factor_scale, double vector_scale, bool centre,
                                                const Tensor& basis, const Tensor& turn, const Tensor& projected,
                                                const Tensor& grad_factor, std::optional<Tensor> grad_diag,
                                                bool need_factors, bool need_vectors) {
  const StackInputs in(cov_factors, vectors, factor_scale, vector_scale, centre);
  const PullInputs pulls(in, projected, grad_factor, grad_diag);
  const int64_t B = in.B, S = in.S, K = pulls.K, columns = in.columns();
  for (const Tensor* tensor : {&basis, &turn})
    STD_TORCH_CHECK(tensor->dim() == 3 && tensor->size(0) == B && tensor->size(1) == columns && tensor->size(2) == K &&
                        tensor->is_contiguous() && tensor->is_cpu() && tensor->scalar_type() == ScalarType::Double,
                    "lrd: basis and turn must be contiguous float64 [B, columns, K] on the CPU");
  // In memory the batch lies within T, and within the vectors, as it does for callers.
  const ScalarType dtype = cov_factors.scalar_type();
  Tensor factors = empty({need_factors ? in.T * B : 0, S, in.R}, dtype, is_rank_major(cov_factors));
  Tensor grad_vectors = empty({need_vectors ? in.V : 0, B, S}, dtype);
  const int64_t element = static_cast<int64_t>(cov_factors.element_size());
  char* to_factors = static_cast<char*>(factors.mutable_data_ptr());
  char* to_vectors = static_cast<char*>(grad_vectors.mutable_data_ptr());

  const int64_t turn_elements = (K + kMaxTileRows) * columns;
  const int64_t elements = turn_elements + (columns + kMaxTileRows) * 2 * K;
  const Scratch matrices(B * elements * sizeof(double));
  for (int64_t b = 0; b < B; ++b) {
    double* turned = matrices.as<double>() + b * elements;
    fill_matrices(in, basis.const_data_ptr<double>() + b * columns * K, turn.const_data_ptr<double>() + b * columns * K,
                  K, turned, turned + turn_elements);
  }
  const Kernels& isa = kernels();
  const auto write_rows = isa.project_fold_bwd_rows[static_cast<int>(in.dtype)];
  const int64_t rows = project_bwd_block_rows(columns, K);
  const int64_t blocks = (S + rows - 1) / rows;
  const auto work = [&](int64_t begin, int64_t end) {
    const Scratch scratch(isa.project_fold_bwd_scratch(columns, K));
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t b = unit / blocks, first = unit % blocks * rows;
      const double* turned = matrices.as<double>() + b * elements;
      const StackGrads to{turned,
                          turned + turn_elements,
                          need_factors ? to_factors + b * factors.stride(0) * element : nullptr,
                          B * factors.stride(0),
                          factors.stride(1),
                          factors.stride(2),
                          need_vectors ? to_vectors + b * S * element : nullptr,
                          B * S};
      write_rows(in.item(b), pulls.item(b), to, first, std::min(S, first + rows), scratch.as<void>());
    }
  };
  if (B * S * (columns + K) < 16384)
    work(0, B * blocks);
  else
    in_parallel(B * blocks, work);
  return {factors, grad_vectors};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lrd, CPU, m) {
  m.impl("project_basis_bwd", boxed<&project_basis_bwd_cpu>);
  m.impl("project_fold_bwd", boxed<&project_fold_bwd_cpu>);
}

}  // namespace lrd
