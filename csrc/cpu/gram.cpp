// Sums over rows on the CPU, and lrd::gram_fwd. Chunks of rows are summed in parallel and committed in order, so that
// the result does not depend on the number of threads, while each worker holds one set of sums only.
#include <algorithm>
#include <atomic>
#include <numeric>
#include <thread>
#include <tuple>
#include <vector>

#include "forward.h"
#include "scratch.h"

namespace lrd {
namespace {

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
void sum_chunks(const Inputs& in, const std::vector<int64_t>& items, const Chunks& chunks, size_t scratch_bytes,
                int64_t sum_rows, int64_t ld, const Rows& rows, const Commit& commit) {
  const int64_t units = static_cast<int64_t>(items.size()) * chunks.count;
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
      const int64_t position = unit / chunks.count;
      const int64_t chunk = unit % chunks.count;
      const int64_t begin = chunk * chunks.step;
      std::fill_n(start, sums_size + in.N + 1, 0.0);
      rows(scratch.as<void>(), items[position], begin, std::min(in.S, begin + chunks.rows), sums);
      // Units are handed out in order, so whoever holds the earliest open chunk never waits.
      while (turn[position].load(std::memory_order_acquire) != chunk) std::this_thread::yield();
      commit(items[position], sums, chunk == 0, chunk == chunks.count - 1);
      turn[position].store(chunk + 1, std::memory_order_release);
    }
  };
  const int64_t workers = std::min<int64_t>(units, torch::stable::get_num_threads());
  if (workers == 1 || units * std::min(chunks.rows, in.S) * (in.R + 4) < 32768)
    work(0, 1);
  else
    torch::stable::parallel_for(0, workers, 1, work);
}

// u and quad of P^T w (r - P s) and its square become those of sum_residuals.
void relate_to_shift(const Inputs& in, int64_t b, const double* shift, const Sums& out) {
  for (int64_t at = b * in.N * in.R; at < (b + 1) * in.N * in.R; ++at) {
    out.u[at] -= shift[at];
    out.quad[at / in.R] += shift[at] * shift[at];
  }
}

}  // namespace

Chunks all_rows(int64_t S) {
  const int64_t rows = std::max<int64_t>(2048, (S + 255) / 256);
  return {std::max<int64_t>(1, (S + rows - 1) / rows), rows, rows};
}

void sum_gram(const Inputs& in, const std::vector<int64_t>& items, Compute compute, const Chunks& chunks,
              const double* shift, const Sums& out) {
  const Kernels& isa = kernels();
  const auto gram_rows = isa.gram_rows[static_cast<int>(in.dtype)][static_cast<int>(compute)];
  const int64_t R = in.R, N = in.N;
  sum_chunks(
      in, items, chunks, gram_scratch_bytes(isa, R, N, compute), R + N, padded_columns(isa, R, compute),
      [&](void* scratch, int64_t b, int64_t begin, int64_t end, const GramSums& sums) {
        GramSums wanted = sums;
        wanted.want_gram = out.gram != nullptr;
        gram_rows(in.item(b), shift ? shift + b * R : nullptr, begin, end, scratch, wanted);
      },
      [&](int64_t b, const GramSums& sums, bool first, bool last) {
        for (int64_t j = 0; j < R && out.gram; ++j)
          add(out.gram + (b * R + j) * R, sums.sums + j * sums.ld, j + 1, first);
        for (int64_t n = 0; n < N; ++n) add(out.u + (b * N + n) * R, sums.sums + (R + n) * sums.ld, R, first);
        add(out.quad + b * N, sums.quad, N, first);
        add(out.log_diag + b, sums.log_diag, 1, first);
        if (last && shift) relate_to_shift(in, b, shift, out);
      });
}

void sum_residuals(const Inputs& in, const std::vector<int64_t>& items, const double* shift, const Sums& out) {
  const auto residual_rows = kernels().residual_rows[static_cast<int>(in.dtype)];
  const int64_t R = in.R, N = in.N;
  sum_chunks(
      in, items, all_rows(in.S), bwd_scratch_bytes(R, Compute::f64), N, R,
      [&](void* scratch, int64_t b, int64_t begin, int64_t end, const GramSums& sums) {
        residual_rows(in.item(b), shift + b * N * R, begin, end, scratch, sums);
      },
      [&](int64_t b, const GramSums& sums, bool first, bool last) {
        add(out.u + b * N * R, sums.sums, N * R, first);
        add(out.quad + b * N, sums.quad, N, first);
        if (last) relate_to_shift(in, b, shift, out);
      });
}

namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor> gram_fwd_cpu(const Tensor& cov_factor, const Tensor& cov_diag,
                                                        std::optional<Tensor> value, std::optional<Tensor> loc,
                                                        std::optional<Tensor> mask, std::optional<double> eps,
                                                        int64_t precision) {
  const Inputs in(cov_factor, cov_diag, value, loc, mask, eps, precision);
  const int64_t B = in.B, N = in.N, R = in.R;
  Tensor gram = empty({B, R, R}, ScalarType::Double);
  Tensor u = empty({B, N, R}, ScalarType::Double);
  Tensor quad = empty({B, N}, ScalarType::Double);
  Tensor log_diag = empty({B}, ScalarType::Double);
  double* to_gram = gram.mutable_data_ptr<double>();
  const Sums out{to_gram, u.mutable_data_ptr<double>(), quad.mutable_data_ptr<double>(),
                 log_diag.mutable_data_ptr<double>()};
  std::vector<int64_t> items(B);
  std::iota(items.begin(), items.end(), 0);
  sum_gram(in, items, compute_for(in.dtype, precision == 2), all_rows(in.S), nullptr, out);
  for (int64_t b = 0; b < B; ++b)
    for (int64_t j = 0; j < R; ++j)
      for (int64_t k = 0; k < j; ++k) to_gram[(b * R + k) * R + j] = to_gram[(b * R + j) * R + k];
  return {gram, u, quad, log_diag};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lrd, CPU, m) { m.impl("gram_fwd", TORCH_BOX(&gram_fwd_cpu)); }

}  // namespace lrd
