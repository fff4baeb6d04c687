// lrd::log_prob_fwd on the CPU: the two forward ops in one, and the judgement between them. float32 sums are tried
// where they pay, and kept only with a certificate; differences that would cancel are put relative to a shift.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <tuple>
#include <vector>

#include "../core/arena.h"
#include "../core/policy.h"
#include "errors.h"
#include "forward.h"
#include "scratch.h"

namespace lrd {
namespace {

// What an item still needs after its sums: nothing, its differences put relative to a shift, or all again in double.
enum class Verdict : char { good, cancels, imprecise };

// The sums over rows of all items, but for the Gram matrices.
struct VectorSums {
  double *u, *quad, *log_diag;

  template <class Memory>
  VectorSums(Memory& memory, const Inputs& in) {
    memory.take(u, in.B * in.N * in.R);
    memory.take(quad, in.B * in.N);
    memory.take(log_diag, in.B);
  }
};

// What it takes to go from the sums of an item to its results.
struct ConcludeScratch {
  double* chol;              // [R, R]
  double *gram_diag, *step;  // [R]
  char* cholesky;

  template <class Memory>
  ConcludeScratch(Memory& memory, int64_t R) {
    memory.take(chol, R * R);
    memory.take(gram_diag, R);
    memory.take(step, R);
    memory.take(cholesky, kernels().cholesky_scratch(R));
  }
};

// What an earlier call has left of the covariances.
struct Factorisation {
  const double* chol_inv = nullptr;    // [B, R, R]
  const Summary* summaries = nullptr;  // [B]
};

class Forward {
 public:
  // `z` [B, N, R] and `value_info` [B, N] are written; so are `chol_inv` [B, R, R] and `summaries` [B], unless these
  // are null: then `known` has both.
  // `declining` reports items beyond kCholeskyGrowth or kExplainedRatio as failed.
  Forward(const Inputs& in, Precision precision, bool declining, double* chol_inv, Summary* summaries,
          const Factorisation& known, double* z, int32_t* value_info)
      : in_(in),
        automatic_(precision == Precision::automatic),
        declining_(declining),
        inverses_(summaries ? chol_inv : known.chol_inv),
        summaries_(summaries ? summaries : known.summaries),
        to_summaries_(summaries),
        z_(z),
        value_info_(value_info),
        vectors_(bytes_of<VectorSums, const Inputs&>(in)) {
    Arena arena(vectors_.as<void>());
    const VectorSums vectors(arena, in);
    sums_ = {chol_inv, vectors.u, vectors.quad, vectors.log_diag};  // L^-1 takes the place of the Gram matrix
    std::fill_n(z_, in.B * in.N * in.R, 0.0);
    std::vector<int64_t> items(in.B);
    std::iota(items.begin(), items.end(), 0);
    std::vector<int64_t> cancelling = summaries ? factorise_and_score(items, precision) : score(items, precision);
    std::sort(cancelling.begin(), cancelling.end());
    sum_residuals(in, cancelling, z_, sums_);
    for (int64_t b : cancelling) solve_by_inverse(b);
  }

  // maha * M + logdet * log det Sigma + constant of value n, or without M where there are no values.
  double result(int64_t b, int64_t n, double maha, double logdet, double constant) const {
    // Not a number times a weight of 0 is still not a number: a failure always shows.
    if (std::isinf(summaries_[b].growth)) return std::numeric_limits<double>::quiet_NaN();
    const double base = logdet * summaries_[b].logdet + constant;
    if (in_.N == 0) return base;
    const double distance = sums_.quad[b * in_.N + n];
    return base + maha * (distance < 0.0 ? 0.0 : distance);  // a sum of squares: below zero it is rounding
  }

 private:
  // Both return the items whose differences cancel.
  std::vector<int64_t> factorise_and_score(const std::vector<int64_t>& items, Precision precision) {
    // float32 is worth trying where the products outweigh a second look at R x R numbers by far.
    const bool attempt = automatic_ && in_.R >= kFloat32Rank && in_.S >= 4 * in_.R;
    const Compute compute = compute_for(in_.dtype, precision == Precision::float32 || attempt);
    const bool shifted = attempt && compute == Compute::f32 && guess_shift(items);
    sum_gram(in_, items, compute, all_rows(in_.S), shifted ? z_ : nullptr, sums_);
    std::vector<int64_t> cancelling;
    const std::vector<int64_t> imprecise = conclude_all(items, compute, &cancelling);
    if (!imprecise.empty()) {
      sum_gram(in_, imprecise, Compute::f64, all_rows(in_.S), shifted ? z_ : nullptr, sums_);
      conclude_all(imprecise, Compute::f64, &cancelling);
    }
    return cancelling;
  }

