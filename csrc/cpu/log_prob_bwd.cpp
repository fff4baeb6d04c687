// lrd::log_prob_bwd on the CPU: every row's gradients are its own, so blocks of rows run in parallel. Gaussians that
// share a factor are walked together, and their factor gradients summed before the one write.
#include <algorithm>
#include <cmath>
#include <tuple>
#include <vector>

#include "../core/arena.h"
#include "errors.h"
#include "forward.h"
#include "scratch.h"
#include "tensors.h"

namespace lrd {
namespace {

// Outputs of so many bytes are not in the caches any more when they are read.
constexpr int64_t kStreamedBytes = int64_t(16) << 20;

// Copies of L^-1 in the compute type, padded with zeros.
template <class A>
struct PaddedInverse {
  int64_t ld, elements;
  A *plain, *transposed;  // [R + kMaxTileRows, ld]

  template <class Memory>
  PaddedInverse(Memory& memory, int64_t R) : ld((R + 7) / 8 * 8), elements((R + kMaxTileRows) * ld) {
    memory.take(plain, elements);
    memory.take(transposed, elements);
  }

  void fill(const double* chol_inv, int64_t R) const {
    std::fill_n(plain, elements, A(0));
    std::fill_n(transposed, elements, A(0));
    for (int64_t i = 0; i < R; ++i)
      for (int64_t j = 0; j <= i; ++j) plain[i * ld + j] = transposed[j * ld + i] = A(chol_inv[i * R + j]);
  }
};

// Fills in chol_inv, chol_inv_t and ld.
template <class A>
void put_inverse(Arena& arena, const double* chol_inv, int64_t R, GramGrads* to) {
  const PaddedInverse<A> inverse(arena, R);
  inverse.fill(chol_inv, R);
  to->chol_inv = inverse.plain;
  to->chol_inv_t = inverse.transposed;
  to->ld = inverse.ld;
}

// float32 products where they were asked for, or where the forward pass certified that they are enough for every
// Gaussian of this factor. The mean leverage is at most R / S: with fewer rows than this, many
// would be of high leverage, each done again in double by itself, and all of them in double from the start are faster.
// Small ranks gain where their rows stay in registers: with one Gaussian and at most one value.
Compute choose_compute(const Inputs& in, Precision precision, const double* chol_inv, const Summary* summaries,
                       int64_t count) {
  const int64_t R = in.R;
  const bool pays = R >= kFloat32Rank || (R <= kSmallRank && count == 1 && in.N <= 1);
  bool enough = pays && in.S >= 16 * R;
  for (int64_t k = 0; k < count && enough; ++k) {
    enough = certified(summaries[k].growth) || std::isinf(summaries[k].growth);
    for (int64_t j = 0; j < R && R <= kSmallRank; ++j)
      enough = enough && chol_inv[k * R * R + j * (R + 1)] >= kFloat32Inverse;
  }
  return compute_for(in.dtype, precision == Precision::float32 || (precision == Precision::automatic && enough));
}

// grad [B, N] of any strides, float32 or float64, in double.
std::vector<double> read_grad(const Tensor& grad) {
  const int64_t rows = grad.size(0), columns = grad.size(1);
  std::vector<double> out(rows * columns);
  const bool wide = grad.scalar_type() == ScalarType::Double;
  STD_TORCH_CHECK(wide || grad.scalar_type() == ScalarType::Float, "lrd: grad must be float32 or float64");
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j) {
      const int64_t at = i * grad.stride(0) + j * grad.stride(1);
      out[i * columns + j] = wide ? grad.const_data_ptr<double>()[at] : double(grad.const_data_ptr<float>()[at]);
    }
  return out;
}

// An output that was not asked for is an empty tensor.
Tensor output(ScalarType dtype, bool wanted, std::initializer_list<int64_t> shape, bool swapped = false) {
  return wanted ? empty(shape, dtype, swapped) : empty({0}, dtype);
}

std::tuple<Tensor, Tensor, Tensor> log_prob_bwd_cpu(const Tensor& cov_factor, const Tensor& cov_diag,
                                                    std::optional<Tensor> value, std::optional<Tensor> loc,
                                                    std::optional<Tensor> mask, std::optional<double> eps,
                                                    int64_t precision, const Tensor& chol_inv, const Tensor& summary,
                                                    const Tensor& z, const Tensor& value_info, const Tensor& grad,
                                                    double maha, double logdet, bool need_factor, bool need_diag,
                                                    bool need_loc, bool sum_loc) {
  const Precision chosen = static_cast<Precision>(precision);
  const Inputs in(cov_factor, cov_diag, value, loc, mask, eps, chosen);
  const int64_t B = in.B, N = in.N, R = in.R, S = in.S;
  check_factorisation(in, chol_inv, summary);
  for (const Tensor* tensor : {&z, &value_info})
    STD_TORCH_CHECK(tensor->is_contiguous() && tensor->is_cpu(), "lrd: saved tensors must be contiguous on the CPU");
  STD_TORCH_CHECK(z.numel() == B * N * R && value_info.numel() == B * N,
                  "lrd: sizes of the saved tensors do not fit the inputs");
  STD_TORCH_CHECK(z.scalar_type() == ScalarType::Double, "lrd: z must be float64");
  STD_TORCH_CHECK(value_info.scalar_type() == ScalarType::Int, "lrd: value_info must be int32");
  STD_TORCH_CHECK(grad.dim() == 2 && grad.size(0) == B && grad.size(1) == std::max<int64_t>(N, 1) && grad.is_cpu(),
                  "lrd: sizes of grad do not fit: [B, max(N, 1)]");
  const std::vector<double> weights = read_grad(grad);

  // A failed value is NaN whatever the covariance: it pulls at nothing.
  std::vector<double> grad_maha(B * N), grad_logdet(B, 0.0);
  for (int64_t b = 0; b < B; ++b) {
    if (N == 0) grad_logdet[b] = logdet * weights[b];
    for (int64_t at = b * N; at < (b + 1) * N; ++at) {
      const double weight = value_info.const_data_ptr<int32_t>()[at] != 0 ? 0.0 : weights[at];
      grad_maha[at] = maha * weight;
      grad_logdet[b] += logdet * weight;
    }
  }

  // The factor's gradient is laid out as the factor is.
  const ScalarType dtype = cov_factor.scalar_type();
  Tensor grad_factor = output(dtype, need_factor, {in.F, S, R}, is_rank_major(cov_factor));
  Tensor grad_diag = output(dtype, need_diag, {B, S});
  const int64_t locs = sum_loc ? 1 : N;
  Tensor grad_loc = output(dtype, need_loc, {B, locs, S});
  const int64_t element = static_cast<int64_t>(cov_factor.element_size());
  char* to_factor = static_cast<char*>(grad_factor.mutable_data_ptr());
  char* to_diag = static_cast<char*>(grad_diag.mutable_data_ptr());
  char* to_loc = static_cast<char*>(grad_loc.mutable_data_ptr());

  const bool streamed = need_factor && grad_factor.numel() * element >= kStreamedBytes;

  if (B == 0) {  // a factor may stand without a Gaussian: its gradient is an empty sum
    if (need_factor) torch::stable::zero_(grad_factor);
    return {grad_factor, grad_diag, grad_loc};
  }

  const Kernels& isa = kernels();
  const auto& bwd_rows = isa.log_prob_bwd_rows[static_cast<int>(in.dtype)];
  const int64_t shared = in.items_per_factor();
  const int64_t rows = bwd_block_rows(R);
  const int64_t blocks = (S + rows - 1) / rows;
  const int64_t units = in.F * blocks;
  const double* from_inverse = chol_inv.const_data_ptr<double>();
  const Summary* from_summary = reinterpret_cast<const Summary*>(summary.const_data_ptr<double>());

  const Items each(in);
  const double* from_z = z.const_data_ptr<double>();
  const int32_t* from_info = value_info.const_data_ptr<int32_t>();
  const int64_t grad_step = need_factor ? grad_factor.stride(0) : 0;
  const int64_t grad_stride_s = need_factor ? grad_factor.stride(1) : 0;
  const int64_t grad_stride_r = need_factor ? grad_factor.stride(2) : 0;

  // The Gaussians of factor f with their L^-1 padded in the compute type.
  struct Prepared {
    explicit Prepared(int64_t bytes) : inverses(bytes) {}
    Scratch inverses;
    std::vector<GaussianInputs> items;
    std::vector<GramGrads> grads;
    Compute compute = Compute::f64;
    int64_t factor = -1;
  };
  const auto prepare = [&](Prepared& to, int64_t f) {
    to.factor = f;
    to.compute = choose_compute(in, chosen, from_inverse + f * shared * R * R, from_summary + f * shared, shared);
    to.items.resize(shared);
    to.grads.resize(shared);
    Arena arena(to.inverses.as<void>());
    for (int64_t k = 0; k < shared; ++k) {
      const int64_t b = f * shared + k;
      to.items[k] = each[b];
      to.grads[k] = {nullptr,
                     nullptr,
                     0,
                     from_z + b * N * R,
                     grad_maha.data() + b * N,
                     grad_logdet[b],
                     need_factor ? to_factor + f * grad_step * element : nullptr,
                     grad_stride_s,
                     grad_stride_r,
                     need_diag ? to_diag + b * S * element : nullptr,
                     need_loc ? to_loc + b * locs * S * element : nullptr,
                     S,
                     sum_loc,
                     from_inverse + b * R * R,
                     std::isinf(from_summary[b].growth),
                     from_info + b * N,
                     streamed};
      if (to.compute == Compute::f64)
        put_inverse<double>(arena, from_inverse + b * R * R, R, &to.grads[k]);
      else
        put_inverse<float>(arena, from_inverse + b * R * R, R, &to.grads[k]);
    }
  };
  const auto run = [&](const Prepared& prepared, int64_t unit, void* scratch) {
    const int64_t first = unit % blocks * rows;
    bwd_rows[static_cast<int>(prepared.compute)](prepared.items.data(), prepared.grads.data(), shared, first,
                                                 std::min(S, first + rows), scratch);
  };
  // One factor is prepared once for all workers; of several each worker prepares those it meets.
  const int64_t prepared_bytes = shared * bytes_of<PaddedInverse<double>>(R);
  Prepared only(in.F == 1 ? prepared_bytes : 0);
  if (in.F == 1) prepare(only, 0);
  const auto work = [&](int64_t begin, int64_t end) {
    Scratch scratch(isa.bwd_scratch[static_cast<int>(Compute::f64)](R));
    if (in.F == 1) {
      for (int64_t unit = begin; unit < end; ++unit) run(only, unit, scratch.as<void>());
      return;
    }
    Prepared own(prepared_bytes);
    for (int64_t unit = begin; unit < end; ++unit) {
      if (unit / blocks != own.factor) prepare(own, unit / blocks);
      run(own, unit, scratch.as<void>());
    }
  };
  if (in.B * S * (R + 4) < 16384)
    work(0, units);
  else
    in_parallel(units, work);
  return {grad_factor, grad_diag, grad_loc};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lrd, CPU, m) { m.impl("log_prob_bwd", boxed<&log_prob_bwd_cpu>); }

}  // namespace lrd
