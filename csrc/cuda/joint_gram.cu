// lrd_cuda::joint_gram_fwd: the Gram pass over a stack of columns, which are never put side by side.
#include "ops.h"

namespace lrd::cuda {

Tensor joint_gram_fwd_cuda(const Tensor& cov_factors, std::optional<Tensor> vectors, double factor_scale,
                           double vector_scale, bool centre, int64_t precision) {
  const StackInputs in(cov_factors, vectors, factor_scale, vector_scale);
  const Gpu gpu(cov_factors);
  Columns columns = in.columns;
  const std::optional<Tensor> mean = launch_mean(gpu, in, centre, columns);
  const bool wide = static_cast<Precision>(precision) != Precision::float32;
  Rows rows{};
  rows.S = in.S;
  const Sums sums = empty_sums(cov_factors, in.B, 0, columns.total, true);
  launch_gram(gpu, cov_factors, in.B, columns, rows, wide, true, nullptr, sums);
  return sums.gram;
}

}  // namespace lrd::cuda
