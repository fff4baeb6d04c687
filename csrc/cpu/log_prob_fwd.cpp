// lrd::log_prob_fwd on the CPU: the two forward ops in one, and the judgement between them. float32 sums are tried
// where they pay, and kept only with a certificate; differences that would cancel are put relative to a shift.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <tuple>
#include <vector>

#include "forward.h"
#include "scratch.h"

namespace lrd {
namespace {

// What a Gaussian still needs after its sums: nothing, its differences put relative to a shift, or all again in double.
enum class Verdict : char { good, cancels, imprecise };

class Forward {
 public:
  Forward(const Inputs& in, int64_t precision, double* chol_inv, double* z, double* growth, int32_t* value_info)
      : in_(in),
        automatic_(precision == 0),
        chol_inv_(chol_inv),
        z_(z),
        growth_(growth),
        value_info_(value_info),
        vectors_((in.B * in.N * (in.R + 1) + 2 * in.B) * sizeof(double)) {
    // L^-1 takes the place of the Gram matrix.
    double* u = vectors_.as<double>();
    double* quad = u + in.B * in.N * in.R;
    sums_ = {chol_inv, u, quad, quad + in.B * in.N};
    logdet_ = sums_.log_diag + in.B;
    std::fill_n(z_, in.B * in.N * in.R, 0.0);

    // float32 is worth trying where the products outweigh a second look at R x R numbers by far.
    const bool attempt = automatic_ && in.R >= kFloat32Rank && in.S >= 32 * in.R;
    const Compute compute = compute_for(in.dtype, precision == 2 || attempt);
    std::vector<int64_t> items(in.B);
    std::iota(items.begin(), items.end(), 0);
    const bool shifted = attempt && compute == Compute::f32 && guess_shift(items);
    sum_gram(in, items, compute, all_rows(in.S), shifted ? z_ : nullptr, sums_);
    std::vector<int64_t> cancelling;
    const std::vector<int64_t> imprecise = conclude_all(items, compute, &cancelling);
    if (!imprecise.empty()) {
      sum_gram(in, imprecise, Compute::f64, all_rows(in.S), shifted ? z_ : nullptr, sums_);
      conclude_all(imprecise, Compute::f64, &cancelling);
    }
    std::sort(cancelling.begin(), cancelling.end());
    sum_residuals(in, cancelling, z_, sums_);
    for (int64_t b : cancelling) correct(b);
  }

  // maha * M + logdet * log det Sigma + constant of value n, or without M where there are no values.
  double result(int64_t b, int64_t n, double maha, double logdet, double constant) const {
    // Not a number times a weight of 0 is still not a number: a failure always shows.
    if (std::isinf(growth_[b])) return std::numeric_limits<double>::quiet_NaN();
    const double base = logdet * logdet_[b] + constant;
    if (in_.N == 0) return base;
    const double distance = sums_.quad[b * in_.N + n];
    return base + maha * (distance < 0.0 ? 0.0 : distance);  // a sum of squares: below zero it is rounding
  }

 private:
  // A first estimate of z from a sample of the rows, where one is cheap: z_ of one value each. The differences that
  // are left are no larger than the noise, so that their sums in float32 pass the certificate.
  bool guess_shift(const std::vector<int64_t>& items) {
    const int64_t R = in_.R;
    constexpr int64_t kRuns = 16;
    if (in_.N != 1 || in_.S < 32 * kRuns * R) return false;
    sum_gram(in_, items, Compute::f32, {kRuns, in_.S / kRuns, R}, nullptr, sums_);
    Scratch memory(R * R * sizeof(double) + cholesky_scratch_bytes(R));
    double* chol = memory.as<double>();
    for (int64_t b : items) {
      double* z = z_ + b * R;
      factorise(sums_.gram + b * R * R, sums_.log_diag[b], chol, sums_.gram + b * R * R, chol + R * R, R);
      const double norm = solve_capacitance(chol, sums_.u + b * R, z, R);
      if (!std::isfinite(norm)) std::fill_n(z, R, 0.0);
    }
    return true;
  }

  // Concludes the given items and returns those that are to be done again, in double.
  std::vector<int64_t> conclude_all(const std::vector<int64_t>& items, Compute compute,
                                    std::vector<int64_t>* cancelling) {
    const int64_t count = static_cast<int64_t>(items.size()), R = in_.R;
    std::vector<Verdict> verdicts(items.size());
    const auto work = [&](int64_t begin, int64_t end) {
      Scratch memory((R * R + 2 * R) * sizeof(double) + cholesky_scratch_bytes(R));
      for (int64_t i = begin; i < end; ++i) verdicts[i] = conclude(items[i], compute, memory.as<double>());
    };
    if (count * (R * R * R + in_.N * R * R + 1) < 65536)
      work(0, count);
    else
      torch::stable::parallel_for(0, count, 1, work);
    std::vector<int64_t> again;
    for (int64_t i = 0; i < count; ++i) {
      if (verdicts[i] == Verdict::imprecise) again.push_back(items[i]);
      if (verdicts[i] == Verdict::cancels) cancelling->push_back(items[i]);
    }
    return again;
  }

