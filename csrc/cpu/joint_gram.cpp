// lrd::joint_gram_fwd: the Gram matrix of the columns of a joint covariance, which are never put side by side.
#include <numeric>
#include <vector>

#include "errors.h"
#include "stack_inputs.h"
#include "sum_chunks.h"

namespace lrd {
namespace {

Tensor joint_gram_fwd_cpu(const Tensor& cov_factors, std::optional<Tensor> vectors, double factor_scale,
                          double vector_scale, bool centre, int64_t precision) {
  const StackInputs in(cov_factors, vectors, factor_scale, vector_scale, centre);
  const int64_t B = in.B, K = in.columns();
  Tensor gram = empty({B, K, K}, ScalarType::Double);
  double* to = gram.mutable_data_ptr<double>();
  std::vector<int64_t> items(B);
  std::iota(items.begin(), items.end(), 0);
  const Kernels& isa = kernels();
  const int compute = static_cast<int>(compute_for(in.dtype, static_cast<Precision>(precision) == Precision::float32));
  const auto joint_gram_rows = isa.joint_gram_rows[static_cast<int>(in.dtype)][compute];
  sum_chunks(
      items, in.S, all_rows(in.S), isa.joint_gram_scratch[compute](K),
      SumSizes{K, isa.padded_columns[compute](K), 0, K},
      [&](void* scratch, int64_t b, int64_t begin, int64_t end, const GramSums& sums) {
        joint_gram_rows(in.item(b), begin, end, scratch, sums);
      },
      [&](int64_t b, const GramSums& sums, bool first, bool) {
        for (int64_t j = 0; j < K; ++j) add(to + (b * K + j) * K, sums.sums + j * sums.ld, j + 1, first);
      });
  mirror(to, B, K);
  return gram;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lrd, CPU, m) { m.impl("joint_gram_fwd", boxed<&joint_gram_fwd_cpu>); }

}  // namespace lrd
