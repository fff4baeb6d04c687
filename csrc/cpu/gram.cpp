// lrd::gram_fwd on the CPU: chunks of rows are summed in parallel and committed in order, so that the result does not
// depend on the number of threads, while each worker holds one set of sums only.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <numeric>
#include <thread>
#include <tuple>
#include <vector>

#include "capacitance.h"
#include "scratch.h"
#include "tensors.h"

namespace lrd {
namespace {

// Depends on the problem alone.
int64_t chunk_rows(int64_t S) { return std::max<int64_t>(2048, (S + 255) / 256); }

struct Outputs {
  double* gram;      // [B, R, R]
  double* u;         // [B, N, R]
  double* quad;      // [B, N]
  double* log_diag;  // [B]
  double* shift;     // [B, N, R]
};

void add(double* to, const double* from, int64_t count, bool first) {
  if (first)
    std::copy(from, from + count, to);
  else
    for (int64_t i = 0; i < count; ++i) to[i] += from[i];
}

// Calls rows(scratch, item, begin, end, sums) for every chunk of rows of every given item, in parallel, each with sums
// that start at zero, and then commit(item, sums, first, last) in the order of the chunks. `sums` has room for
// `sum_rows` rows of `ld`, N squares and one logarithm.
template <class Rows, class Commit>
void sum_chunks(const Inputs& in, const std::vector<int64_t>& items, size_t scratch_bytes, int64_t sum_rows, int64_t ld,
                const Rows& rows, const Commit& commit) {
  const int64_t step = chunk_rows(in.S);
  const int64_t chunks = std::max<int64_t>(1, (in.S + step - 1) / step);
  const int64_t units = static_cast<int64_t>(items.size()) * chunks;
  if (units == 0) return;
  const int64_t sums_size = sum_rows * ld;

  std::atomic<int64_t> next{0};
  std::vector<std::atomic<int64_t>> turn(items.size());  // how many chunks of each item are committed
  const auto work = [&](int64_t, int64_t) {
    Scratch scratch(scratch_bytes);
    Scratch memory((sums_size + in.N + 1) * sizeof(double));
    double* start = memory.as<double>();
    const GramSums sums{start, ld, start + sums_size, start + sums_size + in.N};
    for (int64_t unit = next.fetch_add(1); unit < units; unit = next.fetch_add(1)) {
      const int64_t position = unit / chunks;
      const int64_t chunk = unit % chunks;
      std::fill_n(start, sums_size + in.N + 1, 0.0);
      rows(scratch.as<void>(), items[position], chunk * step, std::min(in.S, (chunk + 1) * step), sums);
      // Units are handed out in order, so whoever holds the earliest open chunk never waits.
      while (turn[position].load(std::memory_order_acquire) != chunk) std::this_thread::yield();
      commit(items[position], sums, chunk == 0, chunk == chunks - 1);
      turn[position].store(chunk + 1, std::memory_order_release);
    }
  };
  const int64_t workers = std::min<int64_t>(units, torch::stable::get_num_threads());
  if (workers == 1 || units * std::min(step, in.S) * (in.R + 4) < 32768)
    work(0, 1);
  else
    torch::stable::parallel_for(0, workers, 1, work);
}

void sum_gram(const Inputs& in, const std::vector<int64_t>& items, Compute compute, const Outputs& out) {
  const Kernels& isa = kernels();
  const auto gram_rows = isa.gram_rows[static_cast<int>(in.dtype)][static_cast<int>(compute)];
  const int64_t R = in.R, N = in.N;
  sum_chunks(
      in, items, gram_scratch_bytes(isa, R, N, compute), R + N, padded_columns(isa, R, compute),
      [&](void* scratch, int64_t b, int64_t begin, int64_t end, const GramSums& sums) {
        gram_rows(in.item(b), begin, end, scratch, sums);
      },
      [&](int64_t b, const GramSums& sums, bool first, bool last) {
        double* gram = out.gram + b * R * R;
        for (int64_t j = 0; j < R; ++j) add(gram + j * R, sums.sums + j * sums.ld, j + 1, first);
        for (int64_t n = 0; n < N; ++n) add(out.u + (b * N + n) * R, sums.sums + (R + n) * sums.ld, R, first);
        add(out.quad + b * N, sums.quad, N, first);
        add(out.log_diag + b, sums.log_diag, 1, first);
        for (int64_t j = 0; last && j < R; ++j)
          for (int64_t k = 0; k < j; ++k) gram[k * R + j] = gram[j * R + k];
      });
}

// Puts the differences of the given items relative to out.shift: u becomes P^T w (r - P s) - s and quad its square plus
// |s|^2, from which the Mahalanobis term and C^-1 u - s follow as they did before, without the cancellation.
void sum_residuals(const Inputs& in, const std::vector<int64_t>& items, const Outputs& out) {
  const auto residual_rows = kernels().residual_rows[static_cast<int>(in.dtype)];
  const int64_t R = in.R, N = in.N;
  sum_chunks(
      in, items, bwd_scratch_bytes(R, Compute::f64), N, R,
      [&](void* scratch, int64_t b, int64_t begin, int64_t end, const GramSums& sums) {
        residual_rows(in.item(b), out.shift + b * N * R, begin, end, scratch, sums);
      },
      [&](int64_t b, const GramSums& sums, bool first, bool last) {
        add(out.u + b * N * R, sums.sums, N * R, first);
        add(out.quad + b * N, sums.quad, N, first);
        for (int64_t at = b * N * R; last && at < (b + 1) * N * R; ++at) {
          out.u[at] -= out.shift[at];
          out.quad[at / R] += out.shift[at] * out.shift[at];
        }
      });
}

// What an item still needs after its sums: nothing, its differences put relative to a shift, or all again in double.
enum class Verdict { good, cancels, imprecise };

// The certificate of item b, whose sums were formed in `compute`. The error of a Gram sum is about sum_error of
// sqrt(G_jj G_kk). It must come out small in L^-1 (the growth), and in each Mahalanobis term and log-density.
Verdict judge(const Inputs& in, const Outputs& out, int64_t b, Compute compute) {
  constexpr double kTolerance = 2.5e-7;
  const double sum_error = compute == Compute::f32 ? 0x1p-22 : 0x1p-50;
  const int64_t R = in.R, N = in.N;
  const double* gram = out.gram + b * R * R;
  Scratch scratch(2 * R * R * sizeof(double));
  double* chol = scratch.as<double>();
  const double growth = kernels().cholesky(gram, chol, chol + R * R, R);
  double logdet = out.log_diag[b];
  for (int64_t j = 0; j < R; ++j) logdet += 2.0 * std::log(chol[j * R + j]);
  if (compute == Compute::f32 && !(growth <= kFloat32Growth)) return Verdict::imprecise;
  if (!std::isfinite(growth) || !std::isfinite(logdet)) return Verdict::good;  // nothing will help
  bool cancels = false;
  for (int64_t at = b * N; at < (b + 1) * N; ++at) {
    double* z = out.shift + at * R;  // kept there if it is needed
    const double maha = out.quad[at] - solve_capacitance(chol, out.u + at * R, z, R);
    if (!std::isfinite(maha)) {
      std::fill_n(z, R, 0.0);
      continue;
    }
    double weighted = 0.0;
    for (int64_t j = 0; j < R; ++j) weighted += z[j] * z[j] * gram[j * R + j];
    const double error = sum_error * (weighted + 2.0 * std::sqrt(weighted * out.quad[at]) + out.quad[at] * 0x1p-29);
    const double density = 0.5 * std::abs(maha + logdet + double(in.S) * 1.8378770664093453);
    cancels = cancels || !(error <= kTolerance * maha && error <= kTolerance * density);
  }
  if (!cancels) std::fill_n(out.shift + b * N * R, N * R, 0.0);
  return cancels ? Verdict::cancels : Verdict::good;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gram_fwd_cpu(const Tensor& cov_factor, const Tensor& cov_diag,
                                                                std::optional<Tensor> value, std::optional<Tensor> loc,
                                                                std::optional<Tensor> mask, std::optional<double> eps,
                                                                int64_t precision) {
  const Inputs in(cov_factor, cov_diag, value, loc, mask, eps, precision);
  Tensor gram = empty_double(cov_factor, {in.B, in.R, in.R});
  Tensor u = empty_double(cov_factor, {in.B, in.N, in.R});
  Tensor quad = empty_double(cov_factor, {in.B, in.N});
  Tensor log_diag = empty_double(cov_factor, {in.B});
  Tensor shift = empty_double(cov_factor, {in.B, in.N, in.R});
  const Outputs out{gram.mutable_data_ptr<double>(), u.mutable_data_ptr<double>(), quad.mutable_data_ptr<double>(),
                    log_diag.mutable_data_ptr<double>(), shift.mutable_data_ptr<double>()};
  std::fill_n(out.shift, in.B * in.N * in.R, 0.0);

  // Worth trying float32 first where the products outweigh a second look at R x R numbers by far.
  const bool attempt = precision == 0 && in.R >= kFloat32Rank && in.S >= 32 * in.R;
  const Compute compute = compute_for(in.dtype, precision == 2 || attempt);
  std::vector<int64_t> items(in.B);
  std::iota(items.begin(), items.end(), 0);
  sum_gram(in, items, compute, out);
  if (precision == 2) return {gram, u, quad, log_diag, shift};

  std::vector<int64_t> imprecise, cancelling;
  const auto look_at = [&](int64_t b, Compute formed_in) {
    const Verdict verdict = judge(in, out, b, formed_in);
    if (verdict == Verdict::imprecise) imprecise.push_back(b);
    if (verdict == Verdict::cancels) cancelling.push_back(b);
  };
  // In double only squares beyond any that fit a typical value need the look.
  const auto suspicious = [&](int64_t b) {
    return std::any_of(out.quad + b * in.N, out.quad + (b + 1) * in.N,
                       [&](double square) { return square > 1e7 * double(in.S); });
  };
  for (int64_t b = 0; b < in.B; ++b)
    if (compute == Compute::f32 || suspicious(b)) look_at(b, compute);
  if (!imprecise.empty()) {
    const std::vector<int64_t> again = std::move(imprecise);
    sum_gram(in, again, Compute::f64, out);
    for (int64_t b : again)
      if (suspicious(b)) look_at(b, Compute::f64);
  }
  std::sort(cancelling.begin(), cancelling.end());
  sum_residuals(in, cancelling, out);
  return {gram, u, quad, log_diag, shift};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lrd, CPU, m) { m.impl("gram_fwd", TORCH_BOX(&gram_fwd_cpu)); }

}  // namespace lrd
