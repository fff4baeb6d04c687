// The R-sized algebra of each Gaussian, in double, and lrd::capacitance_fwd.
#include <cmath>
#include <limits>
#include <tuple>

#include "errors.h"
#include "forward.h"
#include "scratch.h"

namespace lrd {

Summary factorise(const double* gram, double log_diag, double* chol, double* chol_inv, void* scratch, int64_t R) {
  const double growth = kernels().cholesky(gram, chol, chol_inv, scratch, R);
  double logdet = log_diag;
  for (int64_t j = 0; j < R; ++j) logdet += 2.0 * std::log(chol[j * R + j]);
  return {std::isfinite(logdet) ? growth : std::numeric_limits<double>::infinity(), logdet};
}

double solve_capacitance(const double* chol, const double* u, double* z, int64_t R) {
  double norm = 0.0;
  for (int64_t i = 0; i < R; ++i) {
    double sum = u[i];
    for (int64_t k = 0; k < i; ++k) sum -= chol[i * R + k] * z[k];
    z[i] = sum / chol[i * R + i];
    norm += z[i] * z[i];
  }
  for (int64_t i = R - 1; i >= 0; --i) {
    z[i] /= chol[i * R + i];
    for (int64_t k = 0; k < i; ++k) z[k] -= chol[i * R + k] * z[i];
  }
  return norm;
}

namespace {

using Results = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Results capacitance_fwd_cpu(const Tensor& gram, const Tensor& u, const Tensor& quad, const Tensor& log_diag) {
  STD_TORCH_CHECK(gram.dim() == 3 && u.dim() == 3 && quad.dim() == 2 && log_diag.dim() == 1,
                  "lrd: capacitance_fwd wants gram [B, R, R], u [B, N, R], quad [B, N], log_diag [B]");
  const int64_t B = u.size(0), N = u.size(1), R = u.size(2);
  STD_TORCH_CHECK(gram.size(0) == B && gram.size(1) == R && gram.size(2) == R && quad.size(0) == B &&
                      quad.size(1) == N && log_diag.size(0) == B,
                  "lrd: sizes of gram, u, quad and log_diag do not fit");
  for (const Tensor* tensor : {&gram, &u, &quad, &log_diag})
    STD_TORCH_CHECK(tensor->scalar_type() == ScalarType::Double && tensor->is_contiguous() && tensor->is_cpu(),
                    "lrd: capacitance_fwd wants contiguous float64 tensors on the CPU");

  Tensor chol = empty({B, R, R}, ScalarType::Double);
  Tensor chol_inv = empty({B, R, R}, ScalarType::Double);
  Tensor z = empty({B, N, R}, ScalarType::Double);
  Tensor maha = empty({B, N}, ScalarType::Double);
  Tensor logdet = empty({B}, ScalarType::Double);
  Tensor growth = empty({B}, ScalarType::Double);
  const double* from_gram = gram.const_data_ptr<double>();
  const double* from_u = u.const_data_ptr<double>();
  const double* from_quad = quad.const_data_ptr<double>();
  const double* from_log_diag = log_diag.const_data_ptr<double>();
  double* to_chol = chol.mutable_data_ptr<double>();
  double* to_chol_inv = chol_inv.mutable_data_ptr<double>();
  double* to_z = z.mutable_data_ptr<double>();
  double* to_maha = maha.mutable_data_ptr<double>();
  double* to_logdet = logdet.mutable_data_ptr<double>();
  double* to_growth = growth.mutable_data_ptr<double>();

  const auto work = [&](int64_t begin, int64_t end) {
    Scratch scratch(kernels().cholesky_scratch(R));
    for (int64_t b = begin; b < end; ++b) {
      const double* item_chol = to_chol + b * R * R;
      const Summary summary = factorise(from_gram + b * R * R, from_log_diag[b], to_chol + b * R * R,
                                        to_chol_inv + b * R * R, scratch.as<void>(), R);
      to_growth[b] = summary.growth;
      to_logdet[b] = summary.logdet;
      for (int64_t at = b * N; at < (b + 1) * N; ++at)
        to_maha[at] = from_quad[at] - solve_capacitance(item_chol, from_u + at * R, to_z + at * R, R);
    }
  };
  if (B * (R * R * R + N * R * R + 1) < 65536)
    work(0, B);
  else
    in_parallel(B, work);
  return {chol, chol_inv, z, maha, logdet, growth};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lrd, CPU, m) { m.impl("capacitance_fwd", boxed<&capacitance_fwd_cpu>); }

}  // namespace lrd
