// lrd_cuda::gram_fwd, and the Gram pass of the other ops.
#include "dtypes.cuh"
#include "gram.cuh"
#include "ops.h"

namespace lrd::cuda {

// Block (32 numbers, b).
__global__ void __launch_bounds__(kThreads, 1) add_slots_kernel(const AddArgs p) {
  __shared__ double room[kThreads];
  const int64_t chunks = slot_chunks(p.columns, p.N, p.slots_have_gram), b = blockIdx.x / chunks;
  if (p.again && !p.again[b]) return;
  add_numbers(p, b, blockIdx.x % chunks * kWarp, room);
}

Sums empty_sums(const Tensor& like, int64_t B, int64_t N, int64_t columns, bool want_gram) {
  return {want_gram ? empty_doubles(like, {B, columns, columns}) : empty_doubles(like, {0}),
          empty_doubles(like, {B, N, columns}), empty_doubles(like, {B, N}), empty_doubles(like, {B})};
}

GramSlots launch_sums(const Gpu& gpu, const Tensor& like, int64_t B, const Columns& columns, const Rows& rows,
                      bool wide, bool want_gram, const int32_t* again, int32_t* tickets) {
  wide = wide || is_wide(like);
  const int64_t K = columns.total, N = rows.N;
  GramPlan plan = plan_gram(B, rows.S, K, N, wide, want_gram);
  GramArgs args{columns, rows, again, nullptr, tickets, B, want_gram, false, 0, 0, plan.splits, plan.rows_per_split, 0};
  const GramSlots slots{empty_doubles(like, {B, plan.splits, SlotLayout(K, N, want_gram).numbers}), plan.splits};
  args.slots = doubles(slots.tensor);
  for (int64_t first = 0; first == 0 || first < N; first += kGramValues) {
    args.want_gram = want_gram && first == 0;  // which is summed once
    plan = plan_gram(B, rows.S, K, N, wide, args.want_gram);
    args.first_value = first;
    args.values = static_cast<int>(std::min<int64_t>(N - first, kGramValues));
    args.pairs = plan.pairs;
    with_types(like, wide, [&](auto types) {
      using T = typename decltype(types)::T;
      using A = typename decltype(types)::A;
      const auto kernel = plan.tile == 16   ? gram_kernel<T, A, 16>
                          : plan.tile == 32 ? gram_kernel<T, A, 32>
                                            : gram_kernel<T, A, 64>;
      gpu.launch(kernel, plan.sums, args);
    });
    args.tickets = nullptr;
  }
  return slots;
}

AddArgs add_args(const GramSlots& slots, int64_t B, int64_t N, int64_t columns, bool with_gram, const Sums& to) {
  return {nullptr,
          const_doubles(slots.tensor),
          with_gram ? doubles(to.gram) : nullptr,
          doubles(to.u),
          doubles(to.quad),
          doubles(to.log_diag),
          nullptr,
          B,
          N,
          columns,
          slots.splits,
          with_gram};
}

void launch_gram(const Gpu& gpu, const Tensor& like, int64_t B, const Columns& columns, const Rows& rows, bool wide,
                 bool want_gram, const int32_t* again, const Sums& to) {
  const GramSlots slots = launch_sums(gpu, like, B, columns, rows, wide, want_gram, again, nullptr);
  AddArgs args = add_args(slots, B, rows.N, columns.total, want_gram, to);
  args.again = again;
  if (!rows.weighted) args.log_diag = nullptr;
  gpu.launch(add_slots_kernel, plan_gram(B, rows.S, columns.total, rows.N, wide || is_wide(like), want_gram).add, args);
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