  // From the sums of item b, formed in `compute`, to L^-1, z and M, which replaces quad; then the certificate. The
  // error of a Gram sum is about sum_error of sqrt(G_jj G_kk). It must come out small in L^-1 (the growth), and in each
  // Mahalanobis term and log-density. Scratch: R x R and two R, and that of the Cholesky.
  Verdict conclude(int64_t b, Compute compute, double* chol) {
    constexpr double kTolerance = 2.5e-7;
    const double sum_error = compute == Compute::f32 ? 0x1p-22 : 0x1p-50;
    const int64_t R = in_.R, N = in_.N;
    double* gram = sums_.gram + b * R * R;
    double* gram_diag = chol + R * R;
    double* step = gram_diag + R;
    for (int64_t j = 0; j < R; ++j) gram_diag[j] = gram[j * R + j];
    const Covariance covariance = factorise(gram, sums_.log_diag[b], chol, gram, step + R, R);
    if (automatic_ && compute == Compute::f32 && !(covariance.growth <= kFloat32Growth)) return Verdict::imprecise;
    growth_[b] = covariance.growth;
    logdet_[b] = covariance.logdet;
    bool cancels = false;
    for (int64_t at = b * N; at < (b + 1) * N; ++at) {
      const double quad = sums_.quad[at];
      const double maha = quad - solve_capacitance(chol, sums_.u + at * R, step, R);
      settle(at, maha, step, covariance.good());
      if (!automatic_ || value_info_[at] != 0) continue;
      double weighted = 0.0;
      for (int64_t j = 0; j < R; ++j) weighted += step[j] * step[j] * gram_diag[j];
      const double error = sum_error * (weighted + 2.0 * std::sqrt(weighted * quad) + quad * 0x1p-29);
      const double density = 0.5 * std::abs(maha + covariance.logdet + double(in_.S) * 1.8378770664093453);
      cancels = cancels || !(error <= kTolerance * maha && error <= kTolerance * density);
    }
    return cancels ? Verdict::cancels : Verdict::good;
  }

  // M and z of item b from what sum_residuals left. It is small, so that L^-1 serves as well as L would.
  void correct(int64_t b) {
    const int64_t R = in_.R, N = in_.N;
    const double* inverse = chol_inv_ + b * R * R;
    std::vector<double> step(R);
    for (int64_t at = b * N; at < (b + 1) * N; ++at) {
      if (value_info_[at] != 0) continue;
      const double* u = sums_.u + at * R;
      double norm = 0.0;
      std::fill(step.begin(), step.end(), 0.0);
      for (int64_t i = 0; i < R; ++i) {
        double y = 0.0;
        for (int64_t j = 0; j <= i; ++j) y += inverse[i * R + j] * u[j];
        for (int64_t j = 0; j <= i; ++j) step[j] += inverse[i * R + j] * y;
        norm += y * y;
      }
      settle(at, sums_.quad[at] - norm, step.data(), true);
    }
  }

  // Takes M of a value, and moves its z by a step. What is not finite has failed, and pulls at nothing.
  void settle(int64_t at, double maha, const double* step, bool covariance) {
    const int64_t R = in_.R;
    const bool finite = covariance && std::isfinite(maha);
    value_info_[at] = finite ? 0 : 1;
    sums_.quad[at] = finite ? maha : std::numeric_limits<double>::quiet_NaN();
    for (int64_t j = 0; j < R; ++j) z_[at * R + j] = finite ? z_[at * R + j] + step[j] : 0.0;
  }

  const Inputs& in_;
  const bool automatic_;
  double *chol_inv_, *z_, *growth_;
  int32_t* value_info_;
  Scratch vectors_;
  Sums sums_;
  double* logdet_;
};

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> log_prob_fwd_cpu(const Tensor& cov_factor, const Tensor& cov_diag,
                                                                    std::optional<Tensor> value,
                                                                    std::optional<Tensor> loc,
                                                                    std::optional<Tensor> mask,
                                                                    std::optional<double> eps, int64_t precision,
                                                                    double maha, double logdet, double constant) {
  const Inputs in(cov_factor, cov_diag, value, loc, mask, eps, precision);
  const int64_t B = in.B, N = in.N, R = in.R, results = N > 0 ? N : 1;
  const bool wide = in.dtype == DType::f64;
  Tensor result = torch::stable::new_empty(cov_factor, {B, results}, wide ? ScalarType::Double : ScalarType::Float);
  Tensor chol_inv = empty_double(cov_factor, {B, R, R});
  Tensor z = empty_double(cov_factor, {B, N, R});
  Tensor growth = empty_double(cov_factor, {B});
  Tensor value_info = torch::stable::new_empty(cov_factor, {B, N}, ScalarType::Int);
  const Forward forward(in, precision, chol_inv.mutable_data_ptr<double>(), z.mutable_data_ptr<double>(),
                        growth.mutable_data_ptr<double>(), value_info.mutable_data_ptr<int32_t>());
  for (int64_t at = 0; at < B * results; ++at) {
    const double number = forward.result(at / results, at % results, maha, logdet, constant);
    if (wide)
      result.mutable_data_ptr<double>()[at] = number;
    else
      result.mutable_data_ptr<float>()[at] = static_cast<float>(number);
  }
  return {result, chol_inv, z, growth, value_info};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lrd, CPU, m) { m.impl("log_prob_fwd", TORCH_BOX(&log_prob_fwd_cpu)); }

}  // namespace lrd
