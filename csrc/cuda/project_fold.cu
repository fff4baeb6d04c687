// lrd_cuda::project_fold_fwd.
#include "dtypes.cuh"
#include "ops.h"
#include "project_fold.cuh"

namespace lrd::cuda {

std::tuple<Tensor, Tensor> project_fold_fwd_cuda(const Tensor& cov_factors, std::optional<Tensor> vectors,
                                                 double factor_scale, double vector_scale, bool centre,
                                                 const Tensor& cov_diag, const Tensor& basis, bool fold,
                                                 bool rank_major) {
  const StackInputs in(cov_factors, vectors, factor_scale, vector_scale);
  const int64_t B = in.B, S = in.S, total = in.columns.total;
  check_same_device(cov_diag, cov_factors);
  STD_TORCH_CHECK(cov_diag.dim() == 2 && cov_diag.size(0) == B && cov_diag.size(1) == S &&
                      cov_diag.scalar_type() == cov_factors.scalar_type(),
                  "lrd: cov_diag must be [B, S], with the dtype of cov_factors");
  STD_TORCH_CHECK(basis.dim() == 3, "lrd: basis must be [B, columns, K]");
  const int64_t K = basis.size(2);
  check_doubles(basis, cov_factors, B * total * K, "basis");
  const Gpu gpu(cov_factors);
  const Tensor factor = empty_like(cov_factors, {B, S, K}, rank_major), folded = empty_like(cov_factors, {B, S});
  const bool wide = is_wide(cov_factors);
  const RowsPlan plan = plan_project(B, S, total, K, wide, gpu.shared_limit());
  STD_TORCH_CHECK(plan.rows > 0, "lrd: the CUDA backend has no room for so many columns in project_fold_fwd");

  ProjectArgs args{};
  args.columns = in.columns;
  const std::optional<Tensor> mean = launch_mean(gpu, in, centre, args.columns);
  args.diag = cov_diag.const_data_ptr();
  args.diag_b = cov_diag.stride(0);
  args.diag_s = cov_diag.stride(1);
  args.basis = const_doubles(basis);
  args.factor = factor.mutable_data_ptr();
  args.folded = folded.mutable_data_ptr();
  args.out_b = factor.stride(0);
  args.out_s = factor.stride(1);
  args.out_r = factor.stride(2);
  args.out_rank_major = rank_major;
  args.fold = fold;
  args.S = S;
  args.blocks = plan.blocks;
  args.K = static_cast<int>(K);
  args.block_rows = plan.rows;
  args.width = plan.width;
  args.pitch = plan.pitch;
  with_dtype(cov_factors, [&](auto types) {
    using Chosen = decltype(types);
    gpu.launch(project_fold_kernel<typename Chosen::T, typename Chosen::A>, plan.launch, args);
  });
  return {factor, folded};
}

}  // namespace lrd::cuda
