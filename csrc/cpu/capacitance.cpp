// lrd::capacitance_fwd on the CPU: the R-sized algebra of each Gaussian, in double.
#include "capacitance.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

#include "tensors.h"

namespace lrd {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

using Results = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Results capacitance_fwd_cpu(const Tensor& gram, const Tensor& u, const Tensor& quad, const Tensor& log_diag,
                            const Tensor& shift, double maha_weight, double logdet_weight, double constant) {
  STD_TORCH_CHECK(gram.dim() == 3 && u.dim() == 3 && quad.dim() == 2 && log_diag.dim() == 1 && shift.dim() == 3,
                  "lrd: capacitance_fwd wants gram [B, R, R], u [B, N, R], quad [B, N], log_diag [B], shift [B, N, R]");
  const int64_t B = u.size(0), N = u.size(1), R = u.size(2);
  STD_TORCH_CHECK(gram.size(0) == B && gram.size(1) == R && gram.size(2) == R && quad.size(0) == B &&
                      quad.size(1) == N && log_diag.size(0) == B && shift.size(0) == B && shift.size(1) == N &&
                      shift.size(2) == R,
                  "lrd: sizes of gram, u, quad, log_diag and shift do not fit");
  for (const Tensor* tensor : {&gram, &u, &quad, &log_diag, &shift})
    STD_TORCH_CHECK(tensor->scalar_type() == ScalarType::Double && tensor->is_contiguous() && tensor->is_cpu(),
                    "lrd: capacitance_fwd wants contiguous float64 tensors on the CPU");

  Tensor chol = empty_double(gram, {B, R, R});
  Tensor chol_inv = empty_double(gram, {B, R, R});
  Tensor z = empty_double(gram, {B, N, R});
  const int64_t results = N > 0 ? N : 1;
  Tensor result = empty_double(gram, {B, results});
  Tensor growth = empty_double(gram, {B});
  Tensor value_info = torch::stable::new_empty(gram, {B, N}, ScalarType::Int);
  const double* from_gram = gram.const_data_ptr<double>();
  const double* from_u = u.const_data_ptr<double>();
  const double* from_quad = quad.const_data_ptr<double>();
  const double* from_shift = shift.const_data_ptr<double>();
  const double* from_log_diag = log_diag.const_data_ptr<double>();
  double* to_chol = chol.mutable_data_ptr<double>();
  double* to_chol_inv = chol_inv.mutable_data_ptr<double>();
  double* to_z = z.mutable_data_ptr<double>();
  double* to_result = result.mutable_data_ptr<double>();
  double* to_growth = growth.mutable_data_ptr<double>();
  int32_t* to_value_info = value_info.mutable_data_ptr<int32_t>();
  const Kernels& isa = kernels();

  const auto work = [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const double* item_chol = to_chol + b * R * R;
      const double item_growth = isa.cholesky(from_gram + b * R * R, to_chol + b * R * R, to_chol_inv + b * R * R, R);
      double sum = from_log_diag[b];
      for (int64_t j = 0; j < R; ++j) sum += 2.0 * std::log(item_chol[j * R + j]);
      const bool covariance = std::isfinite(item_growth) && std::isfinite(sum);
      to_growth[b] = covariance ? item_growth : std::numeric_limits<double>::infinity();
      // Not a number times a weight of 0 is still not a number: a failure always shows.
      const double base = covariance ? logdet_weight * sum + constant : kNaN;
      if (N == 0) to_result[b] = base;
      for (int64_t n = 0; n < N; ++n) {
        const int64_t at = b * N + n;
        const double norm = solve_capacitance(item_chol, from_u + at * R, to_z + at * R, R);
        for (int64_t j = 0; j < R; ++j) to_z[at * R + j] += from_shift[at * R + j];
        const double difference = from_quad[at] - norm;
        const bool finite = covariance && std::isfinite(difference);
        to_value_info[at] = finite ? 0 : 1;
        if (!finite) std::fill_n(to_z + at * R, R, 0.0);
        // M is a sum of squares: below zero it is rounding.
        to_result[at] = finite ? base + maha_weight * (difference < 0.0 ? 0.0 : difference) : kNaN;
      }
    }
  };
  if (B * (R * R * R + N * R * R + 1) < 65536)
    work(0, B);
  else
    torch::stable::parallel_for(0, B, 1, work);
  return {chol, chol_inv, z, result, growth, value_info};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lrd, CPU, m) { m.impl("capacitance_fwd", TORCH_BOX(&capacitance_fwd_cpu)); }

}  // namespace lrd
