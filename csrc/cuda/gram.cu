// lrd_cuda::gram_fwd, and the Gram pass of the other ops.
#include "dtypes.cuh"
#include "gram.cuh"
#include "ops.h"

namespace lrd::cuda {

Sums empty_sums(const Tensor& like, int64_t B, int64_t N, int64_t columns, bool want_gram) {
  return {want_gram ? empty_doubles(like, {B, columns, columns}) : empty_doubles(like, {0}),
          empty_doubles(like, {B, N, columns}), empty_doubles(like, {B, N}), empty_doubles(like, {B})};
}

void launch_gram(const Gpu& gpu, const Tensor& like, int64_t B, const Columns& columns, const Rows& rows, bool wide,
                 bool want_gram, const int32_t* again, const Sums& to) {
  wide = wide || is_wide(like);
  const int64_t K = columns.total, N = rows.N;
  GramPlan plan = plan_gram(B, rows.S, K, N, wide, want_gram);
  const int64_t splits = plan.splits;
  const Tensor gram = want_gram ? empty_doubles(like, {B, splits, K, K}) : empty_doubles(like, {0});
  const Tensor u = empty_doubles(like, {B, splits, N, K}), quad = empty_doubles(like, {B, splits, N});
  const Tensor log_diag = empty_doubles(like, {B, splits});
  GramArgs args{columns, rows, again, nullptr, doubles(u), doubles(quad), doubles(log_diag), 0, 0, 0, 0, 0};
  for (int64_t first = 0; first == 0 || first < N; first += kGramValues) {
    const bool with_gram = want_gram && first == 0;  // which is summed once
    plan = plan_gram(B, rows.S, K, N, wide, with_gram);
    args.gram = with_gram ? doubles(gram) : nullptr;
    args.first_value = first;
    args.values = static_cast<int>(std::min<int64_t>(N - first, kGramValues));
    args.splits = plan.splits;
    args.rows_per_split = plan.rows_per_split;
    args.pairs = plan.pairs;
    with_types(like, wide, [&](auto types) {
      using T = typename decltype(types)::T;
      using A = typename decltype(types)::A;
      const auto kernel = plan.tile == 16   ? gram_kernel<T, A, 16>
                          : plan.tile == 32 ? gram_kernel<T, A, 32>
                                            : gram_kernel<T, A, 64>;
      gpu.launch(kernel, plan.sums, args);
    });
  }
  plan = plan_gram(B, rows.S, K, N, wide, want_gram);
  double* log_sums = rows.weighted ? doubles(to.log_diag) : nullptr;
  gpu.launch(
      add_slots_kernel, plan.add,
      AddArgs{again, const_doubles(gram), const_doubles(u), const_doubles(quad), const_doubles(log_diag),
              want_gram ? doubles(to.gram) : nullptr, doubles(to.u), doubles(to.quad), log_sums, B, N, K, splits});
}

std::optional<Tensor> launch_mean(const Gpu& gpu, const StackInputs& in, bool centre, Columns& columns) {
  if (!centre || in.V == 0) return std::nullopt;
  Tensor mean = empty_doubles(in.factors, {in.B, in.S});
  const MeanArgs args{
      columns.vectors, columns.vector_b, columns.vector_v, columns.vector_s, doubles(mean), in.B, in.V, in.S};
  with_dtype(in.factors,
             [&](auto types) { gpu.launch(mean_kernel<typename decltype(types)::T>, plan_mean(in.B, in.S), args); });
  columns.mean = const_doubles(mean);
  return mean;
}

Four gram_fwd_cuda(const Tensor& cov_factor, const Tensor& cov_diag, std::optional<Tensor> value,
                   std::optional<Tensor> loc, std::optional<Tensor> mask, std::optional<double> eps,
                   int64_t precision) {
  const bool wide = static_cast<Precision>(precision) != Precision::float32;
  const Inputs in(cov_factor, cov_diag, value, loc, mask, eps);
  const Gpu gpu(cov_factor);
  const Sums sums = empty_sums(cov_factor, in.B, in.N, in.R, true);
  launch_gram(gpu, cov_factor, in.B, in.columns(), in.rows, wide, true, nullptr, sums);
  return {sums.gram, sums.u, sums.quad, sums.log_diag};
}

}  // namespace lrd::cuda
