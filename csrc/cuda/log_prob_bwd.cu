// lrd_cuda::log_prob_bwd: a launch in float32, and one in double for the blocks of rows that ask for it: numbers out of
// range, and with precision "auto" high leverage and uncertain items. The other blocks of that launch have nothing to
// do.
#include "dtypes.cuh"
#include "log_prob_bwd.cuh"
#include "ops.h"

namespace lrd::cuda {

Three log_prob_bwd_cuda(const Tensor& cov_factor, const Tensor& cov_diag, std::optional<Tensor> value,
                        std::optional<Tensor> loc, std::optional<Tensor> mask, std::optional<double> eps,
                        int64_t precision, const Tensor& chol_inv, const Tensor& summary, const Tensor& z,
                        const Tensor& value_info, const Tensor& grad, double maha, double logdet, bool need_factor,
                        bool need_diag, bool need_loc, bool sum_loc) {
  const Inputs in(cov_factor, cov_diag, value, loc, mask, eps);
  const int64_t F = in.F, B = in.B, N = in.N, S = in.S, R = in.R;
  check_doubles(chol_inv, cov_factor, B * R * R, "chol_inv");
  check_doubles(summary, cov_factor, B * 2, "summary");
  check_doubles(z, cov_factor, B * N * R, "z");
  check_same_device(value_info, cov_factor);
  check_same_device(grad, cov_factor);
  STD_TORCH_CHECK(
      value_info.scalar_type() == ScalarType::Int && value_info.is_contiguous() && value_info.numel() == B * N,
      "lrd: value_info must be contiguous int32 [B, N]");
  STD_TORCH_CHECK((is_wide(grad) || grad.scalar_type() == ScalarType::Float) && grad.dim() == 2 && grad.size(0) == B &&
                      grad.size(1) == std::max<int64_t>(N, 1),
                  "lrd: grad must be float32 or float64 [B, max(N, 1)]");
  const Gpu gpu(cov_factor);
  const bool rank_major = is_rank_major(cov_factor);
  const Tensor grad_factor = need_factor ? empty_like(cov_factor, {F, S, R}, rank_major) : empty_like(cov_factor, {0});
  const Tensor grad_diag = need_diag ? empty_like(cov_factor, {B, S}) : empty_like(cov_factor, {0});
  const Tensor grad_loc = need_loc ? empty_like(cov_factor, {B, sum_loc ? 1 : N, S}) : empty_like(cov_factor, {0});

  BackwardArgs args{};
  args.factor = cov_factor.const_data_ptr();
  args.factor_b = cov_factor.stride(0);
  args.factor_s = cov_factor.stride(1);
  args.factor_r = cov_factor.stride(2);
  args.rank_major = rank_major;
  args.rows = in.rows;
  args.chol_inv = const_doubles(chol_inv);
  args.summary = const_doubles(summary);
  args.z = const_doubles(z);
  args.value_info = static_cast<const int32_t*>(value_info.const_data_ptr());
  args.grad = grad.const_data_ptr();
  args.grad_b = grad.stride(0);
  args.grad_n = grad.stride(1);
  args.wide_grad = is_wide(grad);
  if (need_factor) {
    args.grad_factor = grad_factor.mutable_data_ptr();
    args.out_b = grad_factor.stride(0);
    args.out_s = grad_factor.stride(1);
    args.out_r = grad_factor.stride(2);
  }
  if (need_diag) args.grad_diag = grad_diag.mutable_data_ptr();
  if (need_loc) args.grad_loc = grad_loc.mutable_data_ptr();
  args.per_factor = in.per_factor();
  args.R = static_cast<int>(R);
  args.separate_total = sums_separately(in.per_factor(), N);
  args.need_logdet = logdet != 0.0 && (need_factor || need_diag);
  args.sum_loc = sum_loc;
  args.maha = maha;
  args.logdet = logdet;

  const auto launch = [&](bool wide) {
    const RowsPlan plan = plan_backward(F, in.per_factor(), S, R, N, wide, gpu.shared_limit());
    STD_TORCH_CHECK(plan.rows > 0, "lrd: the CUDA backend has no room for so high a rank in its backward pass");
    args.blocks = plan.blocks;
    args.block_rows = plan.rows;
    args.width = plan.width;
    args.pitch = plan.pitch;
    with_types(cov_factor, wide, [&](auto types) {
      using Chosen = decltype(types);
      gpu.launch(log_prob_bwd_kernel<typename Chosen::T, typename Chosen::A>, plan.launch, args);
    });
    return plan;
  };
  const Precision chosen = static_cast<Precision>(precision);
  if (is_wide(cov_factor) || chosen == Precision::float64) {
    launch(true);
    return {grad_factor, grad_diag, grad_loc};
  }
  FastGradientPlan fast;
  if (N <= 1 && in.per_factor() == 1) fast = plan_fast_gradients(B, S, R, gpu.shared_limit());
  const bool certain = chosen == Precision::float32 || !args.need_logdet;
  if (fast.width == 0 && certain) {
    launch(false);
    return {grad_factor, grad_diag, grad_loc};
  }
  // Blocks of rows that float32 does not serve are set in `flags`, and computed again.
  const RowsPlan first = plan_backward(F, in.per_factor(), S, R, N, false, gpu.shared_limit());
  const int64_t blocks = fast.width ? fast.blocks : first.blocks;
  const Tensor flags = empty(cov_factor, {F, blocks}, aoti_torch_dtype_int32());
  args.flags = static_cast<int32_t*>(flags.mutable_data_ptr());
  args.flag_uncertain = !certain;
  if (fast.width) {
    args.blocks = fast.blocks;
    args.block_rows = fast.rows;
    launch_fast_gradients(gpu, cov_factor, fast, args);
  } else {
    launch(false);
  }
  args.flags = nullptr;
  args.wanted = static_cast<const int32_t*>(flags.const_data_ptr());
  args.wanted_blocks = blocks;
  args.wanted_rows = fast.width ? fast.rows : first.rows;  // a multiple of the second launch's
  launch(true);
  return {grad_factor, grad_diag, grad_loc};
}

}  // namespace lrd::cuda