  std::vector<int64_t> score(const std::vector<int64_t>& items, Precision precision) {
    Sums sums = sums_;
    sums.gram = nullptr;
    const Compute compute = compute_for(in_.dtype, precision == Precision::float32);
    if (in_.N > 0) sum_gram(in_, items, compute, all_rows(in_.S), nullptr, sums);
    std::vector<int64_t> cancelling;
    for (int64_t b : items)
      if (solve_by_inverse(b)) cancelling.push_back(b);
    return cancelling;
  }

  // A first estimate of z from a sample of the rows, where one is cheap: z_ of one value each. The differences that
  // are left are no larger than the noise, so that their sums in float32 pass the certificate.
  bool guess_shift(const std::vector<int64_t>& items) {
    const int64_t R = in_.R;
    constexpr int64_t kRuns = 16;
    if (in_.N != 1 || in_.S < 32 * kRuns * R) return false;
    sum_gram(in_, items, Compute::f32, {kRuns, in_.S / kRuns, R}, nullptr, sums_);
    Scratch memory(bytes_of<ConcludeScratch>(R));
    Arena arena(memory.as<void>());
    const ConcludeScratch held(arena, R);
    for (int64_t b : items) {
      double *z = z_ + b * R, *gram = sums_.gram + b * R * R;
      factorise(gram, sums_.log_diag[b], held.chol, gram, held.cholesky, R);
      const double norm = solve_capacitance(held.chol, sums_.u + b * R, z, R);
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
      Scratch memory(bytes_of<ConcludeScratch>(R));
      Arena arena(memory.as<void>());
      const ConcludeScratch held(arena, R);
      for (int64_t i = begin; i < end; ++i) verdicts[i] = conclude(items[i], compute, held);
    };
    if (count * (R * R * R + in_.N * R * R + 1) < 65536)
      work(0, count);
    else
      in_parallel(count, work);
    std::vector<int64_t> again;
    for (int64_t i = 0; i < count; ++i) {
      if (verdicts[i] == Verdict::imprecise) again.push_back(items[i]);
      if (verdicts[i] == Verdict::cancels) cancelling->push_back(items[i]);
    }
    return again;
  }

  // From the sums of item b, formed in `compute`, to L^-1, z and M, which replaces quad; then the certificate. The
  // error of the sums must come out small in L^-1 (the growth), and in each Mahalanobis term and log-density.
  Verdict conclude(int64_t b, Compute compute, const ConcludeScratch& held) {
    const double sum_error = compute == Compute::f32 ? kFloat32SumError : kFloat64SumError;
    const int64_t R = in_.R, N = in_.N;
    double *gram = sums_.gram + b * R * R, *gram_diag = held.gram_diag, *step = held.step;
    for (int64_t j = 0; j < R; ++j) gram_diag[j] = gram[j * R + j];
    Summary summary = factorise(gram, sums_.log_diag[b], held.chol, gram, held.cholesky, R);
    if (automatic_ && compute == Compute::f32 && !certified(summary.growth)) return Verdict::imprecise;
    const double largest = R > 0 ? *std::max_element(gram_diag, gram_diag + R) : 0.0;
    if (declining_ && (summary.growth > kCholeskyGrowth || largest > kExplainedRatio))
      summary.growth = std::numeric_limits<double>::infinity();
    to_summaries_[b] = summary;
    bool cancels = false;
    for (int64_t at = b * N; at < (b + 1) * N; ++at) {
      const double quad = sums_.quad[at];
      const double maha = quad - solve_capacitance(held.chol, sums_.u + at * R, step, R);
      settle(at, maha, step, std::isfinite(summary.growth));
      if (!automatic_ || value_info_[at] != 0) continue;
      double weighted = 0.0;
      for (int64_t j = 0; j < R; ++j) weighted += step[j] * step[j] * gram_diag[j];
      cancels = cancels || !tolerable(maha_error(sum_error, weighted, quad), maha, summary.logdet, in_.S);
    }
    return cancels ? Verdict::cancels : Verdict::good;
  }

