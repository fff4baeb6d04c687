// lrd_cuda::log_prob_fwd: the sums, the R-sized algebra, and both again for the items whose certificate asks for it.
// That is decided on the GPU: the blocks of other items have nothing to do.
#include "dtypes.cuh"
#include "finish.cuh"
#include "ops.h"

namespace lrd::cuda {

namespace {

// For sums of float32 products.
JudgeArgs judge_args(const CapacitanceArgs& args, const double* summaries, int32_t* again, int64_t S) {
  JudgeArgs judging{};
  judging.gram = args.gram;
  judging.quad = args.quad;
  judging.z = args.z;
  judging.maha = args.maha;
  judging.summary = summaries;
  judging.again = again;
  judging.N = args.N;
  judging.S = S;
  judging.R = args.R;
  judging.sum_error = kFloat32SumError;
  judging.quad_error = kPairSumError;
  judging.growth_limit = kFloat32Growth;
  return judging;
}

template <class T, class Sum>
auto choose_again(int tile) -> void (*)(AgainArgs) {
  return tile == 16 ? again_kernel<T, 16, Sum> : tile == 32 ? again_kernel<T, 32, Sum> : again_kernel<T, 64, Sum>;
}

// The sums, what follows them, and the second pass, in three launches. False where the algebra does not fit into one.
bool finish_in_one(const Gpu& gpu, const Inputs& in, const Tensor& cov_factor, Precision chosen, bool narrow,
                   const Sums& sums, const CapacitanceArgs& args, const SettleArgs& settling) {
  const int64_t B = in.B, N = in.N, R = in.R;
  const GramPlan wide_plan = plan_gram(B, in.S, R, N, true, true);
  const FinishPlan plan = plan_finish(B, N, R, wide_plan, gpu.shared_limit());
  if (!plan.possible) return false;
  FastPlan fast;
  if (narrow && N <= 1) fast = plan_fast_sums(B, in.S, R);
  const Tensor state = empty(cov_factor, {4, B}, aoti_torch_dtype_int32());  // tickets [B, 2], `again`, `odd`
  int32_t* tickets = static_cast<int32_t*>(state.mutable_data_ptr());
  GramSlots slots{empty_doubles(cov_factor, {0}), 0};
  if (fast.width) {
    slots = {empty_doubles(cov_factor, {B, fast.splits, SlotLayout(R, N).numbers}), fast.splits};
    GramArgs summing{in.columns(),
                     in.rows,
                     nullptr,
                     doubles(slots.tensor),
                     tickets,
                     B,
                     true,
                     true,
                     0,
                     static_cast<int>(N),
                     fast.splits,
                     fast.rows_per_split,
                     1};
    launch_fast_sums(gpu, cov_factor, fast, summing);
  } else {
    slots = launch_sums(gpu, cov_factor, B, in.columns(), in.rows, !narrow, true, nullptr, tickets);
  }

  FinishArgs finishing{add_args(slots, B, N, R, true, sums), args, {}, settling, narrow, tickets};
  finishing.add.odd = tickets + 3 * B;
  finishing.judge = judge_args(args, settling.summary, tickets + 2 * B, in.S);
  finishing.judge.odd = finishing.add.odd;
  finishing.judge.by_certificate = chosen != Precision::float32;
  finishing.judge.by_residuals = N == 1 && R >= 1 && R <= kTiledRank;
  if (fast.width && R <= kPairRank) {
    finishing.judge.sum_error = kPairSumError;
    finishing.judge.growth_limit = kFloat32Growth * kFloat32SumError / kPairSumError;
  }
  gpu.launch(finish_kernel, plan.finish, finishing);
  if (!narrow) return true;

  const GramSlots more{empty_doubles(cov_factor, {B, wide_plan.splits, SlotLayout(R, N).numbers}), wide_plan.splits};
  AgainArgs again{{in.columns(), in.rows, nullptr, doubles(more.tensor), nullptr, B, true, true, 0, static_cast<int>(N),
                   wide_plan.splits, wide_plan.rows_per_split, wide_plan.pairs},
                  finishing};
  again.finish.add.slots = const_doubles(more.tensor);
  again.finish.add.splits = wide_plan.splits;
  again.finish.tickets = tickets + 1;
  again.gram.vector = R == wide_plan.tile && is_aligned(again.gram.columns, cov_factor);
  with_dtype(cov_factor, [&](auto types) {
    using T = typename decltype(types)::T;
    if constexpr (sizeof(T) < 8) {
      const auto kernel = gpu.sums64() == Sums64::native ? choose_again<T, double>(wide_plan.tile)
                                                         : choose_again<T, Pair>(wide_plan.tile);
      gpu.launch(kernel, plan.again, again);
    }
  });
  return true;
}

}  // namespace

Five log_prob_fwd_cuda(const Tensor& cov_factor, const Tensor& cov_diag, std::optional<Tensor> value,
                       std::optional<Tensor> loc, std::optional<Tensor> mask, std::optional<double> eps,
                       int64_t precision, std::optional<Tensor> known_chol_inv, std::optional<Tensor> known_summary,
                       double maha, double logdet, double per_output) {
  const Inputs in(cov_factor, cov_diag, value, loc, mask, eps);
  const int64_t B = in.B, N = in.N, R = in.R;
  const bool known = known_chol_inv && known_summary;
  const bool wide_result =
      is_wide(cov_factor) || mask;  // with a mask the caller adds what counts outputs, which may cancel
  const Precision chosen = static_cast<Precision>(precision);
  const bool narrow = !is_wide(cov_factor) && chosen != Precision::float64;
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
  }
  const SettleArgs settling{args.maha,
                            summaries,
                            args.z,
                            static_cast<int32_t*>(value_info.mutable_data_ptr()),
                            result.mutable_data_ptr(),
                            wide_result,
                            N,
                            args.R,
                            maha,
                            logdet,
                            per_output * static_cast<double>(cov_diag.size(1))};
  if (!known && finish_in_one(gpu, in, cov_factor, chosen, narrow, sums, args, settling))
    return {result, chol_inv, summary, z, value_info};
  if (!known) {
    launch_gram(gpu, cov_factor, B, in.columns(), in.rows, !narrow, true, nullptr, sums);
    launch_capacitance(gpu, cov_factor, B, args);
    if (narrow && chosen != Precision::float32) {
      const Tensor again = empty(cov_factor, {B}, aoti_torch_dtype_int32());
      JudgeArgs judging = judge_args(args, summaries, static_cast<int32_t*>(again.mutable_data_ptr()), in.S);
      judging.by_certificate = true;
      gpu.launch(judge_kernel, plan_judge(B), judging);
      launch_gram(gpu, cov_factor, B, in.columns(), in.rows, true, true, judging.again, sums);
      args.again = judging.again;
      launch_capacitance(gpu, cov_factor, B, args);
    }
  }
  gpu.launch(settle_kernel, plan_settle(B), settling);
  return {result, chol_inv, summary, z, value_info};
}

}  // namespace lrd::cuda
