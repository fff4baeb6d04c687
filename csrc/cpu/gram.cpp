// Sums over the rows of a Gaussian on the CPU, and lrd::gram_fwd.
#include <algorithm>
#include <numeric>
#include <tuple>
#include <vector>

#include "errors.h"
#include "forward.h"
#include "sum_chunks.h"

namespace lrd {
namespace {

// u and quad of P^T w (r - P s) and its square become those of sum_residuals.
void relate_to_shift(const Inputs& in, int64_t b, const double* shift, const Sums& out) {
  for (int64_t at = b * in.N * in.R; at < (b + 1) * in.N * in.R; ++at) {
    out.u[at] -= shift[at];
    out.quad[at / in.R] += shift[at] * shift[at];
  }
}

}  // namespace

void sum_gram(const Inputs& in, const std::vector<int64_t>& items, Compute compute, const Chunks& chunks,
              const double* shift, const Sums& out) {
  const Kernels& isa = kernels();
  const int c = static_cast<int>(compute);
  const auto gram_rows = isa.gram_rows[static_cast<int>(in.dtype)][c];
  const int64_t R = in.R, N = in.N;
  const Items each(in);
  const SumSizes sizes{R + N, isa.padded_columns[c](R), N, R + 4};
  sum_chunks(
      items, in.S, chunks, isa.gram_scratch[c](R, N), sizes,
      [&](void* scratch, int64_t b, int64_t begin, int64_t end, const GramSums& sums) {
        GramSums wanted = sums;
        wanted.want_gram = out.gram != nullptr;
        gram_rows(each[b], shift ? shift + b * R : nullptr, begin, end, scratch, wanted);
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
  const Kernels& isa = kernels();
  const auto residual_rows = isa.residual_rows[static_cast<int>(in.dtype)];
  const int64_t R = in.R, N = in.N;
  const Items each(in);
  sum_chunks(
      items, in.S, all_rows(in.S), isa.residual_scratch(R), SumSizes{N, R, N, R + 4},
      [&](void* scratch, int64_t b, int64_t begin, int64_t end, const GramSums& sums) {
        residual_rows(each[b], shift + b * N * R, begin, end, scratch, sums);
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
  const Precision chosen = static_cast<Precision>(precision);
  const Inputs in(cov_factor, cov_diag, value, loc, mask, eps, chosen);
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
  sum_gram(in, items, compute_for(in.dtype, chosen == Precision::float32), all_rows(in.S), nullptr, out);
  mirror(to_gram, B, R);
  return {gram, u, quad, log_diag};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lrd, CPU, m) { m.impl("gram_fwd", boxed<&gram_fwd_cpu>); }

}  // namespace lrd
