// The raw ops of this backend, by the schemas of lrd_kernels/ops/schemas.py, and the steps that they share.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>

#include "args.h"
#include "launch.h"
#include "tensors.h"

namespace lrd::cuda {

using Three = std::tuple<Tensor, Tensor, Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using Five = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
using Six = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Four gram_fwd_cuda(const Tensor& cov_factor, const Tensor& cov_diag, std::optional<Tensor> value,
                   std::optional<Tensor> loc, std::optional<Tensor> mask, std::optional<double> eps, int64_t precision);
Six capacitance_fwd_cuda(const Tensor& gram, const Tensor& u, const Tensor& quad, const Tensor& log_diag);
Five log_prob_fwd_cuda(const Tensor& cov_factor, const Tensor& cov_diag, std::optional<Tensor> value,
                       std::optional<Tensor> loc, std::optional<Tensor> mask, std::optional<double> eps,
                       int64_t precision, std::optional<Tensor> known_chol_inv, std::optional<Tensor> known_summary,
                       double maha, double logdet, double per_output);
Three log_prob_bwd_cuda(const Tensor& cov_factor, const Tensor& cov_diag, std::optional<Tensor> value,
                        std::optional<Tensor> loc, std::optional<Tensor> mask, std::optional<double> eps,
                        int64_t precision, const Tensor& chol_inv, const Tensor& summary, const Tensor& z,
                        const Tensor& value_info, const Tensor& grad, double maha, double logdet, bool need_factor,
                        bool need_diag, bool need_loc, bool sum_loc);
Tensor joint_gram_fwd_cuda(const Tensor& cov_factors, std::optional<Tensor> vectors, double factor_scale,
                           double vector_scale, bool centre, int64_t precision);
std::tuple<Tensor, Tensor> project_fold_fwd_cuda(const Tensor& cov_factors, std::optional<Tensor> vectors,
                                                 double factor_scale, double vector_scale, bool centre,
                                                 const Tensor& cov_diag, const Tensor& basis, bool fold,
                                                 bool rank_major);

// The sums of gram_fwd: G [B, K, K], u [B, N, K], quad [B, N], sum log D [B], in double.
struct Sums {
  Tensor gram, u, quad, log_diag;
};
Sums empty_sums(const Tensor& like, int64_t B, int64_t N, int64_t columns, bool want_gram);
// The sums of runs of rows, [B, splits, numbers], and how many runs there are.
struct GramSlots {
  Tensor tensor;
  int64_t splits;
};
GramSlots launch_sums(const Gpu& gpu, const Tensor& like, int64_t B, const Columns& columns, const Rows& rows,
                      bool wide, bool want_gram, const int32_t* again, int32_t* tickets);
AddArgs add_args(const GramSlots& slots, int64_t B, int64_t N, int64_t columns, bool with_gram, const Sums& to);
// The same for one value at most, by the kernels for it: `slots` has room for plan.splits.
void launch_fast_sums(const Gpu& gpu, const Tensor& like, const FastPlan& plan, const GramArgs& args);
void launch_fast_gradients(const Gpu& gpu, const Tensor& like, const FastGradientPlan& plan, const BackwardArgs& args);
// The sums and their total: products in double where `wide`; only the items that are set in `again` [B], where it is
// given.
void launch_gram(const Gpu& gpu, const Tensor& like, int64_t B, const Columns& columns, const Rows& rows, bool wide,
                 bool want_gram, const int32_t* again, const Sums& to);
// The R-sized algebra; where args.chol is null and the blocked kernels need one, it is made.
void launch_capacitance(const Gpu& gpu, const Tensor& like, int64_t B, CapacitanceArgs args);
// z and M alone, by args.chol_inv.
void launch_solve(const Gpu& gpu, int64_t B, const CapacitanceArgs& args);
// The mean of a stack's vectors [B, S], where they are centred: in columns.mean, the tensor keeps it.
std::optional<Tensor> launch_mean(const Gpu& gpu, const StackInputs& in, bool centre, Columns& columns);

}  // namespace lrd::cuda
