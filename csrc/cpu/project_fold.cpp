// project_fold_fwd: P V and the diagonal with what P V leaves out.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <vector>

#include "../core/kernels.h"
#include "scratch.h"
#include "tensors.h"

namespace lrd {
namespace {

// The transpose of basis [R, K] in the compute type, with rows of zeros up to a whole tile.
template <class A>
void pad_transposed(const double* basis, int64_t R, int64_t K, A* to) {
  for (int64_t k = 0; k < K; ++k)
    for (int64_t j = 0; j < R; ++j) to[k * R + j] = A(basis[j * K + k]);
  std::fill_n(to + K * R, kMaxTileRows * R, A(0));
}

std::tuple<Tensor, Tensor> project_fold_fwd_cpu(const Tensor& cov_factor, const Tensor& cov_diag, const Tensor& basis,
                                                bool fold) {
  const std::optional<Tensor> none;  // `in` refers to it
  const Inputs in(cov_factor, cov_diag, none, none, none, std::nullopt, 0);
  STD_TORCH_CHECK(in.F == in.B, "lrd: as many diagonals as factors");
  STD_TORCH_CHECK(basis.dim() == 3 && basis.size(0) == in.B && basis.size(1) == in.R && basis.is_contiguous() &&
                      basis.is_cpu() && basis.scalar_type() == ScalarType::Double,
                  "lrd: basis must be contiguous float64 [B, R, K] on the CPU");
  const int64_t B = in.B, S = in.S, R = in.R, K = basis.size(2);
  const bool rank_major = cov_factor.stride(2) != 1 && cov_factor.stride(1) == 1;
  Tensor factor = empty({B, S, K}, cov_factor.scalar_type(), rank_major);
  Tensor diag = empty({B, S}, cov_factor.scalar_type());
  const Compute compute = compute_for(in.dtype, true);
  const int64_t element = static_cast<int64_t>(cov_factor.element_size());
  char* to_factor = static_cast<char*>(factor.mutable_data_ptr());
  char* to_diag = static_cast<char*>(diag.mutable_data_ptr());

  const int64_t basis_elements = (K + kMaxTileRows) * R;
  Scratch bases(B * basis_elements * sizeof(double));
  for (int64_t b = 0; b < B; ++b) {
    const double* from = basis.const_data_ptr<double>() + b * R * K;
    if (compute == Compute::f64)
      pad_transposed(from, R, K, bases.as<double>() + b * basis_elements);
    else
      pad_transposed(from, R, K, bases.as<float>() + b * basis_elements);
  }
  const auto project = kernels().project_fold_rows[static_cast<int>(in.dtype)][static_cast<int>(compute)];
  const int64_t rows = project_block_rows(R, K);
  const int64_t blocks = (S + rows - 1) / rows;
  const auto work = [&](int64_t begin, int64_t end) {
    Scratch scratch(project_scratch_bytes(R, K, compute));
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t b = unit / blocks, first = unit % blocks * rows;
      const size_t bytes = compute == Compute::f64 ? sizeof(double) : sizeof(float);
      const Projection to{bases.as<char>() + b * basis_elements * bytes,
                          R,
                          K,
                          fold,
                          to_factor + b * factor.stride(0) * element,
                          factor.stride(1),
                          factor.stride(2),
                          to_diag + b * S * element};
      project(in.item(b), to, first, std::min(S, first + rows), scratch.as<void>());
    }
  };
  if (B * S * (R + K) < 16384)
    work(0, B * blocks);
  else
    torch::stable::parallel_for(0, B * blocks, 1, work);
  return {factor, diag};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lrd, CPU, m) { m.impl("project_fold_fwd", TORCH_BOX(&project_fold_fwd_cpu)); }

}  // namespace lrd
