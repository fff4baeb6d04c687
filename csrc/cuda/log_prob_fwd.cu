// lrd_cuda::log_prob_fwd: the Gram pass, the R-sized algebra, and with precision "auto" both again in double for the
// items whose certificate asks for it. That is decided on the GPU: the blocks of other items have nothing to do.
#include "log_prob_fwd.cuh"
#include "ops.h"

namespace lrd::cuda {

Five log_prob_fwd_cuda(const Tensor& cov_factor, const Tensor& cov_diag, std::optional<Tensor> value,
                       std::optional<Tensor> loc, std::optional<Tensor> mask, std::optional<double> eps,
                       int64_t precision, std::optional<Tensor> known_chol_inv, std::optional<Tensor> known_summary,
                       double maha, double logdet, double constant) {
  const Inputs in(cov_factor, cov_diag, value, loc, mask, eps);
  const int64_t B = in.B, N = in.N, R = in.R;
  const bool known = known_chol_inv && known_summary, wide_result = is_wide(cov_factor);
  const Precision chosen = static_cast<Precision>(precision);
  const bool narrow = !wide_result && chosen != Precision::float64;
  const Gpu gpu(cov_factor);
  const Tensor chol_inv = known ? empty_doubles(cov_factor, {0}) : empty_doubles(cov_factor, {B, R, R});
  const Tensor summary = known ? empty_doubles(cov_factor, {0}) : empty_doubles(cov_factor, {B, 2});
  const Tensor z = empty_doubles(cov_factor, {B, N, R}), distance = empty_doubles(cov_factor, {B, N});
  const Tensor value_info = empty(cov_factor, {B, N}, aoti_torch_dtype_int32());
  const Tensor result = empty(cov_factor, {B, std::max<int64_t>(N, 1)},
                              wide_result ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32());
  const Sums sums = empty_sums(cov_factor, B, N, R, !known);
  CapacitanceArgs args{};
  args.gram = known ? nullptr : const_doubles(sums.gram);
  args.u = const_doubles(sums.u);
  args.quad = const_doubles(sums.quad);
  args.log_diag = const_doubles(sums.log_diag);
  args.z = doubles(z);
  args.maha = doubles(distance);
  args.stride = 2;
  args.N = N;
  args.R = static_cast<int>(R);
  const double* summaries = nullptr;
  if (known) {
    check_doubles(*known_chol_inv, cov_factor, B * R * R, "chol_inv");
    check_doubles(*known_summary, cov_factor, B * 2, "summary");
    summaries = const_doubles(*known_summary);
    args.chol_inv = const_cast<double*>(const_doubles(*known_chol_inv));  // which is not written here
    if (N > 0)
      launch_gram(gpu, cov_factor, B, in.columns(), in.rows, chosen != Precision::float32, false, nullptr, sums);
    launch_solve(gpu, B, args);
  } else {
    summaries = const_doubles(summary);
    args.chol_inv = doubles(chol_inv);
    args.growth = doubles(summary);
    args.logdet = args.growth + 1;
    launch_gram(gpu, cov_factor, B, in.columns(), in.rows, !narrow, true, nullptr, sums);
    launch_capacitance(gpu, cov_factor, B, args);
    if (narrow && chosen != Precision::float32) {
      const Tensor again = empty(cov_factor, {B}, aoti_torch_dtype_int32());
      int32_t* flags = static_cast<int32_t*>(again.mutable_data_ptr());
      gpu.launch(judge_kernel, plan_judge(B),
                 JudgeArgs{args.gram, args.quad, args.z, args.maha, summaries, flags, N, in.S, args.R});
      launch_gram(gpu, cov_factor, B, in.columns(), in.rows, true, true, flags, sums);
      args.again = flags;
      launch_capacitance(gpu, cov_factor, B, args);
    }
  }
  gpu.launch(settle_kernel, plan_settle(B),
             SettleArgs{args.maha, summaries, args.z, static_cast<int32_t*>(value_info.mutable_data_ptr()),
                        result.mutable_data_ptr(), wide_result, N, args.R, maha, logdet, constant});
  return {result, chol_inv, summary, z, value_info};
}

}  // namespace lrd::cuda