  // M and z of item b from u and quad by L^-1, which serves as well as L would where what is left is small. Returns
  // whether it was not: L^-1 may come from sums in float32.
  bool solve_by_inverse(int64_t b) {
    const int64_t R = in_.R, N = in_.N;
    const double* inverse = inverses_ + b * R * R;
    const auto [growth, logdet] = summaries_[b];
    const double sum_error = R >= kFloat32Rank && certified(growth) ? kFloat32SumError : kFloat64SumError;
    std::vector<double> step(R);
    bool cancels = false;
    for (int64_t at = b * N; at < (b + 1) * N; ++at) {
      const double* u = sums_.u + at * R;
      double norm = 0.0;
      std::fill(step.begin(), step.end(), 0.0);
      for (int64_t i = 0; i < R; ++i) {
        double y = 0.0;
        for (int64_t j = 0; j <= i; ++j) y += inverse[i * R + j] * u[j];
        for (int64_t j = 0; j <= i; ++j) step[j] += inverse[i * R + j] * y;
        norm += y * y;
      }
      const double quad = sums_.quad[at];
      settle(at, quad - norm, step.data(), std::isfinite(growth));
      if (!automatic_ || value_info_[at] != 0) continue;
      const double error = maha_error_by_inverse(sum_error, norm, growth, quad);
      cancels = cancels || !tolerable(error, quad - norm, logdet, in_.S);
    }
    return cancels;
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
  const bool automatic_, declining_;
  const double* inverses_;
  const Summary* summaries_;
  Summary* to_summaries_;
  double* z_;
  int32_t* value_info_;
  Scratch vectors_;
  Sums sums_;
};

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> log_prob_fwd_cpu(
    const Tensor& cov_factor, const Tensor& cov_diag, std::optional<Tensor> value, std::optional<Tensor> loc,
    std::optional<Tensor> mask, std::optional<double> eps, int64_t precision, std::optional<Tensor> known_chol_inv,
    std::optional<Tensor> known_summary, double maha, double logdet, double per_output) {
  const bool declining = static_cast<Precision>(precision) == Precision::declining;
  const Precision chosen = declining ? Precision::automatic : static_cast<Precision>(precision);
  const Inputs in(cov_factor, cov_diag, value, loc, mask, eps, chosen);
  const int64_t B = in.B, N = in.N, R = in.R, results = N > 0 ? N : 1;
  const bool wide =
      in.dtype == DType::f64 || mask;  // with a mask the caller adds what counts outputs, which may cancel
  const bool known = known_chol_inv.has_value();
  STD_TORCH_CHECK(known == known_summary.has_value(), "lrd: L^-1 and summary come together");
  Tensor result = empty({B, results}, wide ? ScalarType::Double : ScalarType::Float);
  // What is known is handed on as no elements: an output may not be an input.
  Tensor chol_inv = known ? empty({0}, ScalarType::Double) : empty({B, R, R}, ScalarType::Double);
  Tensor summary = known ? empty({0}, ScalarType::Double) : empty({B, 2}, ScalarType::Double);
  Tensor z = empty({B, N, R}, ScalarType::Double);
  Tensor value_info = empty({B, N}, ScalarType::Int);
  if (known) check_factorisation(in, *known_chol_inv, *known_summary);
  double* inverse = known ? nullptr : chol_inv.mutable_data_ptr<double>();
  double* summaries = known ? nullptr : summary.mutable_data_ptr<double>();
  Factorisation from;
  if (known)
    from = {known_chol_inv->const_data_ptr<double>(),
            reinterpret_cast<const Summary*>(known_summary->const_data_ptr<double>())};
  const Forward forward(in, chosen, declining, inverse, reinterpret_cast<Summary*>(summaries), from,
                        z.mutable_data_ptr<double>(), value_info.mutable_data_ptr<int32_t>());
  float* narrow = wide ? nullptr : result.mutable_data_ptr<float>();
  double* doubles = wide ? result.mutable_data_ptr<double>() : nullptr;
  const double constant = per_output * static_cast<double>(cov_diag.size(1));
  for (int64_t at = 0; at < B * results; ++at) {
    const double number = forward.result(at / results, at % results, maha, logdet, constant);
    if (wide)
      doubles[at] = number;
    else
      narrow[at] = static_cast<float>(number);
  }
  return {result, chol_inv, summary, z, value_info};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lrd, CPU, m) { m.impl("log_prob_fwd", boxed<&log_prob_fwd_cpu>); }

}  // namespace lrd
