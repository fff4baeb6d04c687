// lrd::gram_fwd on the CPU: chunks of rows are summed in parallel and committed in order, so that the result does not
// depend on the number of threads, while each worker holds one set of sums only.
#include <algorithm>
#include <atomic>
#include <thread>
#include <tuple>
#include <vector>

#include "scratch.h"
#include "tensors.h"

namespace lrd {
namespace {

// Depends on the problem alone.
int64_t chunk_rows(int64_t S) { return std::max<int64_t>(2048, (S + 255) / 256); }

struct Outputs {
  double* gram;  // [B, R, R]
  double* u;     // [B, N, R]
  double* quad;  // [B, N]
  double* log_diag;
  int64_t N, R;

  // Adds one chunk's sums to item b. The last chunk also mirrors G.
  void commit(int64_t b, const GramSums& sums, bool first, bool last) const {
    double* item_gram = gram + b * R * R;
    for (int64_t j = 0; j < R; ++j) add(item_gram + j * R, sums.sums + j * sums.ld, j + 1, first);
    for (int64_t n = 0; n < N; ++n) add(u + (b * N + n) * R, sums.sums + (R + n) * sums.ld, R, first);
    add(quad + b * N, sums.quad, N, first);
    add(log_diag + b, sums.log_diag, 1, first);
    if (last)
      for (int64_t j = 0; j < R; ++j)
        for (int64_t k = 0; k < j; ++k) item_gram[k * R + j] = item_gram[j * R + k];
  }

 private:
  static void add(double* to, const double* from, int64_t count, bool first) {
    if (first)
      std::copy(from, from + count, to);
    else
      for (int64_t i = 0; i < count; ++i) to[i] += from[i];
  }
};

std::tuple<Tensor, Tensor, Tensor, Tensor> gram_fwd_cpu(const Tensor& cov_factor, const Tensor& cov_diag,
                                                        std::optional<Tensor> value, std::optional<Tensor> loc,
                                                        std::optional<Tensor> mask, std::optional<double> eps,
                                                        int64_t precision) {
  const Inputs in(cov_factor, cov_diag, value, loc, mask, eps);
  const Compute compute = compute_for_precision(in.dtype, precision);
  const Kernels& isa = kernels();
  const auto gram_rows = isa.gram_rows[static_cast<int>(in.dtype)][static_cast<int>(compute)];

  Tensor gram = empty_double(cov_factor, {in.B, in.R, in.R});
  Tensor u = empty_double(cov_factor, {in.B, in.N, in.R});
  Tensor quad = empty_double(cov_factor, {in.B, in.N});
  Tensor log_diag = empty_double(cov_factor, {in.B});
  const Outputs out{gram.mutable_data_ptr<double>(),
                    u.mutable_data_ptr<double>(),
                    quad.mutable_data_ptr<double>(),
                    log_diag.mutable_data_ptr<double>(),
                    in.N,
                    in.R};

  const int64_t rows = chunk_rows(in.S);
  const int64_t chunks = std::max<int64_t>(1, (in.S + rows - 1) / rows);
  const int64_t units = in.B * chunks;
  if (units == 0) return {gram, u, quad, log_diag};
  const int64_t ld = padded_columns(isa, in.R, compute);
  const int64_t sums_size = (in.R + in.N) * ld;

  std::atomic<int64_t> next{0};
  std::vector<std::atomic<int64_t>> turn(in.B);  // how many chunks of each item are committed
  const auto work = [&](int64_t, int64_t) {
    Scratch scratch(gram_scratch_bytes(isa, in.R, compute));
    Scratch memory((sums_size + in.N + 1) * sizeof(double));
    const GramSums sums{memory.as<double>(), ld, memory.as<double>() + sums_size,
                        memory.as<double>() + sums_size + in.N};
    for (int64_t unit = next.fetch_add(1); unit < units; unit = next.fetch_add(1)) {
      const int64_t b = unit / chunks;
      const int64_t chunk = unit % chunks;
      std::fill_n(sums.sums, sums_size + in.N + 1, 0.0);
      gram_rows(in.item(b), chunk * rows, std::min(in.S, (chunk + 1) * rows), scratch.as<void>(), sums);
      // Units are handed out in order, so whoever holds the earliest open chunk never waits.
      while (turn[b].load(std::memory_order_acquire) != chunk) std::this_thread::yield();
      out.commit(b, sums, chunk == 0, chunk == chunks - 1);
      turn[b].store(chunk + 1, std::memory_order_release);
    }
  };
  const int64_t workers = std::min<int64_t>(units, torch::stable::get_num_threads());
  if (workers == 1 || in.B * in.S * (in.R + 4) < 32768)
    work(0, 1);
  else
    torch::stable::parallel_for(0, workers, 1, work);
  return {gram, u, quad, log_diag};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lrd, CPU, m) { m.impl("gram_fwd", TORCH_BOX(&gram_fwd_cpu)); }

}  // namespace lrd
